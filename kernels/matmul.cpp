// Scratch sizes of matrix products by device.
#include "kernels/matmul.h"

namespace mixtape::kernels {

std::size_t matmul_workspace_bytes(Device device) {
  return device.is_cuda() ? std::size_t{32} << 20 : 0;  // cuBLASLt's recommendation for Hopper
}

void check_backward_of(const MatmulArgs& x) {
  if (x.backward_of == Activation::none) return;
  MT_CHECK(x.beta == 0 && !x.bias && !x.pre_activation && x.activation == Activation::none,
           "matmul: backward_of excludes beta, bias, activation and pre_activation");
  MT_CHECK(
      x.saved && x.saved.dim() == 2 && x.saved.sizes == x.out.sizes && x.saved.dtype == x.out.dtype,
      "matmul: backward_of expects saved values of out's shape ", x.out.sizes, " and dtype ",
      x.out.dtype, ", got ", x.saved.sizes, ' ', x.saved.dtype);
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
