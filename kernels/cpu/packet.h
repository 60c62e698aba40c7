// A SIMD register of floats, and mixtape::math on it: the T with which the CPU backend runs the
// formulas of kernels/elementwise_functors.h. Include this header before that one.
//
// It uses the compiler's vector extensions, so one source serves AVX-512, AVX2 and narrower
// machines. Results are the same on each of them up to fused multiply-add. Error bounds against the
// exact value, all finite inputs (tests/kernels/packet_test.cpp): exp, log, tanh and erf 2 ulp;
// sqrt, abs, + - * / exact rounding; pow is libm's. Subnormals are neither flushed nor assumed
// away; infinities and NaN give what libm gives.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace mixtape::kernels::cpu {

struct Packet {
#if defined(__AVX512F__)
  static constexpr int kLanes = 16;
#elif defined(__AVX__)
  static constexpr int kLanes = 8;
#else
  static constexpr int kLanes = 4;
#endif
  typedef float Floats __attribute__((vector_size(kLanes * 4)));
  typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
  typedef std::uint32_t UInts __attribute__((vector_size(kLanes * 4)));
  /// All bits set in the lanes where a comparison holds.
  struct Mask {
    Ints bits;
  };

  Floats v;

  static Packet load(const float* p) {
    Packet x;
    std::memcpy(&x.v, p, sizeof x.v);
    return x;
  }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }
  static Packet splat(float value) { return {value - Floats{}}; }
  Ints bits() const { return (Ints)v; }
  static Packet from_bits(Ints b) { return {(Floats)b}; }
};

inline Packet operator+(Packet a, Packet b) { return {a.v + b.v}; }
inline Packet operator-(Packet a, Packet b) { return {a.v - b.v}; }
inline Packet operator*(Packet a, Packet b) { return {a.v * b.v}; }
inline Packet operator/(Packet a, Packet b) { return {a.v / b.v}; }
inline Packet operator-(Packet a) { return {-a.v}; }

/// a * b + c, rounded once where the machine has the instruction.
inline Packet fma(Packet a, Packet b, Packet c) {
#if defined(__AVX512F__)
  return {(Packet::Floats)_mm512_fmadd_ps((__m512)a.v, (__m512)b.v, (__m512)c.v)};
#elif defined(__FMA__)
  return {(Packet::Floats)_mm256_fmadd_ps((__m256)a.v, (__m256)b.v, (__m256)c.v)};
#else
  return {a.v * b.v + c.v};
#endif
}
inline Packet fma(Packet a, Packet b, float c) { return fma(a, b, Packet::splat(c)); }

/// Coefficients from the highest power down: ((c0 x + c1) x + c2) ...
inline Packet horner(Packet, Packet sum) { return sum; }
template <class... Rest>
inline Packet horner(Packet x, Packet sum, float next, Rest... rest) {
  return horner(x, fma(sum, x, next), rest...);
}

inline Packet sqrt_exact(Packet x) {
#if defined(__AVX512F__)
  return {(Packet::Floats)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)x.v)};
#elif defined(__AVX__)
  return {(Packet::Floats)_mm256_sqrt_ps((__m256)x.v)};
#elif defined(__SSE2__)
  return {(Packet::Floats)_mm_sqrt_ps((__m128)x.v)};
#else
  for (int i = 0; i < Packet::kLanes; ++i) x.v[i] = std::sqrt(x.v[i]);
  return x;
#endif
}

}  // namespace mixtape::kernels::cpu

namespace mixtape::math {

using kernels::cpu::Packet;

inline Packet constant(Packet, double value) { return Packet::splat(static_cast<float>(value)); }

inline Packet::Mask gt(Packet a, Packet b) { return {a.v > b.v}; }
inline Packet::Mask ge(Packet a, Packet b) { return {a.v >= b.v}; }
inline Packet::Mask lt(Packet a, Packet b) { return {a.v < b.v}; }
inline Packet::Mask le(Packet a, Packet b) { return {a.v <= b.v}; }
inline Packet::Mask eq(Packet a, Packet b) { return {a.v == b.v}; }
inline Packet::Mask ne(Packet a, Packet b) { return {a.v != b.v}; }
inline Packet select(Packet::Mask m, Packet a, Packet b) { return {m.bits ? a.v : b.v}; }

inline Packet sqrt(Packet x) { return kernels::cpu::sqrt_exact(x); }
inline Packet abs(Packet x) { return Packet::from_bits(x.bits() & 0x7FFFFFFF); }
/// |x| with the sign of s.
inline Packet copysign(Packet x, Packet s) {
  return Packet::from_bits((x.bits() & 0x7FFFFFFF) | (s.bits() & INT32_MIN));
}
inline Packet maximum(Packet a, Packet b) {
  const Packet larger = {a.v >= b.v ? a.v : b.v};  // b where either is NaN
  return {a.v != a.v ? a.v : larger.v};
}
inline Packet minimum(Packet a, Packet b) {
  const Packet smaller = {a.v <= b.v ? a.v : b.v};
  return {a.v != a.v ? a.v : smaller.v};
}

/// e^x = 2^n e^r with |r| <= ln(2) / 2; minimax polynomial of degree 7 in r. 2^n is applied in two
/// factors, so that results may be subnormal.
inline Packet exp(Packet x) {
  using kernels::cpu::fma;
  using kernels::cpu::horner;
  const Packet low = Packet::splat(-104.0f), high = Packet::splat(89.0f);
  x = {x.v < low.v ? low.v : x.v};  // both keep a NaN
  x = {x.v > high.v ? high.v : x.v};
  const Packet magic = Packet::splat(0x1.8p23f);  // adding it rounds to an integer
  const Packet shifted = fma(x, Packet::splat(1.44269504f), magic);
  const Packet n = shifted - magic;
  Packet r = fma(n, Packet::splat(-0x1.62e4p-1f), x);
  r = fma(n, Packet::splat(-0x1.7f7d1cp-20f), r);
  const Packet p = horner(r, Packet::splat(0x1.9f02d8p-13f), 0x1.6d945ep-10f, 0x1.11128p-7f,
                          0x1.555486p-5f, 0x1.555554p-3f, 0.5f);
  const Packet y = fma(p * r, r, r) + Packet::splat(1.0f);
  const Packet::Ints exponent = shifted.bits() - magic.bits();
  const Packet::Ints half = exponent >> 1;
  return y * Packet::from_bits((half + 127) << 23) *
         Packet::from_bits((exponent - half + 127) << 23);
}

/// log(2^e m) = e ln(2) + log(m), m in [sqrt(1/2), sqrt(2)).
inline Packet log(Packet x) {
  using kernels::cpu::fma;
  using kernels::cpu::horner;
  const Packet::Ints subnormal = x.v < 0x1p-126f;
  const Packet scaled = {subnormal ? (x * Packet::splat(0x1p23f)).v : x.v};
  const Packet::Ints offset = (Packet::Ints)((Packet::UInts)scaled.v - 0x3F3504F3u);  // sqrt(1/2)
  const Packet::Ints exponent = (offset >> 23) - (subnormal & 23);
  const Packet m = Packet::from_bits((offset & 0x7FFFFF) + 0x3F3504F3);
  const Packet e = {__builtin_convertvector(exponent, Packet::Floats)};
  const Packet f = m - Packet::splat(1.0f);
  const Packet p =
      horner(f, Packet::splat(0x1.1456b8p-4f), -0x1.de3bd6p-4f, 0x1.e6f0b6p-4f, -0x1.fc2216p-4f,
             0x1.233764p-3f, -0x1.555c4cp-3f, 0x1.99a4b6p-3f, -0x1.000006p-2f, 0x1.555548p-2f);
  const Packet f2 = f * f;
  // f - f^2 / 2 + f^3 p, small terms first, with the low part of e ln(2).
  Packet y = fma(e, Packet::splat(0x1.7f7d1cp-20f), p * f * f2);
  y = fma(f2, Packet::splat(-0.5f), y);
  y = fma(e, Packet::splat(0x1.62e4p-1f), y + f);
  const Packet inf = Packet::splat(INFINITY), nan = Packet::splat(NAN);
  y = {x.v == inf.v ? inf.v : y.v};
  y = {x.v >= 0.0f ? y.v : nan.v};
  return {x.v == 0.0f ? -inf.v : y.v};
}

inline Packet tanh(Packet x) {
  using kernels::cpu::fma;
  using kernels::cpu::horner;
  const Packet t = abs(x), s = x * x, one = Packet::splat(1.0f), two = Packet::splat(2.0f);
  const Packet p = horner(s, Packet::splat(0x1.18e1a2p-9f), -0x1.0bf4ecp-7f, 0x1.638b54p-6f,
                          -0x1.b9ee9p-5f, 0x1.111066p-3f, -0x1.555554p-2f);
  const Packet small = fma(p * s, x, x);
  const Packet large = one - two / (exp(t + t) + one);
  return copysign(select(lt(t, Packet::splat(0.625f)), small, large), x);  // -0 stays -0
}

/// Odd polynomial below 0.92; above, 1 - erfc with erfc = exp of a polynomial.
inline Packet erf(Packet x) {
  using kernels::cpu::fma;
  using kernels::cpu::horner;
  const Packet t = abs(x), s = x * x;
  const Packet p = horner(s, Packet::splat(0x1.5f9522p-14f), -0x1.ab1054p-11f, 0x1.54df18p-8f,
                          -0x1.b810e8p-6f, 0x1.ce2e24p-4f, -0x1.812744p-2f, 0x1.06eba8p-3f);
  const Packet small = fma(p, x, x);
  const Packet end = Packet::splat(4.0f);  // erf(4) rounds to 1
  const Packet u = {t.v > end.v ? end.v : t.v};
  const Packet q = horner(u, Packet::splat(0x1.78dfecp-17f), -0x1.527d1ep-12f, 0x1.dd6d3p-9f,
                          -0x1.855174p-6f, 0x1.b3257ap-4f, 0x1.45328cp-1f, 0x1.0778dcp-3f);
  const Packet large = Packet::splat(1.0f) - exp(-fma(q, u, u));
  return select(lt(t, Packet::splat(0.92f)), small, copysign(large, x));
}

/// libm's powf on each lane; squares, the common case, directly.
inline Packet pow(Packet x, Packet y) {
  const Packet::Ints not_two = y.v != 2.0f;
  std::int32_t any = 0;
  for (int i = 0; i < Packet::kLanes; ++i) any |= not_two[i];
  if (any == 0) return x * x;
  for (int i = 0; i < Packet::kLanes; ++i) x.v[i] = std::pow(x.v[i], y.v[i]);
  return x;
}

}  // namespace mixtape::math
