// Loading and storing runs of elements: one small loop per (storage, compute) pair, vectorised by
// the compiler, except binary16, which has instructions of its own.
#include "kernels/cpu/load_store.h"

#include <cstring>
#include <limits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace mixtape::kernels::cpu {

namespace {

/// Truncates; saturates out of range; NaN gives 0.
template <class To, class From>
To to_integer(From x) {
  // max() of i32 and i64 is not a From: the first value past it is a power of two, which is.
  constexpr From kLow = static_cast<From>(std::numeric_limits<To>::min());
  constexpr From kPast = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * From{2};
  if (x >= kPast) return std::numeric_limits<To>::max();
  if (x >= kLow) return static_cast<To>(x);
  return x < kLow ? std::numeric_limits<To>::min() : To{0};
}

template <class To, class From>
To convert_one(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<To, bool>)
    return x != From{0};
  else if constexpr (sizeof(From) == 2)
    return convert_one<To>(static_cast<float>(x));
  else if constexpr (sizeof(To) == 2)
    return To(static_cast<float>(x));
  else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>)
    return to_integer<To>(x);
  else
    return static_cast<To>(x);
}

/// Element i of a run; a bool is read as a byte, so that any nonzero byte is true.
template <class S>
S read(const void* src, std::int64_t i) {
  if constexpr (std::is_same_v<S, bool>)
    return static_cast<const std::uint8_t*>(src)[i] != 0;
  else
    return static_cast<const S*>(src)[i];
}

#if defined(__F16C__)
std::int64_t load_half(const Half* src, std::int64_t n, float* dst) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  return i;
}
std::int64_t store_half(const float* src, std::int64_t n, Half* dst) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
#else
std::int64_t load_half(const Half*, std::int64_t, float*) { return 0; }
std::int64_t store_half(const float*, std::int64_t, Half*) { return 0; }
#endif

template <class S, class C>
void load(const void* src, std::int64_t stride, std::int64_t n, void* dst) {
  C* to = static_cast<C*>(dst);
  if (stride == 0) {
    const C value = convert_one<C>(read<S>(src, 0));
    for (std::int64_t i = 0; i < n; ++i) to[i] = value;
  } else if (stride != 1) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = convert_one<C>(read<S>(src, i * stride));
  } else if constexpr (std::is_same_v<S, C>) {
    std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(C));
  } else {
    std::int64_t i = 0;
    if constexpr (std::is_same_v<S, Half> && std::is_same_v<C, float>)
      i = load_half(static_cast<const Half*>(src), n, to);
    for (; i < n; ++i) to[i] = convert_one<C>(read<S>(src, i));
  }
}

template <class C, class S>
void store(const void* src, void* dst, std::int64_t stride, std::int64_t n) {
  const C* from = static_cast<const C*>(src);
  S* to = static_cast<S*>(dst);
  if (stride != 1) {
    for (std::int64_t i = 0; i < n; ++i) to[i * stride] = convert_one<S>(from[i]);
  } else if constexpr (std::is_same_v<S, C>) {
    std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(C));
  } else {
    std::int64_t i = 0;
    if constexpr (std::is_same_v<S, Half> && std::is_same_v<C, float>) i = store_half(from, n, to);
    for (; i < n; ++i) to[i] = convert_one<S>(from[i]);
  }
}

/// Calls f with the tag of a compute type.
template <class F>
decltype(auto) dispatch_compute(Dtype compute, F&& f) {
  switch (compute) {
    case Dtype::f32: return f(TypeTag<float>{});
    case Dtype::f64: return f(TypeTag<double>{});
    case Dtype::i64: return f(TypeTag<std::int64_t>{});
    default: MT_THROW("expected float32, float64 or int64 as compute type, got ", name_of(compute));
  }
}

}  // namespace

LoadFunction load_function(Dtype storage, Dtype compute) {
  return dispatch_compute(compute, [&](auto c) {
    return dispatch_dtype(storage, [](auto s) -> LoadFunction {
      return load<typename decltype(s)::type, typename decltype(c)::type>;
    });
  });
}

StoreFunction store_function(Dtype compute, Dtype storage) {
  return dispatch_compute(compute, [&](auto c) {
    return dispatch_dtype(storage, [](auto s) -> StoreFunction {
      return store<typename decltype(c)::type, typename decltype(s)::type>;
    });
  });
}

Dtype conversion_dtype(Dtype from, Dtype to) {
  if (from == Dtype::f64 || to == Dtype::f64) return Dtype::f64;
  return is_floating(from) || is_floating(to) ? Dtype::f32 : Dtype::i64;
}

}  // namespace mixtape::kernels::cpu
