// The gated linear unit with SiLU (Shazeer 2020, "GLU variants improve transformer"): N rows of
// 2H elements [gate | up] to H elements silu(gate) * up.
//
// All operands are row-major without gaps and of one floating dtype. Arithmetic in float (double
// for f64), one rounding of each result: silu is not rounded before the product, so that 16-bit
// results are within one ulp. Deterministic.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

#define MT_DECLARE_SWIGLU                                                     \
  /* y (N, H) = silu(x[:, :H]) * x[:, H:], x (N, 2H). */                      \
  void swiglu_forward(const Stream&, View y, View x);                         \
  /* dx (N, 2H) from dy (N, H) and x: [dy up silu'(gate) | dy silu(gate)]. */ \
  void swiglu_backward(const Stream&, View dx, View dy, View x);

namespace cpu {
MT_DECLARE_SWIGLU
}
namespace cuda {
MT_DECLARE_SWIGLU
}
#undef MT_DECLARE_SWIGLU

inline constexpr Kernel swiglu_forward{"swiglu_forward", cpu::swiglu_forward,
                                       MT_CUDA(cuda::swiglu_forward)};
inline constexpr Kernel swiglu_backward{"swiglu_backward", cpu::swiglu_backward,
                                        MT_CUDA(cuda::swiglu_backward)};

/// Throws unless half is (N, H), whole (N, 2H), both without gaps and of one floating dtype.
inline void check_swiglu(const char* op, const View& half, const View& whole) {
  MT_CHECK(half.dim() == 2 && whole.dim() == 2 && half.size(0) == whole.size(0) &&
               2 * half.size(1) == whole.size(1),
           op, ": expected shapes (N, H) and (N, 2H), got ", half.sizes, " and ", whole.sizes);
  MT_CHECK(half.contiguous() && whole.contiguous(), op,
           ": expected rows without gaps, got strides ", half.strides, " and ", whole.strides);
  MT_CHECK(half.dtype == whole.dtype && is_floating(half.dtype), op,
           ": expected one floating dtype, got ", half.dtype, " and ", whole.dtype);
}

}  // namespace mixtape::kernels
