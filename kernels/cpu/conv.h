// What the CPU's convolution paths share: the checked problem, with images and weights reduced to
// the two layouts there are.
//
// oneDNN computes f32 (16-bit types are converted to it, chunk by chunk) where the build has it;
// f64 and builds without oneDNN take im2col and gemm().
#pragma once

#include "kernels/conv.h"
#include "kernels/cpu/convert.h"

namespace mixtape::kernels::cpu {

/// A batch of images, each dense: element (n, c, i, j) is at n * batch + c * channel +
/// (i * width + j) * pixel.
struct Image {
  void* data;
  Dtype dtype;
  std::int64_t count, channels, height, width;
  std::int64_t batch, channel, pixel;
  bool channels_last;

  std::int64_t pixels() const { return height * width; }
  std::int64_t elements() const { return channels * pixels(); }  // of one image
  /// Address of element (n, c, pixel).
  void* at(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return element_address(data, dtype, n * batch + c * channel + p * pixel);
  }
};

/// A (N, C, H, W) view as Image; throws unless it is NCHW or channels-last (any batch stride).
Image make_image(const char* op, const char* name, const View& v);

struct ConvProblem {
  Image x, y;
  Image w;  // (O, C / G, R, S)
  View bias;
  Activation activation;
  std::int64_t groups, stride[2], padding[2], dilation[2];

  /// Per group: input channels, output channels, and products in one output element.
  std::int64_t group_in() const { return w.channels; }
  std::int64_t group_out() const { return y.channels / groups; }
  std::int64_t depth() const { return w.elements(); }
};

/// Checks shapes, dtypes and layouts; `op` starts the messages.
ConvProblem make_problem(const char* op, const Conv2dArgs& args);

namespace im2col {
void forward(const ConvProblem& problem, Workspace workspace);
void backward_data(const ConvProblem& problem, Workspace workspace);
void backward_weight(const ConvProblem& problem, float beta, Workspace workspace);
std::size_t workspace_bytes(ConvPass pass, const ConvProblem& problem);
}  // namespace im2col

#if defined(MIXTAPE_WITH_ONEDNN)
namespace onednn {
void forward(const ConvProblem& problem);
void backward_data(const ConvProblem& problem);
void backward_weight(const ConvProblem& problem, float beta, Workspace workspace);
std::size_t backward_weight_workspace_bytes(const ConvProblem& problem);
}  // namespace onednn
#endif

/// dw = sum over `count` partial gradients + beta * dw. Element (o, c, p) of partial i is at
/// partial[i * O * K + o * K + c * k_channel + p * k_pixel], K = depth(), p the kernel position.
template <class C>
void reduce_weight_gradients(const Image& dw, const C* partial, std::int64_t count,
                             std::int64_t k_channel, std::int64_t k_pixel, float beta);

}  // namespace mixtape::kernels::cpu
