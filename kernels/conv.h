// 2-D convolution and pooling. Layout is given by strides: NCHW contiguous or channels-last.
// Legend: N batch, C input channels, H W input size, O output channels, R S kernel size, P Q output
// size, G groups. x (N, C, H, W), w (O, C/G, R, S), y (N, O, P, Q), bias (O). x, w, y share one
// floating dtype (dw and dbias may be f32); accumulation is float (double for f64). On CUDA all of
// x, w, y share one layout.
#pragma once

#include "kernels/kernel.h"
#include "kernels/matmul.h"

namespace mixtape::kernels {

struct ConvGeometry {
  std::int64_t stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};
  std::int64_t groups = 1;
};
struct PoolGeometry {
  std::int64_t kernel[2] = {2, 2}, stride[2] = {2, 2}, padding[2] = {0, 0};
  bool count_include_pad = true;  // average pooling's divisor
  /// Output p of P covers inputs floor(p H / P) .. ceil((p + 1) H / P), columns likewise; the other
  /// fields are not read.
  bool adaptive = false;
};

struct Conv2dArgs {
  View x = {}, w = {}, y = {};  // y: the output, or the incoming gradient in the backward kernels
  View bias = {};               // optional (forward)
  Activation activation = Activation::none;  // none or relu (forward, after the bias)
  ConvGeometry geometry;
};

enum class ConvPass : std::uint8_t { forward, backward_data, backward_weight };
/// Scratch for one pass; may differ by device and shape.
std::size_t conv2d_workspace_bytes(const Stream& stream, ConvPass pass, const Conv2dArgs& args);
/// Scratch for conv2d_backward_bias; 0 for the CPU.
std::size_t conv2d_backward_bias_workspace_bytes(const View& dy);

#define MT_DECLARE_CONV                                                                        \
  void conv2d_forward(const Stream&, const Conv2dArgs& args, Workspace workspace);             \
  /* args.x is the output dx */                                                                \
  void conv2d_backward_data(const Stream&, const Conv2dArgs& args, Workspace workspace);       \
  /* args.w is the output dw = (computed) + beta * dw; f32 allowed for 16-bit x (cuDNN */      \
  /* computes in x's dtype: one rounding to it, then the sum in f32) */                        \
  void conv2d_backward_weight(const Stream&, const Conv2dArgs& args, float beta,               \
                              Workspace workspace);                                            \
  /* db = sum of dy (N, O, P, Q) over N, P, Q, plus beta * db */                               \
  void conv2d_backward_bias(const Stream&, View db, float beta, View dy, Workspace workspace); \
  /* indices (N, C, P, Q) i32: h * W + w of the first maximum (NaN counts as largest) */       \
  void max_pool2d_forward(const Stream&, View y, View indices, View x,                         \
                          const PoolGeometry& geometry);                                       \
  /* dx is written whole, zeros included; windows may overlap */                               \
  void max_pool2d_backward(const Stream&, View dx, View dy, View indices,                      \
                           const PoolGeometry& geometry);                                      \
  void avg_pool2d_forward(const Stream&, View y, View x, const PoolGeometry& geometry);        \
  void avg_pool2d_backward(const Stream&, View dx, View dy, const PoolGeometry& geometry);

namespace cpu {
MT_DECLARE_CONV
std::size_t conv2d_workspace_bytes(ConvPass pass, const Conv2dArgs& args);
}  // namespace cpu
namespace cuda {
MT_DECLARE_CONV
std::size_t conv2d_workspace_bytes(const Stream& stream, ConvPass pass, const Conv2dArgs& args);
std::size_t conv2d_backward_bias_workspace_bytes(const View& dy);
}  // namespace cuda
#undef MT_DECLARE_CONV

inline constexpr Kernel conv2d_forward{"conv2d_forward", cpu::conv2d_forward,
                                       MT_CUDA(cuda::conv2d_forward)};
inline constexpr Kernel conv2d_backward_data{"conv2d_backward_data", cpu::conv2d_backward_data,
                                             MT_CUDA(cuda::conv2d_backward_data)};
inline constexpr Kernel conv2d_backward_weight{
    "conv2d_backward_weight", cpu::conv2d_backward_weight, MT_CUDA(cuda::conv2d_backward_weight)};
inline constexpr Kernel conv2d_backward_bias{"conv2d_backward_bias", cpu::conv2d_backward_bias,
                                             MT_CUDA(cuda::conv2d_backward_bias)};
inline constexpr Kernel max_pool2d_forward{"max_pool2d_forward", cpu::max_pool2d_forward,
                                           MT_CUDA(cuda::max_pool2d_forward)};
inline constexpr Kernel max_pool2d_backward{"max_pool2d_backward", cpu::max_pool2d_backward,
                                            MT_CUDA(cuda::max_pool2d_backward)};
inline constexpr Kernel avg_pool2d_forward{"avg_pool2d_forward", cpu::avg_pool2d_forward,
                                           MT_CUDA(cuda::avg_pool2d_forward)};
inline constexpr Kernel avg_pool2d_backward{"avg_pool2d_backward", cpu::avg_pool2d_backward,
                                            MT_CUDA(cuda::avg_pool2d_backward)};

}  // namespace mixtape::kernels
