// Batch normalisation (Ioffe and Szegedy 2015), with a residual addition and ReLU behind it.
//
// N samples of C channels with S values each: x, y, residual, dy, dx are (N, C, S), packed either
// planar (strides C S, S, 1) or channels-last (C S, 1, C), all of a call alike and of one floating
// dtype. weight, bias, running_mean, running_var: (C) of any floating dtype, contiguous. Statistics
// are in float (double for f64), of squares about a mean near the data's (never E[x^2] - E[x]^2).
// Deterministic: the order of every sum follows from N, C and S.
#pragma once

#include "kernels/channels.h"
#include "kernels/kernel.h"

namespace mixtape::kernels {

/// y = (x - mean) * rstd * weight + bias [+ residual] [max 0; NaN stays NaN].
struct BatchNormForward {
  View y = {};  // out
  /// (3, C) f32 (f64 for f64): mean, what rounding took away from it, and 1 / sqrt(var + eps). Out
  /// in training (required), not used else.
  View statistics = {};
  /// Optional and updated in training, read else.
  View running_mean = {}, running_var = {};
  View batches = {};  // optional, i64 of one element: counted up in training
  View x = {};
  View residual = {}, weight = {}, bias = {};  // optional
  bool training = true, relu = false;
  /// running = (1 - momentum) running + momentum new; negative: 1 / batches in place of momentum.
  double momentum = 0.1, eps = 1e-5;
};

struct BatchNormBackward {
  View dx = {};                          // out, optional
  View dresidual = {};                   // out, optional, only with y: dy where y > 0, else 0
  View dweight = {}, dbias = {};         // out, optional, (C), any floating dtype
  float beta_weight = 0, beta_bias = 0;  // 1 accumulates into dweight, dbias
  View dy = {}, x = {};
  View y = {};  // the output, where a ReLU was fused
  View weight = {};
  View statistics = {};                      // as forward left them; in training
  View running_mean = {}, running_var = {};  // as forward read them; absent in training
  double eps = 1e-5;
};

/// What both backends check first; gives x's layout. Messages start with the kernel's name.
ChannelLayout check_batch_norm(const BatchNormForward& args, Workspace workspace);
ChannelLayout check_batch_norm(const BatchNormBackward& args, Workspace workspace);

/// Scratch of either pass for x (N, C, S); the CPU takes none for planar x.
std::size_t batch_norm_workspace_bytes(const View& x);

#define MT_DECLARE_BATCH_NORM                                                                  \
  void batch_norm_forward(const Stream&, const BatchNormForward& args, Workspace workspace);   \
  void batch_norm_backward(const Stream&, const BatchNormBackward& args, Workspace workspace); \
  std::size_t batch_norm_workspace_bytes(const View& x);

namespace cpu {
MT_DECLARE_BATCH_NORM
}  // namespace cpu
namespace cuda {
MT_DECLARE_BATCH_NORM
}  // namespace cuda
#undef MT_DECLARE_BATCH_NORM

inline constexpr Kernel batch_norm_forward{"batch_norm_forward", cpu::batch_norm_forward,
                                           MT_CUDA(cuda::batch_norm_forward)};
inline constexpr Kernel batch_norm_backward{"batch_norm_backward", cpu::batch_norm_backward,
                                            MT_CUDA(cuda::batch_norm_backward)};

}  // namespace mixtape::kernels
