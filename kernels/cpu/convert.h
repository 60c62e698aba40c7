// Conversion of runs of elements between storage types and the arithmetic type (float or double).
//
// Row kernels are compiled once per arithmetic type, not per combination of operand types: a row of
// another type is converted into a small buffer on load and rounded once on store; a row that
// already has the arithmetic type is used in place. Conversions are the bit-exact ones of
// engine/half.h, sixteen or eight at a time where the machine can.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engine/dtype.h"
#include "engine/view.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace mixtape::kernels::cpu {

/// dst[i] = To(src[i]) for i in [0, n), rounded to nearest even. The ranges do not overlap, or are
/// the same when the types are.
template <class From, class To>
inline void convert(const From* src, To* dst, std::int64_t n) {
  std::int64_t i = 0;
  if constexpr (std::is_same_v<From, Half> && std::is_same_v<To, float>) {
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(dst + i,
                       _mm512_maskz_cvtph_ps(
                           0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(dst + i,
                       _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
#endif
  } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, Half>) {
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(dst + i),
          _mm512_maskz_cvtps_ph(0xFFFF, _mm512_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  }
  for (; i < n; ++i) {
    if constexpr (sizeof(From) == 2)
      dst[i] = static_cast<To>(static_cast<float>(src[i]));
    else if constexpr (sizeof(To) == 2)
      dst[i] = To(static_cast<float>(src[i]));
    else
      dst[i] = static_cast<To>(src[i]);
  }
}

/// Converts n elements of `dtype` at src to dst.
template <class C>
inline void load_elements(Dtype dtype, const void* src, C* dst, std::int64_t n) {
  dispatch_floating("load", dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    convert(static_cast<const T*>(src), dst, n);
  });
}
/// Converts n elements at src to `dtype` at dst, rounding once.
template <class C>
inline void store_elements(Dtype dtype, void* dst, const C* src, std::int64_t n) {
  dispatch_floating("store", dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    convert(src, static_cast<T*>(dst), n);
  });
}

/// Address of element `offset` of a floating array.
inline void* element_address(void* data, Dtype dtype, std::int64_t offset) {
  return static_cast<char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
}
inline const void* element_address(const void* data, Dtype dtype, std::int64_t offset) {
  return static_cast<const char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
}

/// Row `row` of a (N, C) view with unit column stride as arithmetic type C: the row itself, or its
/// conversion in `buffer` (C elements, used only when the types differ).
template <class C>
inline const C* load_row(const View& view, std::int64_t row, C* buffer) {
  const void* src = element_address(view.data, view.dtype, row * view.stride(0));
  if (view.dtype == dtype_of<C>) return static_cast<const C*>(src);
  load_elements(view.dtype, src, buffer, view.size(1));
  return buffer;
}
/// Where to compute row `row`: in the view itself if it has type C, else in `buffer`;
/// store_row then converts.
template <class C>
inline C* open_row(const View& view, std::int64_t row, C* buffer) {
  if (view.dtype != dtype_of<C>) return buffer;
  return static_cast<C*>(element_address(view.data, view.dtype, row * view.stride(0)));
}
template <class C>
inline void store_row(const View& view, std::int64_t row, const C* values) {
  if (view.dtype == dtype_of<C>) return;
  store_elements(view.dtype, element_address(view.data, view.dtype, row * view.stride(0)), values,
                 view.size(1));
}

}  // namespace mixtape::kernels::cpu
