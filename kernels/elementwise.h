// Elementwise kernels: out[i] = f(x[i], ...), for every functor of elementwise.def.
//
// Any dtype and any strides in, any dtype out: operands are converted on load to `compute` (f32,
// f64 or i64), the functor runs in it, and the result is rounded once on store. Inputs broadcast by
// stride 0: each operand's sizes are either those of `out` or broadcastable to them. Exact for + -
// * / and comparisons up to that one rounding; transcendental functions within 2 ulp of float.
// `out` may be the same memory as an operand of the same layout (in place). Deterministic.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

enum class UnaryOp : std::uint8_t {
#define MT_UNARY(function, Functor) function,
#include "kernels/elementwise.def"
};
enum class BinaryOp : std::uint8_t {
#define MT_BINARY(function, Functor) function,
#include "kernels/elementwise.def"
};

/// A tensor view or, when `view` is absent, a number.
struct Operand {
  View view = {};
  Scalar scalar;
  Operand() = default;
  Operand(const View& v) : view(v) {}      // NOLINT(google-explicit-constructor)
  Operand(const Scalar& s) : scalar(s) {}  // NOLINT(google-explicit-constructor)
};

#define MT_DECLARE_ELEMENTWISE                                                                    \
  /* out = f(x) */                                                                                \
  void unary(const Stream&, UnaryOp op, Dtype compute, View out, View x);                         \
  /* dx = dy * f'(saved): the functor says whether `saved` is f's input or its output. */         \
  void unary_backward(const Stream&, UnaryOp op, View dx, View dy, View saved);                   \
  /* out = f(a, b) */                                                                             \
  void binary(const Stream&, BinaryOp op, Dtype compute, View out, const Operand& a,              \
              const Operand& b);                                                                  \
  /* dx = dy * df/d(input 0 or 1), all of out's shape; operands the functor does not need */      \
  /* (kNeeds) may be absent. Not for comparisons. */                                              \
  void binary_backward(const Stream&, BinaryOp op, int input, View dx, View dy, const Operand& a, \
                       const Operand& b);                                                         \
  /* out = condition ? a : b, condition of dtype b8 or u8. */                                     \
  void where(const Stream&, Dtype compute, View out, View condition, const Operand& a,            \
             const Operand& b);                                                                   \
  /* out = min(max(x, lo), hi); NaN in x or in a bound gives NaN. -inf/inf bounds mean none. */   \
  void clamp(const Stream&, Dtype compute, View out, View x, Scalar lo, Scalar hi);               \
  /* dx = dy where lo <= x <= hi (bounds included), else 0. */                                    \
  void clamp_backward(const Stream&, View dx, View dy, View x, Scalar lo, Scalar hi);             \
  /* out = x converted to out's dtype, any strides on both sides (also the cast kernel). */       \
  /* f32 to 16-bit rounds to nearest even; f64 and integers reach 16-bit through f32; float */    \
  /* to integer truncates towards zero, out of range unspecified; to b8 is x != 0. */             \
  void copy(const Stream&, View out, View x);                                                     \
  void fill(const Stream&, View out, Scalar value);                                               \
  /* out[i] = start + i * step, for i in [0, numel); out is contiguous. */                        \
  void arange(const Stream&, View out, Scalar start, Scalar step);

namespace cpu {
MT_DECLARE_ELEMENTWISE
}
namespace cuda {
MT_DECLARE_ELEMENTWISE
}
#undef MT_DECLARE_ELEMENTWISE

inline constexpr Kernel unary{"unary", cpu::unary, MT_CUDA(cuda::unary)};
inline constexpr Kernel unary_backward{"unary_backward", cpu::unary_backward,
                                       MT_CUDA(cuda::unary_backward)};
inline constexpr Kernel binary{"binary", cpu::binary, MT_CUDA(cuda::binary)};
inline constexpr Kernel binary_backward{"binary_backward", cpu::binary_backward,
                                        MT_CUDA(cuda::binary_backward)};
inline constexpr Kernel where{"where", cpu::where, MT_CUDA(cuda::where)};
inline constexpr Kernel clamp{"clamp", cpu::clamp, MT_CUDA(cuda::clamp)};
inline constexpr Kernel clamp_backward{"clamp_backward", cpu::clamp_backward,
                                       MT_CUDA(cuda::clamp_backward)};
inline constexpr Kernel copy{"copy", cpu::copy, MT_CUDA(cuda::copy)};
inline constexpr Kernel fill{"fill", cpu::fill, MT_CUDA(cuda::fill)};
inline constexpr Kernel arange{"arange", cpu::arange, MT_CUDA(cuda::arange)};

}  // namespace mixtape::kernels
