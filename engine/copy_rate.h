// The memory rate that the profiler compares ops with: what a large copy reaches on this machine.
#pragma once

#include "engine/device.h"

namespace mixtape::detail {

/// Bytes a second, read and written, of the best of a few copies of 64 MiB (CPU, with all threads)
/// or 256 MiB (CUDA). Measured at the first call for a device, about 0.1 s; 0 if there is no memory
/// for it. Takes nothing from the caching allocators.
double copy_rate(Device device);

}  // namespace mixtape::detail
