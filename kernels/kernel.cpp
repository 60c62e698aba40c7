#include "kernels/kernel.h"

#include "engine/cuda/backend.h"

namespace mixtape::detail {

void throw_no_backend(const char* kernel, Device device) {
  check_device(kernel, device);
  MT_THROW(kernel, ": no implementation for ", device, " in this build");
}

void check_after_kernel(const char* kernel, const Stream& stream) {
  cudart::check_kernel(kernel, stream.device().index, stream.native(), sync_mode());
}

}  // namespace mixtape::detail
