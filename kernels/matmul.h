// Matrix products: out = act(alpha * a b + bias) + beta * out, with fp32 accumulation (f64 for
// f64).
//
// a is (M, K) or (B, M, K), b (K, N) or (B, K, N), out (M, N) or (B, M, N); a batch stride of 0
// repeats a matrix. In each matrix one of the last two strides is 1 (row-major or its transpose,
// any leading dimension at least the other size); the op layer copies what is not. a and b share
// one floating dtype; out has that dtype, or f32 when theirs is 16-bit. beta 0 never reads out (NaN
// there is harmless); K = 0 gives act(bias) + beta * out. Split-K partials are reduced in fp32. One
// rounding at the end; on CUDA, where cuBLASLt has no epilogue for a bias or activation, the
// product is rounded to out's dtype first. Legend: M rows, N columns, K inner, B batch.
#pragma once

#include <atomic>

#include "kernels/kernel.h"

namespace mixtape::kernels {

enum class Activation : std::uint8_t { none, relu, gelu_tanh, gelu, silu };

struct MatmulArgs {
  View out = {}, a = {}, b = {};
  float alpha = 1, beta = 0;
  View bias = {};                            // (N), dtype of a or f32; absent: none
  Activation activation = Activation::none;  // not with beta != 0
  View pre_activation = {};  // optional (M, N) of out's dtype: alpha a b + bias, for the
                             // derivative of gelu_tanh, gelu and silu
  // The product as a gradient that passes back through an activation: out = (alpha a b) *
  // act'(saved). 2-D, without beta, bias and activation; `saved` (M, N) as in activation_backward.
  Activation backward_of = Activation::none;
  View saved = {};
};

/// Scratch that lets the CUDA backend use every algorithm: 32 MiB on Hopper; 0 for the CPU.
std::size_t matmul_workspace_bytes(Device device);

// Process-wide switches of the CUDA backend (products and convolutions).
namespace detail {
inline std::atomic<bool> tf32_allowed{false}, algorithm_trials{true};
}
/// Lets f32 operands be rounded to TF32 (10 mantissa bits), several times faster. Off by default.
inline void allow_tf32(bool on) { detail::tf32_allowed = on; }
inline bool tf32_allowed() { return detail::tf32_allowed.load(std::memory_order_relaxed); }
/// On (the default): at a shape's first use the library's best candidate algorithms are timed once
/// and the fastest is kept. Off, under a stream capture and in deterministic mode
/// (engine/determinism.h): the library's first choice.
inline void set_algorithm_trials(bool on) { detail::algorithm_trials = on; }
inline bool algorithm_trials() { return detail::algorithm_trials.load(std::memory_order_relaxed); }

#define MT_DECLARE_MATMUL                                                                          \
  void matmul(const Stream&, const MatmulArgs& args, Workspace workspace);                         \
  /* For y = act(z), z = x w + bias: dz = dy * act'(saved) and dbias = column sums of dz. */       \
  /* (M, N) row-major views; saved is y for relu, z for the others, absent for Activation::none */ \
  /* (then dz may be absent: only the sums). dbias (N) is optional, of any floating dtype, */      \
  /* written as sums + beta * dbias. dz may be dy's memory. */                                     \
  void activation_backward(const Stream&, Activation activation, View dz, View dbias, float beta,  \
                           View dy, View saved, Workspace workspace);

namespace cpu {
MT_DECLARE_MATMUL
}
namespace cuda {
MT_DECLARE_MATMUL
std::size_t activation_backward_workspace_bytes(std::int64_t rows, std::int64_t columns);
}  // namespace cuda
#undef MT_DECLARE_MATMUL

/// Throws unless args' backward_of and what goes with it fit together.
void check_backward_of(const MatmulArgs& args);

/// Scratch for the column sums of a (rows, columns) gradient; 0 for the CPU.
std::size_t activation_backward_workspace_bytes(Device device, std::int64_t rows,
                                                std::int64_t columns);

inline constexpr Kernel matmul{"matmul", cpu::matmul, MT_CUDA(cuda::matmul)};
inline constexpr Kernel activation_backward{"activation_backward", cpu::activation_backward,
                                            MT_CUDA(cuda::activation_backward)};

}  // namespace mixtape::kernels
