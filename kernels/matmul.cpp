// Scratch sizes of matrix products by device.
#include "kernels/matmul.h"

namespace mixtape::kernels {

std::size_t matmul_workspace_bytes(Device device) {
  return device.is_cuda() ? std::size_t{32} << 20 : 0;  // cuBLASLt's recommendation for Hopper
}

std::size_t activation_backward_workspace_bytes(Device device, std::int64_t rows,
                                                std::int64_t columns) {
#if defined(MIXTAPE_WITH_CUDA)
  if (device.is_cuda()) return cuda::activation_backward_workspace_bytes(rows, columns);
#else
  static_cast<void>(rows);
  static_cast<void>(columns);
#endif
  MT_CHECK(device.is_cpu(), "activation_backward: this build has no CUDA backend");
  return 0;
}

}  // namespace mixtape::kernels
