// 16-bit storage types: IEEE binary16 (Half) and bfloat16 (BFloat16), bit-exact on every backend.
//
// They are storage only: arithmetic is done in float. Conversions round to nearest even, keep
// subnormals and quiet NaNs (a signalling NaN never becomes infinity). Source: IEEE 754-2019 and
// Intel's "BFLOAT16 - Hardware Numerics Definition" (2018).
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define MT_HOST_DEVICE __host__ __device__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#define MT_HOST_DEVICE
#if defined(__F16C__)
#include <immintrin.h>
#endif
#endif

namespace mixtape {

namespace detail {

inline std::uint32_t float_bits(float x) { return std::bit_cast<std::uint32_t>(x); }

inline std::uint16_t half_bits_from_float(float x) {
  std::uint32_t u = float_bits(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7FFFFFFFu;
  if (u > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u | ((u >> 13) & 0x3FFu));
  if (u >= 0x477FF000u)
    return static_cast<std::uint16_t>(sign | 0x7C00u);           // >= 65520 rounds to inf
  if (u < 0x33000001u) return static_cast<std::uint16_t>(sign);  // <= 2^-25 rounds to 0
  if (u < 0x38800000u) {                                         // subnormal result
    const int shift = 126 - static_cast<int>(u >> 23);           // 14..24
    const std::uint32_t mantissa = (u & 0x7FFFFFu) | 0x800000u;
    std::uint32_t r = mantissa >> shift;
    const std::uint32_t rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
    r += rest > tie || (rest == tie && (r & 1u));
    return static_cast<std::uint16_t>(sign | r);
  }
  u += 0xFFFu + ((u >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((u - 0x38000000u) >> 13));
}

inline float float_from_half_bits(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1Fu;
  std::uint32_t mantissa = h & 0x3FFu;
  if (exponent == 0x1Fu) {
    return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0));
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(float_bits(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline std::uint16_t bfloat16_bits_from_float(float x) {
  const std::uint32_t u = float_bits(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace detail

/// IEEE binary16: 1 sign, 5 exponent, 10 mantissa bits; largest finite value 65504.
struct Half {
  std::uint16_t bits;

  Half() = default;
  MT_HOST_DEVICE Half(float x) {  // NOLINT(google-explicit-constructor): storage converts silently
#if defined(__CUDA_ARCH__)
    bits = __half_as_ushort(__float2half_rn(x));
#elif defined(__F16C__) && !defined(__CUDACC__)
    bits = static_cast<std::uint16_t>(_cvtss_sh(x, 0));
#else
    bits = detail::half_bits_from_float(x);
#endif
  }
  MT_HOST_DEVICE operator float() const {  // NOLINT(google-explicit-constructor)
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#elif defined(__F16C__) && !defined(__CUDACC__)
    return _cvtsh_ss(bits);
#else
    return detail::float_from_half_bits(bits);
#endif
  }
  static MT_HOST_DEVICE Half from_bits(std::uint16_t b) {
    Half h;
    h.bits = b;
    return h;
  }
};

/// bfloat16: 1 sign, 8 exponent, 7 mantissa bits; the upper half of a float.
struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  MT_HOST_DEVICE BFloat16(float x) {  // NOLINT(google-explicit-constructor)
#if defined(__CUDA_ARCH__)
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    bits = detail::bfloat16_bits_from_float(x);
#endif
  }
  MT_HOST_DEVICE operator float() const {  // NOLINT(google-explicit-constructor)
#if defined(__CUDA_ARCH__)
    return __bfloat162float(__ushort_as_bfloat16(bits));
#else
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
#endif
  }
  static MT_HOST_DEVICE BFloat16 from_bits(std::uint16_t b) {
    BFloat16 h;
    h.bits = b;
    return h;
  }
};

static_assert(sizeof(Half) == 2 && sizeof(BFloat16) == 2);

}  // namespace mixtape
