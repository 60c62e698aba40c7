// Rotary position embedding (Su et al. 2021) of the leading heads of a (B, T, H, D) tensor.
//
// Pair i of a head is (x[i], x[i + D/2]), the rotate-half convention of Llama and of Hugging Face's
// models (the paper pairs neighbours instead); it turns by position * base^(-2 i / D) radians.
// Frequencies are computed in double and rounded to float, angles in float from integer positions
// (all in double for f64), so that an angle is off by 2^-23 of itself. x and y have one floating
// dtype and any strides but the last, which is 1. 16-bit elements are rounded once. Deterministic.
#pragma once

#include <cmath>

#include "kernels/kernel.h"

namespace mixtape::kernels {

inline constexpr std::int64_t kMaxRotaryDim = 512;  // of a head

struct RotaryEmbedding {
  View y = {}, x = {};             // (B, T, H, D), D even; y does not overlap x
  View positions = {};             // (B, T) i64 or i32, any strides; optional: 0, 1, .. along T
  std::int64_t offset = 0;         // added to positions
  std::int64_t rotated_heads = 0;  // heads from here on are copied
  double base = 10000;
  bool inverse = false;  // turns the other way: the gradient
};

#define MT_DECLARE_ROTARY void rotary_embedding(const Stream&, const RotaryEmbedding& args);
namespace cpu {
MT_DECLARE_ROTARY
}
namespace cuda {
MT_DECLARE_ROTARY
}
#undef MT_DECLARE_ROTARY

inline constexpr Kernel rotary_embedding{"rotary_embedding", cpu::rotary_embedding,
                                         MT_CUDA(cuda::rotary_embedding)};

/// Radians that pair i of a head of `dim` elements turns from one position to the next.
inline double rotary_frequency(double base, std::int64_t i, std::int64_t dim) {
  return std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
}

inline void check_rotary_embedding(const RotaryEmbedding& a) {
  constexpr const char* kOp = "rotary_embedding";
  MT_CHECK(
      a.x.dim() == 4 && a.x.sizes == a.y.sizes && a.x.dtype == a.y.dtype && is_floating(a.x.dtype),
      kOp, ": expected x and y of one shape (B, T, H, D) and one floating dtype, got ", a.x.dtype,
      a.x.sizes, " and ", a.y.dtype, a.y.sizes);
  MT_CHECK(a.x.size(3) % 2 == 0 && a.x.size(3) <= kMaxRotaryDim, kOp,
           ": expected heads of an even number of elements up to ", kMaxRotaryDim, ", got ",
           a.x.size(3));
  MT_CHECK(a.x.numel() == 0 || (a.x.stride(3) == 1 && a.y.stride(3) == 1), kOp,
           ": expected heads without gaps, got strides ", a.x.strides, " and ", a.y.strides);
  MT_CHECK(a.rotated_heads >= 0 && a.rotated_heads <= a.x.size(2), kOp, ": expected 0 to ",
           a.x.size(2), " heads to rotate, got ", a.rotated_heads);
  MT_CHECK(!a.positions || (a.positions.dim() == 2 && a.positions.size(0) == a.x.size(0) &&
                            a.positions.size(1) == a.x.size(1) &&
                            (a.positions.dtype == Dtype::i64 || a.positions.dtype == Dtype::i32)),
           kOp, ": expected int64 or int32 positions of shape (", a.x.size(0), ", ", a.x.size(1),
           "), got ", a.positions.dtype, a.positions.sizes);
}

}  // namespace mixtape::kernels
