// Group normalisation (Wu and He 2018).
//
// N samples of C channels in G groups, S values a channel: x, y, dy, dx are (N, C, S), packed
// either planar (strides C S, S, 1) or channels-last (C S, 1, C), all of a call alike and of one
// floating dtype. weight, bias: (C) of any floating dtype, contiguous. Statistics in float (double
// for f64), variance about the mean. Deterministic.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

struct GroupNormForward {
  View y = {};     // out
  View mean = {};  // out, (N, G) f64, so that no large mean is rounded
  View rstd = {};  // out, (N, G) f32 (f64 for f64)
  View x = {};
  View weight = {}, bias = {};  // optional
  std::int64_t groups = 1;
  double eps = 1e-5;
};

struct GroupNormBackward {
  View dx = {};                          // out, optional
  View dweight = {}, dbias = {};         // out, optional, (C), any floating dtype
  float beta_weight = 0, beta_bias = 0;  // 1 accumulates into dweight, dbias
  View dy = {}, x = {}, weight = {}, mean = {}, rstd = {};
  std::int64_t groups = 1;
};

/// Scratch for the sums behind dx, dweight and dbias.
std::size_t group_norm_backward_workspace_bytes(const View& x);

#define MT_DECLARE_GROUP_NORM                                                                  \
  void group_norm_forward(const Stream&, const GroupNormForward& args);                        \
  void group_norm_backward(const Stream&, const GroupNormBackward& args, Workspace workspace); \
  std::size_t group_norm_backward_workspace_bytes(const View& x);

namespace cpu {
MT_DECLARE_GROUP_NORM
}  // namespace cpu
namespace cuda {
MT_DECLARE_GROUP_NORM
}  // namespace cuda
#undef MT_DECLARE_GROUP_NORM

inline constexpr Kernel group_norm_forward{"group_norm_forward", cpu::group_norm_forward,
                                           MT_CUDA(cuda::group_norm_forward)};
inline constexpr Kernel group_norm_backward{"group_norm_backward", cpu::group_norm_backward,
                                            MT_CUDA(cuda::group_norm_backward)};

}  // namespace mixtape::kernels
