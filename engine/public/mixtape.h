// Mixtape's one public header: everything a user needs, and nothing heavy. It only includes other
// headers; none of them holds an Eigen or CUDA type, and a file that includes it compiles in under
// 1.5 seconds (tests/build checks that).
#pragma once

#include "engine/anomaly.h"
#include "engine/autocast.h"
#include "engine/build_info.h"
#include "engine/capture.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "engine/op.h"
#include "engine/profiler.h"
#include "engine/tensor.h"
#include "engine/thread_pool.h"
#include "nn/attention.h"
#include "nn/checkpoint.h"
#include "nn/init.h"
#include "nn/layers.h"
#include "nn/module.h"
#include "nn/transformer.h"
#include "ops/ops.h"
#include "optim/clip.h"
#include "optim/grad_scaler.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
