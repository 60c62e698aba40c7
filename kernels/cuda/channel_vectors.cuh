// Neighbouring elements of an image tensor as one access: 16 bytes, or a single element.
#pragma once

#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {

/// kWidth elements of T as they are loaded.
template <class T, int kWidth>
using Raw = std::conditional_t<kWidth == 1, T, uint4>;

template <class T, int kWidth>
__device__ __forceinline__ Raw<T, kWidth> load_raw(const T* p) {
  return *reinterpret_cast<const Raw<T, kWidth>*>(p);
}
template <class T, int kWidth>
__device__ __forceinline__ void expand(const Raw<T, kWidth>& raw, compute_t<T> (&v)[kWidth]) {
  if constexpr (kWidth == 1)
    v[0] = convert<compute_t<T>>(raw);
  else
    unpack<T>(raw, v);
}

/// kWidth values of T as its compute type.
template <class T, int kWidth>
__device__ __forceinline__ void load_channels(const T* p, compute_t<T> (&v)[kWidth]) {
  expand<T, kWidth>(load_raw<T, kWidth>(p), v);
}
template <class T, int kWidth>
__device__ __forceinline__ void store_channels(T* p, const compute_t<T> (&v)[kWidth]) {
  if constexpr (kWidth == 1)
    *p = convert<T>(v[0]);
  else
    store_vector(p, pack<T>(v));
}

}  // namespace mixtape::kernels::cuda
