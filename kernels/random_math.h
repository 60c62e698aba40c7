// From random words to values: the arithmetic both backends share, so that their numbers are the
// same to the last bit.
//
// Library log, sin and cos differ between CPU and CUDA by an ulp or two, and a compiler may fuse
// a * b + c on one side only. So everything here is explicit fma, exact operations (+ - * alone,
// IEEE sqrt) and short polynomials (logf of S. L. Moshier's Cephes, sin and cos as SLEEF and
// Cephes; normals within 4 ulp of the exact formula). Box and Muller, "A note on the generation of
// random normal deviates" (1958).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "engine/dtype.h"
#include "engine/philox.h"

namespace mixtape::random_math {

MT_HOST_DEVICE inline float fused(float a, float b, float c) { return std::fma(a, b, c); }

/// log(w) for w in (0, 1], w normal.
MT_HOST_DEVICE inline float log_unit(float w) {
#if defined(__CUDA_ARCH__)
  std::uint32_t bits = __float_as_uint(w);
#else
  std::uint32_t bits = detail::float_bits(w);
#endif
  // w = m 2^e with m in [sqrt(1/2), sqrt(2)).
  bits += 0x3F800000u - 0x3F3504F3u;
  const float e = static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 127);
  bits = (bits & 0x007FFFFFu) + 0x3F3504F3u;
#if defined(__CUDA_ARCH__)
  const float f = __uint_as_float(bits) - 1.0f;
#else
  const float f = std::bit_cast<float>(bits) - 1.0f;
#endif
  const float z = f * f;
  float p = 7.0376836292e-2f;
  p = fused(p, f, -1.1514610310e-1f);
  p = fused(p, f, 1.1676998740e-1f);
  p = fused(p, f, -1.2420140846e-1f);
  p = fused(p, f, 1.4249322787e-1f);
  p = fused(p, f, -1.6668057665e-1f);
  p = fused(p, f, 2.0000714765e-1f);
  p = fused(p, f, -2.4999993993e-1f);
  p = fused(p, f, 3.3333331174e-1f);
  const float fz = f * z;
  float y = fused(e, -2.12194440e-4f, p * fz);
  y = fused(z, -0.5f, y);
  return fused(e, 0.693359375f, f + y);
}

struct Pair {
  float first, second;
};

/// sin and cos of 2 pi u for u = k 2^-24 in [0, 1).
MT_HOST_DEVICE inline Pair sin_cos_turn(float u) {
  const int quadrant = static_cast<int>(fused(u, 4.0f, 0.5f));     // nearest quarter turn
  const float t = fused(static_cast<float>(quadrant), -0.25f, u);  // exact, |t| <= 1/8
  const float x = t * 6.2831854820251465f;                         // 2 pi t = x + rest
  const float rest = fused(t, -1.7484555e-7f, fused(t, 6.2831854820251465f, -x));
  const float z = x * x;
  float s = fused(z, 2.6083159809786593541503e-6f, -1.981069071916863322258e-4f);
  s = fused(s, z, 8.33307858556509017944336e-3f);
  s = fused(s, z, -1.66666597127914428710938e-1f);
  const float xz = x * z;
  s = fused(s, xz, rest) + x;
  float c = fused(z, 2.443315711809948e-5f, -1.388731625493765e-3f);
  c = fused(c, z, 4.166664568298827e-2f);
  const float zz = z * z;
  c = fused(c, zz, fused(z, -0.5f, fused(-x, rest, 1.0f)));
  const float sine = (quadrant & 1) ? c : s;
  const float cosine = (quadrant & 1) ? s : c;
  return {(quadrant & 2) ? -sine : sine, ((quadrant + 1) & 2) ? -cosine : cosine};
}

/// Two standard normals from two words: r cos(theta), r sin(theta) with r = sqrt(-2 log(1 - u1)),
/// theta = 2 pi u2.
MT_HOST_DEVICE inline Pair normal_pair(std::uint32_t word1, std::uint32_t word2) {
  const float w = 1.0f - uniform_from_bits(word1);  // exact, in (0, 1]
  const float r = std::sqrt(0.0f - 2.0f * log_unit(w));
  const Pair turn = sin_cos_turn(uniform_from_bits(word2));
  return {r * turn.second, r * turn.first};
}

/// The parameters of a uniform draw in [lo, hi) as float; `limit` is the largest value of the
/// output type below hi (lo itself where there is none).
struct UniformRange {
  float lo, width, limit;
};
MT_HOST_DEVICE inline float uniform_value(std::uint32_t word, UniformRange range) {
  const float v = fused(uniform_from_bits(word), range.width, range.lo);
  return v < range.limit ? v : range.limit;
}

/// An integer in [lo, lo + range), range <= 2^32.
MT_HOST_DEVICE inline std::int64_t randint_value(std::uint32_t word, std::int64_t lo,
                                                 std::uint64_t range) {
  return lo + static_cast<std::int64_t>((static_cast<std::uint64_t>(word) * range) >> 32);
}

/// Dropout draws 16 bits an element, so eight elements a counter block: element i's are the lower
/// (i even) or upper (i odd) half of lane i % 8 / 2 of block i / 8. It is kept if they are not
/// below the threshold, p to the nearest 2^-16.
inline std::uint32_t dropout_threshold(double p) {
  return static_cast<std::uint32_t>(std::lround(p * 0x1p16));
}
MT_HOST_DEVICE inline bool dropout_keeps(std::uint32_t bits, std::uint32_t threshold) {
  return bits >= threshold;
}
/// What a kept element is multiplied by: of p as asked for; 0 for p = 1, where none is kept.
inline double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

namespace detail {
/// The largest value of a 16-bit type that is below `hi`.
template <class T>
float below_16bit(double hi) {
  T t(static_cast<float>(std::clamp(hi, -3e38, 3e38)));
  if (static_cast<double>(static_cast<float>(t)) < hi) return static_cast<float>(t);
  if (static_cast<float>(t) == 0.0f) return static_cast<float>(T::from_bits(0x8001));
  const bool negative = (t.bits & 0x8000u) != 0;
  return static_cast<float>(
      T::from_bits(static_cast<std::uint16_t>(negative ? t.bits + 1 : t.bits - 1)));
}
}  // namespace detail

inline UniformRange uniform_range(Dtype out, double lo, double hi) {
  float limit;
  if (out == Dtype::f16) {
    limit = detail::below_16bit<Half>(hi);
  } else if (out == Dtype::bf16) {
    limit = detail::below_16bit<BFloat16>(hi);
  } else {
    limit = static_cast<float>(hi);
    if (static_cast<double>(limit) >= hi)
      limit = std::nextafter(limit, -std::numeric_limits<float>::infinity());
  }
  const float low = static_cast<float>(lo);
  return {low, static_cast<float>(hi - lo), std::max(limit, low)};
}

}  // namespace mixtape::random_math
