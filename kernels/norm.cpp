// Scratch sizes of the normalisation kernels by device.
#include "kernels/norm.h"

namespace mixtape::kernels {

std::size_t layer_norm_backward_workspace_bytes(Device device, std::int64_t rows,
                                                std::int64_t columns) {
#if defined(MIXTAPE_WITH_CUDA)
  if (device.is_cuda()) return cuda::layer_norm_backward_workspace_bytes(rows, columns);
#endif
  MT_CHECK(device.is_cpu(), "layer_norm_backward: this build has no CUDA backend");
  return cpu::layer_norm_backward_workspace_bytes(rows, columns);
}

std::size_t rms_norm_backward_workspace_bytes(Device device, std::int64_t rows,
                                              std::int64_t columns) {
#if defined(MIXTAPE_WITH_CUDA)
  if (device.is_cuda()) return cuda::rms_norm_backward_workspace_bytes(rows, columns);
#endif
  MT_CHECK(device.is_cpu(), "rms_norm_backward: this build has no CUDA backend");
  return cpu::rms_norm_backward_workspace_bytes(rows, columns);
}

}  // namespace mixtape::kernels
