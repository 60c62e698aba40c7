// The checked CUDA call, for kernels: it lives with the engine's own use of the runtime.
#pragma once

#include "engine/cuda/cuda_check.h"
