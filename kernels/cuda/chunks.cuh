// Work on tables of tensors in chunks: one block of threads takes one chunk, finds its tensor by
// binary search, and works on runs of four elements where memory is aligned for it.
#pragma once

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/optimizer.h"

namespace mixtape::kernels::cuda {

inline constexpr int kChunkThreads = 256;

/// Index of the entry that `chunk` belongs to; entries have ascending first_chunk.
template <class Entry>
__device__ __forceinline__ std::int64_t entry_of_chunk(const Entry* entries, std::int64_t count,
                                                       std::int64_t chunk) {
  std::int64_t low = 0, high = count;  // the last entry with first_chunk <= chunk is in [low, high)
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (entries[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ bool is_aligned(const void* p, unsigned bytes) {
  return (reinterpret_cast<std::uintptr_t>(p) & (bytes - 1)) == 0;
}

/// Four floats of a float, Half or BFloat16 array from element i, which is a multiple of 4 and
/// aligned (16 or 8 bytes).
__device__ __forceinline__ float4 load4(const void* p, Dtype t, std::int64_t i) {
  if (t == Dtype::f32) return *reinterpret_cast<const float4*>(static_cast<const float*>(p) + i);
  const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(p) + i);
  const float2 a = t == Dtype::f16 ? unpack_pair<Half>(words.x) : unpack_pair<BFloat16>(words.x);
  const float2 b = t == Dtype::f16 ? unpack_pair<Half>(words.y) : unpack_pair<BFloat16>(words.y);
  return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ void store4(void* p, Dtype t, std::int64_t i, float4 v) {
  if (t == Dtype::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p) + i) = v;
  } else {
    uint2 words;
    words.x = t == Dtype::f16 ? pack_pair<Half>(v.x, v.y) : pack_pair<BFloat16>(v.x, v.y);
    words.y = t == Dtype::f16 ? pack_pair<Half>(v.z, v.w) : pack_pair<BFloat16>(v.z, v.w);
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(p) + i) = words;
  }
}
/// Whether load4/store4 may be used on an array of dtype t that starts at p.
__device__ __forceinline__ bool fits_four(const void* p, Dtype t) {
  return t != Dtype::f64 && is_aligned(p, t == Dtype::f32 ? 16 : 8);
}

}  // namespace mixtape::kernels::cuda
