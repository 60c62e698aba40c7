// Reductions over the lanes of a warp and the threads of a block, in a fixed tree: the result does
// not depend on scheduling. T is any trivially copyable type of whole 32-bit words; combine(a, b)
// is associative up to rounding and commutative.
#pragma once

#include <cstdint>

namespace mixtape::kernels::cuda {

/// `v` of the lane whose id differs in `mask`'s bits; all 32 lanes take part.
template <class T>
__device__ __forceinline__ T shuffle_xor(T v, int mask) {
  static_assert(sizeof(T) % 4 == 0);
  constexpr int kWords = sizeof(T) / 4;
  std::uint32_t words[kWords];
  __builtin_memcpy(words, &v, sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(0xFFFFFFFFu, words[i], mask);
  __builtin_memcpy(&v, words, sizeof(T));
  return v;
}

/// Combines within groups of `width` lanes (a power of two <= 32, the same for the whole warp).
/// Every lane gets its group's result.
template <class T, class Combine>
__device__ __forceinline__ T warp_reduce(T v, Combine combine, int width = 32) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1)
    if (mask < width) v = combine(v, shuffle_xor(v, mask));
  return v;
}

/// Combines over a block of up to 1024 threads, a multiple of 32 (one-dimensional). Every thread
/// gets the result. Ends with a barrier, so that calls may follow each other.
template <class T, class Combine>
__device__ __forceinline__ T block_reduce(T v, T identity, Combine combine) {
  __shared__ __align__(16) unsigned char storage[32 * sizeof(T)];
  T* partial = reinterpret_cast<T*>(storage);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  v = warp_reduce(v, combine);
  if (warps == 1) return v;
  if (lane == 0) partial[warp] = v;
  __syncthreads();
  v = warp_reduce(lane < warps ? partial[lane] : identity, combine);
  __syncthreads();
  return v;
}

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
/// NaN in either operand gives NaN.
struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

template <class T>
__device__ __forceinline__ T block_sum(T v) {
  return block_reduce(v, T(0), Sum{});
}

}  // namespace mixtape::kernels::cuda
