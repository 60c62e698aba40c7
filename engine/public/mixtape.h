// Mixtape's one public header: everything a user needs, and nothing heavy. It only includes other
// headers; none of them holds an Eigen or CUDA type, and a file that includes it compiles in under
// 1.5 seconds (tests/build checks that).
#pragma once

#include "engine/build_info.h"
#include "engine/check.h"
#include "engine/device.h"
#include "engine/dtype.h"
#include "engine/half.h"
#include "engine/shape.h"
#include "engine/stream.h"
#include "engine/thread_pool.h"
