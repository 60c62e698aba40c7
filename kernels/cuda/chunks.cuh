// What the multi-tensor kernels share: one launch covers a table of tensors, cut into chunks of
// kChunk elements. A block takes one chunk and finds its tensor in the table.
#pragma once

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/optimizer.h"

namespace mixtape::kernels::cuda {

inline constexpr int kChunkThreads = 256;

/// Index of the entry that `chunk` belongs to: the last whose first_chunk is not above it. Called
/// by whole warps; each step narrows 32-fold.
template <class Entry>
__device__ __forceinline__ int find_entry(const Entry* entries, std::int64_t count,
                                          std::int64_t chunk) {
  const int lane = threadIdx.x % kWarp;
  int low = 0, end = static_cast<int>(count);
  while (end - low > 1) {
    const int stride = (end - low + kWarp - 1) / kWarp, probe = low + lane * stride;
    const bool not_above = probe < end && entries[probe].first_chunk <= chunk;
    const int last = 31 - __clz(static_cast<int>(__ballot_sync(0xFFFFFFFFu, not_above) | 1u));
    low += last * stride;
    end = min(end, low + stride);
  }
  return low;
}

/// A piece of a tensor: elements [start, start + count) of an array of `dtype`.
struct Chunk {
  std::int64_t start;
  int count;
};
template <class Entry>
__device__ __forceinline__ Chunk chunk_of(const Entry& entry, std::int64_t chunk) {
  const std::int64_t start = (chunk - entry.first_chunk) * kChunk, rest = entry.numel - start;
  return {start, static_cast<int>(rest < kChunk ? rest : kChunk)};
}

}  // namespace mixtape::kernels::cuda
