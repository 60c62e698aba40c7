// A unit of consecutive elements in arithmetic type: 16 bytes of a 16- or 32-bit type in one
// access, or a single element of any floating type.
#pragma once

#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {

/// kWidth (1 or kPerVector<T>) elements that start at p, which the kernel does not write.
template <class T, int kWidth>
__device__ __forceinline__ void load_unit(const T* p, compute_t<T> (&v)[kWidth]) {
  if constexpr (kWidth == 1)
    v[0] = convert<compute_t<T>>(*p);
  else
    unpack<T>(__ldg(reinterpret_cast<const uint4*>(p)), v);
}
template <class T, int kWidth>
__device__ __forceinline__ void store_unit(T* p, const compute_t<T> (&v)[kWidth]) {
  if constexpr (kWidth == 1)
    *p = convert<T>(v[0]);
  else
    store_vector(p, pack<T>(v));
}

}  // namespace mixtape::kernels::cuda
