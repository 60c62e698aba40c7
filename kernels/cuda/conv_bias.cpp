// The bias gradient of convolutions, in either layout; needs no cuDNN.
#include "kernels/conv.h"
#include "kernels/cuda/conv_epilogue.h"
#include "kernels/cuda/conv_layout.h"
#include "kernels/cuda/cuda_check.h"

namespace mixtape::kernels::cuda {

std::size_t conv2d_backward_bias_workspace_bytes(const View& dy) {
  const std::int64_t pixels = dy.size(2) * dy.size(3);
  if (layout_of("conv2d_backward_bias", "dy", dy) == ConvLayout::channels_last)
    return activation_backward_workspace_bytes(dy.size(0) * pixels, dy.size(1));
  return planar_channel_sums_workspace_bytes(dy.size(0), dy.size(1), pixels);
}

void conv2d_backward_bias(const Stream& stream, View db, float beta, View dy, Workspace workspace) {
  const ConvLayout layout = layout_of("conv2d_backward_bias", "dy", dy);
  MT_CHECK(db.dim() == 1 && db.size(0) == dy.size(1), "conv2d_backward_bias: expected db of ",
           dy.size(1), " elements, got ", db.sizes);
  const CudaDeviceGuard device(stream.device());
  if (layout == ConvLayout::channels_last)
    activation_backward(stream, Activation::none, {}, db, beta, as_rows(dy), {}, workspace);
  else
    planar_channel_sums(stream, db, beta, as_planes(dy), workspace);
}

}  // namespace mixtape::kernels::cuda
