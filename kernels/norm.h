// Layer normalisation (Ba, Kiros and Hinton 2016) and root-mean-square normalisation (Zhang and
// Sennrich 2019) over rows, alone or fused with a residual addition.
//
// N rows of C elements; x, y, residual, sum, dy, dx are row-major (N, C), of any floating dtypes
// (converted on load and store). Statistics in float (double for f64), variance about the mean (two
// passes or Welford). mean, rstd: (N) in f32 (f64 for f64). weight, bias: (C), optional.
// Deterministic.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

struct LayerNormForward {
  View y = {};    // out
  View sum = {};  // out, with `residual`: x + residual, rounded to its dtype before normalising
  View mean = {}, rstd = {};    // out, optional
  View x = {}, residual = {};   // residual optional
  View weight = {}, bias = {};  // optional
  double eps = 1e-5;
};

struct LayerNormBackward {
  View dx = {};  // out, optional; with `dsum` it is the normalisation's part plus dsum
  View dweight = {}, dbias = {};         // out, optional; any floating dtype
  float beta_weight = 0, beta_bias = 0;  // 1 accumulates into dweight, dbias
  View dy = {}, dsum = {};  // dsum optional: gradient that reached x + residual by another way
  View x = {};              // what was normalised (x, or the sum)
  View weight = {}, mean = {}, rstd = {};
};

/// Scratch for the sums of dweight and dbias; not needed when both are absent.
std::size_t layer_norm_backward_workspace_bytes(Device device, std::int64_t rows,
                                                std::int64_t columns);

/// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps).
struct RmsNormForward {
  View y = {};                 // out
  View sum = {};               // out, with `residual`: as in LayerNormForward
  View rstd = {};              // out, optional
  View x = {}, residual = {};  // residual optional
  View weight = {};            // optional
  double eps = 1e-5;
};

struct RmsNormBackward {
  View dx = {};           // out, optional; with `dsum` it is the normalisation's part plus dsum
  View dweight = {};      // out, optional; any floating dtype
  float beta_weight = 0;  // 1 accumulates into dweight
  View dy = {}, dsum = {}, x = {};  // as in LayerNormBackward
  View weight = {}, rstd = {};
};

/// Scratch for the sums of dweight; not needed without it.
std::size_t rms_norm_backward_workspace_bytes(Device device, std::int64_t rows,
                                              std::int64_t columns);

#define MT_DECLARE_NORM                                                                        \
  void layer_norm_forward(const Stream&, const LayerNormForward& args);                        \
  void layer_norm_backward(const Stream&, const LayerNormBackward& args, Workspace workspace); \
  void rms_norm_forward(const Stream&, const RmsNormForward& args);                            \
  void rms_norm_backward(const Stream&, const RmsNormBackward& args, Workspace workspace);

namespace cpu {
MT_DECLARE_NORM
std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns);
std::size_t rms_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns);
}  // namespace cpu
namespace cuda {
MT_DECLARE_NORM
std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns);
std::size_t rms_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns);
}  // namespace cuda
#undef MT_DECLARE_NORM

inline constexpr Kernel layer_norm_forward{"layer_norm_forward", cpu::layer_norm_forward,
                                           MT_CUDA(cuda::layer_norm_forward)};
inline constexpr Kernel layer_norm_backward{"layer_norm_backward", cpu::layer_norm_backward,
                                            MT_CUDA(cuda::layer_norm_backward)};
inline constexpr Kernel rms_norm_forward{"rms_norm_forward", cpu::rms_norm_forward,
                                         MT_CUDA(cuda::rms_norm_forward)};
inline constexpr Kernel rms_norm_backward{"rms_norm_backward", cpu::rms_norm_backward,
                                          MT_CUDA(cuda::rms_norm_backward)};

}  // namespace mixtape::kernels
