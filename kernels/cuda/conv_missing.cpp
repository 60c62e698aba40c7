// Convolutions in a build with CUDA but without cuDNN: they say what is missing. Pooling and the
// bias gradient need no cuDNN (pool.cu, conv_bias.cpp).
#include "kernels/conv.h"

namespace mixtape::kernels::cuda {
namespace {

[[noreturn]] void throw_missing() {
  MT_THROW(
      "conv2d: this build has no cuDNN, which convolutions on CUDA need: install cuDNN 9 and "
      "configure again (CUDNN_ROOT says where it is)");
}

}  // namespace

std::size_t conv2d_workspace_bytes(const Stream&, ConvPass, const Conv2dArgs&) { throw_missing(); }
void conv2d_forward(const Stream&, const Conv2dArgs&, Workspace) { throw_missing(); }
void conv2d_backward_data(const Stream&, const Conv2dArgs&, Workspace) { throw_missing(); }
void conv2d_backward_weight(const Stream&, const Conv2dArgs&, float, Workspace) { throw_missing(); }

}  // namespace mixtape::kernels::cuda
