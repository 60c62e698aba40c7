// Reading and writing elements on the device: conversion between storage and arithmetic types,
// loads and stores whose dtype is a run-time value (uniform over the launch, so the branch does not
// diverge), and 16-byte vectors of a 16- or 32-bit float type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "engine/dtype.h"

namespace mixtape::kernels::cuda {

/// Storage or arithmetic type to storage or arithmetic type. Floats to 16 bits round once, to
/// nearest even, from float; to integers they truncate towards zero; to bool it is v != 0.
template <class To, class From>
__device__ __forceinline__ To convert(From v) {
  if constexpr (std::is_same_v<To, From>) {
    return v;
  } else if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>) {
    return convert<To>(static_cast<float>(v));
  } else if constexpr (std::is_same_v<To, Half> || std::is_same_v<To, BFloat16>) {
    return To(static_cast<float>(v));
  } else if constexpr (std::is_same_v<To, bool>) {
    return v != From(0);
  } else if constexpr (std::is_same_v<To, std::uint8_t> && std::is_floating_point_v<From>) {
    return static_cast<std::uint8_t>(static_cast<std::int64_t>(v));
  } else {
    return static_cast<To>(v);
  }
}

/// Element i of an array of dtype t, as C (float, double or int64).
template <class C>
__device__ __forceinline__ C load_as(const void* p, Dtype t, std::int64_t i) {
  switch (t) {
    case Dtype::f32: return convert<C>(static_cast<const float*>(p)[i]);
    case Dtype::f16: return convert<C>(static_cast<const Half*>(p)[i]);
    case Dtype::bf16: return convert<C>(static_cast<const BFloat16*>(p)[i]);
    case Dtype::f64: return convert<C>(static_cast<const double*>(p)[i]);
    case Dtype::i64: return convert<C>(static_cast<const std::int64_t*>(p)[i]);
    case Dtype::i32: return convert<C>(static_cast<const std::int32_t*>(p)[i]);
    case Dtype::u8: return convert<C>(static_cast<const std::uint8_t*>(p)[i]);
    case Dtype::b8: return static_cast<const std::uint8_t*>(p)[i] != 0 ? C(1) : C(0);
  }
  return C(0);
}

template <class C>
__device__ __forceinline__ void store_as(void* p, Dtype t, std::int64_t i, C v) {
  switch (t) {
    case Dtype::f32: static_cast<float*>(p)[i] = convert<float>(v); break;
    case Dtype::f16: static_cast<Half*>(p)[i] = convert<Half>(v); break;
    case Dtype::bf16: static_cast<BFloat16*>(p)[i] = convert<BFloat16>(v); break;
    case Dtype::f64: static_cast<double*>(p)[i] = convert<double>(v); break;
    case Dtype::i64: static_cast<std::int64_t*>(p)[i] = convert<std::int64_t>(v); break;
    case Dtype::i32: static_cast<std::int32_t*>(p)[i] = convert<std::int32_t>(v); break;
    case Dtype::u8: static_cast<std::uint8_t*>(p)[i] = convert<std::uint8_t>(v); break;
    case Dtype::b8: static_cast<std::uint8_t*>(p)[i] = v != C(0) ? 1 : 0; break;
  }
}

/// Elements offset[0..N) of an array of dtype t: all loads are under way before the first is used.
template <class C, class Offset, int N>
__device__ __forceinline__ void load_items(const void* data, Dtype t, const Offset (&offset)[N],
                                           C (&x)[N]) {
  const auto items = [&](auto tag) {
    using T = typename decltype(tag)::type;
    T raw[N];
#pragma unroll
    for (int u = 0; u < N; ++u) raw[u] = static_cast<const T*>(data)[offset[u]];
#pragma unroll
    for (int u = 0; u < N; ++u) x[u] = convert<C>(raw[u]);
  };
  switch (t) {
    case Dtype::f32: items(TypeTag<float>{}); break;
    case Dtype::f16: items(TypeTag<Half>{}); break;
    case Dtype::bf16: items(TypeTag<BFloat16>{}); break;
    case Dtype::f64: items(TypeTag<double>{}); break;
    case Dtype::i64: items(TypeTag<std::int64_t>{}); break;
    case Dtype::i32: items(TypeTag<std::int32_t>{}); break;
    case Dtype::u8: items(TypeTag<std::uint8_t>{}); break;
    case Dtype::b8: items(TypeTag<std::uint8_t>{});
#pragma unroll
      for (int u = 0; u < N; ++u) x[u] = x[u] != C(0) ? C(1) : C(0);
      break;
  }
}

/// An index tensor's element (i64 or i32).
__device__ __forceinline__ std::int64_t load_index(const void* p, Dtype t, std::int64_t i) {
  return t == Dtype::i64 ? static_cast<const std::int64_t*>(p)[i]
                         : static_cast<const std::int32_t*>(p)[i];
}

// ---- pairs of 16-bit floats in one 32-bit word

template <class T>
__device__ __forceinline__ float2 unpack_pair(std::uint32_t word) {
  if constexpr (std::is_same_v<T, Half>) {
    __half2 pair;
    memcpy(&pair, &word, sizeof pair);  // through its fields it would cost two instructions more
    return __half22float2(pair);
  } else {
    static_assert(std::is_same_v<T, BFloat16>);
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  }
}
template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  std::uint32_t word;
  if constexpr (std::is_same_v<T, Half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, sizeof word);
  } else {
    static_assert(std::is_same_v<T, BFloat16>);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, sizeof word);
  }
  return word;
}

/// Elements of T in one 16-byte access.
template <class T>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

/// 16 bytes of T (float, Half or BFloat16) to floats.
template <class T>
__device__ __forceinline__ void unpack(uint4 v, float (&x)[kPerVector<T>]) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack_pair<T>(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}
template <class T>
__device__ __forceinline__ uint4 pack(const float (&x)[kPerVector<T>]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>)
      words[i] = __float_as_uint(x[i]);
    else
      words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// One 16-byte store to global memory. A plain `*p = v` is split into four stores by the compiler
/// where the store is conditional.
__device__ __forceinline__ void store_vector(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/// Whether p can be read in units of `bytes` (a power of two).
inline bool aligned(const void* p, std::size_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(p) & (bytes - 1)) == 0;
}

}  // namespace mixtape::kernels::cuda
