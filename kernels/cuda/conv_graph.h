// A convolution pass as a cuDNN operation graph.
//
// The bias joins the product; ReLU does not, because cuDNN's engines do not promise to keep a NaN
// (their note STRICT_NAN_PROP): an overflow has to reach the loss. What cuDNN 9.19 does not offer
// on any engine is an f32 weight gradient of 16-bit operands. Legend as in kernels/conv.h: x (N, C,
// H, W), w (O, C/G, R, S), y (N, O, P, Q).
#pragma once

#include "kernels/conv.h"
#include "kernels/cuda/cudnn_graph.h"

namespace mixtape::kernels::cuda {

/// Everything a plan depends on. Compared and hashed by its bytes: no padding.
struct ConvKey {
  std::int64_t n, c, h, w, o, r, s, p, q;
  std::int64_t stride[2], padding[2], dilation[2];
  std::int32_t device;
  ConvPass pass;
  Dtype dtype;
  bool bias;           // forward: added in the same kernel
  bool channels_last;  // all operands; else NCHW
  bool tf32, deterministic;
  std::uint8_t alignment;  // bytes, of every operand: 16 or less
  std::uint8_t unused[5];
  std::int64_t groups;
};

/// Unique ids of the operands in every graph.
inline constexpr std::int64_t kConvX = 1, kConvW = 2, kConvY = 3, kConvBias = 4;

/// Packed strides of an (a, b, c, d) operand in the key's layout.
void conv_strides(const std::int64_t (&dims)[4], bool channels_last, std::int64_t (&strides)[4]);

/// Plans that compute the key's pass, best estimate first, at most `count`, none of which needs
/// more than `max_workspace_bytes`. Empty if cuDNN has none (an epilogue or a type it does not
/// support). f32 without tf32 keeps to engines that multiply in f32.
std::vector<ExecutionPlan> conv_candidates(const ConvKey& key, const CudnnTarget& target,
                                           std::size_t count, std::size_t max_workspace_bytes);

}  // namespace mixtape::kernels::cuda
