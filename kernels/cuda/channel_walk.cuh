// Walking over channels, and sums over them in two stages without atomics: each block leaves one
// partial result per channel of its chunk, and merge_chunks combines those in a fixed order.
#pragma once

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/channel_grid.h"
#include "kernels/cuda/channel_vectors.cuh"
#include "kernels/cuda/launch.cuh"

namespace mixtape::kernels::cuda {

/// This thread's part of a chunk: `count` vectors of kWidth elements, the i-th at offset(i). All
/// are of channel `channel`, or (channels-last) of the kWidth channels from there.
template <bool kLast, int kWidth>
struct ChannelWalk {
  std::int64_t base, count = 0;
  int channel = 0, first = 0;
  const ChannelGrid& grid;

  __device__ explicit ChannelWalk(const ChannelGrid& g) : grid(g) {
    const std::int64_t begin = blockIdx.y * g.per_chunk;
    const std::int64_t size = min(g.per_chunk, g.items - begin);
    if constexpr (kLast) {
      const int lane = threadIdx.x % g.lanes, group = threadIdx.x / g.lanes;
      channel = (blockIdx.x * g.lanes + lane) * kWidth;
      base = (begin + group) * g.channels + channel;
      if (channel < g.channels && group < size) count = (size - group + groups() - 1) / groups();
    } else {
      channel = blockIdx.x;
      base = channel * g.plane;
      first = static_cast<int>(begin + threadIdx.x);
      if (threadIdx.x < size) count = (size - threadIdx.x + kChannelThreads - 1) / kChannelThreads;
    }
  }
  /// Channels-last: threads that share a lane's channels.
  __device__ int groups() const { return kChannelThreads / grid.lanes; }
  __device__ std::int64_t offset(std::int64_t i) const {
    if constexpr (kLast) {
      return base + i * groups() * grid.channels;
    } else {
      std::uint32_t vector = static_cast<std::uint32_t>(first + i * kChannelThreads);
      const std::int64_t image = grid.plane_vectors.divide(vector);
      return base + image * grid.channels * grid.plane + std::int64_t{vector} * kWidth;
    }
  }
  /// Channel of a vector's k-th element.
  __device__ int channel_of(int k) const { return kLast ? channel + k : channel; }
};

/// Calls body(offset, v) for the thread's vectors, v[j] being the kWidth values of operands[j]
/// (zeros where it is null); loads of several vectors are under way at once.
template <class T, bool kLast, int kWidth, int kOperands, class Body>
__device__ __forceinline__ void for_each_vector(const ChannelWalk<kLast, kWidth>& walk,
                                                const T* const (&operands)[kOperands],
                                                Body&& body) {
  constexpr int kUnroll = 4;
  for (std::int64_t i = 0; i < walk.count; i += kUnroll) {
    Raw<T, kWidth> raw[kUnroll][kOperands];
    std::int64_t offset[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      offset[u] = walk.offset(i + u);
#pragma unroll
      for (int j = 0; j < kOperands; ++j) {
        raw[u][j] = {};
        if (i + u < walk.count && operands[j] != nullptr)
          raw[u][j] = load_raw<T, kWidth>(operands[j] + offset[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u >= walk.count) break;
      compute_t<T> v[kOperands][kWidth];
#pragma unroll
      for (int j = 0; j < kOperands; ++j) expand<T, kWidth>(raw[u][j], v[j]);
      body(offset[u], v);
    }
  }
}

// ---- partial results

/// Count, mean and sum of squares about it, merged as Chan, Golub and LeVeque (1979) do.
struct Moments {
  double count = 0, mean = 0, squares = 0;
};
struct MergeMoments {
  __device__ Moments operator()(const Moments& a, const Moments& b) const {
    if (b.count == 0) return a;
    if (a.count == 0) return b;
    const double total = a.count + b.count, delta = b.mean - a.mean, share = b.count / total;
    return {total, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
  }
};
struct SumPair {
  double a = 0, b = 0;
};
struct AddPairs {
  __device__ SumPair operator()(const SumPair& x, const SumPair& y) const {
    return {x.a + y.a, x.b + y.b};
  }
};

/// Combines the block's partial results (one for each of a thread's kWidth elements) and writes one
/// per channel to partials (chunks, C).
template <bool kLast, int kWidth, class Partial, class Combine>
__device__ void write_partials(const ChannelWalk<kLast, kWidth>& walk,
                               const Partial (&mine)[kWidth], Combine combine, Partial* partials) {
  Partial* const to = partials + blockIdx.y * walk.grid.channels;
  if constexpr (kLast) {
    __shared__ __align__(16) unsigned char storage[kChannelThreads * sizeof(Partial)];
    Partial* const shared = reinterpret_cast<Partial*>(storage);
    const int lanes = walk.grid.lanes, group = threadIdx.x / lanes;
    for (int k = 0; k < kWidth; ++k) {
      shared[threadIdx.x] = mine[k];
      __syncthreads();
      for (int half = walk.groups() / 2; half > 0; half /= 2) {
        if (group < half)
          shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half * lanes]);
        __syncthreads();
      }
      if (group == 0 && walk.channel + k < walk.grid.channels)
        to[walk.channel + k] = shared[threadIdx.x];
      __syncthreads();
    }
  } else {
    Partial sum = mine[0];
#pragma unroll
    for (int k = 1; k < kWidth; ++k) sum = combine(sum, mine[k]);
    sum = block_reduce(sum, Partial{}, combine);
    if (threadIdx.x == 0) to[walk.channel] = sum;
  }
}

inline constexpr int kMergeGroups = 32;

/// For a block of (32, kMergeGroups) threads, thread x of which has channel blockIdx.x * 32 + x:
/// the combination of all chunks' partials of that channel, on threads with threadIdx.y == 0.
template <class Partial, class Combine>
__device__ Partial merge_chunks(const Partial* partials, std::int64_t channels, int chunks,
                                Combine combine) {
  __shared__ __align__(16) unsigned char storage[32 * kMergeGroups * sizeof(Partial)];
  Partial* const shared = reinterpret_cast<Partial*>(storage);
  const std::int64_t channel = std::int64_t{blockIdx.x} * 32 + threadIdx.x;
  Partial sum{};
  for (int chunk = threadIdx.y; channel < channels && chunk < chunks; chunk += kMergeGroups)
    sum = combine(sum, partials[chunk * channels + channel]);
  const int at = threadIdx.y * 32 + threadIdx.x;
  shared[at] = sum;
  __syncthreads();
  for (int half = kMergeGroups / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) shared[at] = combine(shared[at], shared[at + half * 32]);
    __syncthreads();
  }
  return shared[threadIdx.x];
}

/// Calls f.template operator()<T, kLast, kWidth>() for the dtype, layout and width.
template <class F>
void dispatch_channels(const char* op, Dtype dtype, bool channels_last, bool vectors, F&& f) {
  dispatch_floating(op, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      if (vectors)
        return channels_last ? f.template operator()<T, true, kPerVector<T>>()
                             : f.template operator()<T, false, kPerVector<T>>();
    }
    channels_last ? f.template operator()<T, true, 1>() : f.template operator()<T, false, 1>();
  });
}

}  // namespace mixtape::kernels::cuda
