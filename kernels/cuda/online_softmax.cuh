// Maximum and sum of exponentials of a row in one pass (Milakov and Gimelshein 2018), and how a
// block splits a row that need not be 16-byte aligned: a head and a tail of single elements, and
// vectors between them.
#pragma once

#include "kernels/cuda/rows.cuh"

namespace mixtape::kernels::cuda {

inline constexpr int kBatch = 4;  // vectors that a thread has in flight

/// The maximum to subtract: 0 for a row of -inf, whose exponentials are then 0 and not NaN.
template <class C>
__device__ __forceinline__ C finite_max(C max) {
  return max == C(-INFINITY) ? C(0) : max;
}

/// Running maximum and sum of exp(v - maximum). NaN and +inf in a row make the sum NaN.
struct OnlineSum {
  float max = -INFINITY, sum = 0;

  /// T is the storage type of the values (see exp_for).
  template <class T, int N>
  __device__ __forceinline__ void add(const float (&v)[N]) {
    float new_max = max;
#pragma unroll
    for (int k = 0; k < N; ++k) new_max = fmaxf(new_max, v[k]);
    const float base = finite_max(new_max);
    float part = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) part += exp_for<T>(v[k] - base);
    sum = sum * expf(max - base) + part;
    max = new_max;
  }
  /// Totals in every thread; `max` is then finite_max of the row, and sum is 0 for a row of -inf.
  __device__ __forceinline__ OnlineSum block_total() const {
    OnlineSum total;
    total.max = finite_max(block_reduce(max, -INFINITY, Max{}));
    total.sum = block_reduce(sum * expf(max - total.max), 0.0f, Sum{});
    return total;
  }
  __device__ __forceinline__ OnlineSum group_total(int group) const {
    OnlineSum total;
    total.max = finite_max(warp_reduce(max, Max{}, group));
    total.sum = warp_reduce(sum * expf(max - total.max), Sum{}, group);
    return total;
  }
};

/// A row seen by a block of at least two warps: `head` single elements up to the first 16-byte
/// boundary, `units` vectors, and a tail.
struct RowParts {
  int columns, head, units, tail;  // tail: its first column

  /// The head or tail column that `thread` handles, or -1.
  __device__ __forceinline__ int edge_column(int thread) const {
    if (thread < head) return thread;
    const int column = tail + thread - kWarp;
    return thread >= kWarp && column < columns ? column : -1;
  }
};
template <class T>
__device__ __forceinline__ RowParts split_row(const T* row, int columns) {
  constexpr int kSize = static_cast<int>(sizeof(T)), kWidth = kUnitWidth<T, true>;
  const int past = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) & 15);
  const int head = min(((16 - past) & 15) / kSize, columns);
  const int units = (columns - head) / kWidth;
  return {columns, head, units, head + units * kWidth};
}

/// The vectors first, first + blockDim.x, ... of `body` that exist.
template <class T>
__device__ __forceinline__ void load_batch(uint4 (&unit)[kBatch], const T* body, int first,
                                           int units) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int u = first + b * static_cast<int>(blockDim.x);
    if (u < units) unit[b] = load_unit<T, true>(body, u);
  }
}
/// Their values; `absent` for vectors that do not exist.
template <class T>
__device__ __forceinline__ void unpack_batch(const uint4 (&unit)[kBatch],
                                             float (&v)[kBatch * kUnitWidth<T, true>], int first,
                                             int units, float absent) {
  constexpr int kWidth = kUnitWidth<T, true>;
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const bool active = first + b * static_cast<int>(blockDim.x) < units;
    float part[kWidth];
    unpack<T>(unit[b], part);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[b * kWidth + k] = active ? part[k] : absent;
  }
}

}  // namespace mixtape::kernels::cuda
