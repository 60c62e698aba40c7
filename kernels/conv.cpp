// Scratch sizes of convolution by device.
#include "kernels/conv.h"

namespace mixtape::kernels {

std::size_t conv2d_workspace_bytes(const Stream& stream, ConvPass pass, const Conv2dArgs& args) {
#if defined(MIXTAPE_WITH_CUDA)
  if (stream.device().is_cuda()) return cuda::conv2d_workspace_bytes(stream, pass, args);
#endif
  MT_CHECK(stream.device().is_cpu(), "conv2d: this build has no CUDA backend");
  return cpu::conv2d_workspace_bytes(pass, args);
}

std::size_t conv2d_backward_bias_workspace_bytes(const View& dy) {
#if defined(MIXTAPE_WITH_CUDA)
  if (dy.device.is_cuda()) return cuda::conv2d_backward_bias_workspace_bytes(dy);
#endif
  MT_CHECK(dy.device.is_cpu(), "conv2d: this build has no CUDA backend");
  return 0;
}

}  // namespace mixtape::kernels
