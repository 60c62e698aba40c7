// What the attention kernels share: operands by value, tiles in shared memory, scores of a thread.
//
// A block has 16 x 16 threads. Thread (x, y) of it owns rows y, y + 16, .. and columns x, x + 16,
// .. of every tile, so that a row is shared by 16 lanes of one warp. Tiles in shared memory have
// rows of an odd length: lanes that read a column meet no bank twice. Legend: kernels/attention.h.
#pragma once

#include "engine/philox.h"
#include "kernels/attention.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {

inline constexpr int kSide = 16;
inline constexpr int kAttentionThreads = kSide * kSide;

/// A (B, H, T, D) operand with unit stride in D, or a mask (B, H, T, S).
struct AttentionOperand {
  void* data = nullptr;
  std::int64_t stride[4] = {0, 0, 0, 1};
  Dtype dtype = Dtype::f32;

  AttentionOperand() = default;
  explicit AttentionOperand(const View& v) : data(v.data), dtype(v.dtype) {
    if (!v) return;
    for (int i = 0; i < 4; ++i) stride[i] = v.stride(i);
  }
};

struct AttentionProblem {
  AttentionOperand q, k, v, mask, out, dout, dq, dk, dv;
  void *lse = nullptr, *delta = nullptr;  // (B, H, T)
  std::int64_t heads, groups, queries, keys;
  int columns;  // D
  bool causal;
  double scale;
  float dropout;
  double kept;  // 1 / (1 - dropout)
  PhiloxState random;

  explicit AttentionProblem(const AttentionArgs& a)
      : q(a.q),
        k(a.k),
        v(a.v),
        mask(a.mask),
        heads(a.q.size(1)),
        groups(a.k.size(1)),
        queries(a.q.size(2)),
        keys(a.k.size(2)),
        columns(static_cast<int>(a.q.size(3))),
        causal(a.causal),
        scale(a.scale),
        dropout(static_cast<float>(a.dropout)),
        kept(a.dropout < 1 ? 1 / (1 - a.dropout) : 0),
        random(a.random) {}
};

/// Where one (b, h) starts.
__device__ __forceinline__ std::int64_t head_offset(const AttentionOperand& o, std::int64_t b,
                                                    std::int64_t h) {
  return b * o.stride[0] + h * o.stride[1];
}

/// Rows [first, first + Rows) of a head times `factor`; zeros past `end`, past D, and in the rows
/// that `skip(row)` names.
template <class C, int Rows, int Columns, class Skip>
__device__ __forceinline__ void load_rows(const AttentionOperand& from, std::int64_t head,
                                          std::int64_t first, std::int64_t end, int columns,
                                          C factor, C (*tile)[Columns + 1], Skip skip) {
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  for (int r = y; r < Rows; r += kSide) {
    const bool present = first + r < end && !skip(first + r);
    for (int c = x; c < Columns; c += kSide)
      tile[r][c] =
          present && c < columns
              ? load_as<C>(from.data, from.dtype, head + (first + r) * from.stride[2] + c) * factor
              : C(0);
  }
}
struct SkipNone {
  __device__ bool operator()(std::int64_t) const { return false; }
};

/// sums[i][j] = product over D of row y + 16 i of a and row x + 16 j of b.
template <class C, int Rows, int Keys, int Columns>
__device__ __forceinline__ void multiply_rows(const C (*a)[Columns + 1], const C (*b)[Columns + 1],
                                              int columns, C (&sums)[Rows / kSide][Keys / kSide]) {
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
#pragma unroll
  for (int i = 0; i < Rows / kSide; ++i)
#pragma unroll
    for (int j = 0; j < Keys / kSide; ++j) sums[i][j] = C(0);
  for (int d = 0; d < columns; ++d) {
    C left[Rows / kSide], right[Keys / kSide];
#pragma unroll
    for (int i = 0; i < Rows / kSide; ++i) left[i] = a[y + kSide * i][d];
#pragma unroll
    for (int j = 0; j < Keys / kSide; ++j) right[j] = b[x + kSide * j][d];
#pragma unroll
    for (int i = 0; i < Rows / kSide; ++i)
#pragma unroll
      for (int j = 0; j < Keys / kSide; ++j) sums[i][j] += left[i] * right[j];
  }
}

/// sums[i][c] += product over n of weight(n, y + 16 i) and values[n][x + 16 c].
template <class C, int Rows, int Columns, class Weight>
__device__ __forceinline__ void add_weighted_rows(int count, Weight weight,
                                                  const C (*values)[Columns + 1],
                                                  C (&sums)[Rows / kSide][Columns / kSide]) {
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  for (int n = 0; n < count; ++n) {
    C w[Rows / kSide];
#pragma unroll
    for (int i = 0; i < Rows / kSide; ++i) w[i] = weight(n, y + kSide * i);
#pragma unroll
    for (int c = 0; c < Columns / kSide; ++c) {
      const C v = values[n][x + kSide * c];
#pragma unroll
      for (int i = 0; i < Rows / kSide; ++i) sums[i][c] += w[i] * v;
    }
  }
}

/// A scaled product with its masks: -inf where query t may not attend to key s.
template <class C>
__device__ __forceinline__ C masked_score(const AttentionProblem& p, std::int64_t mask_head,
                                          std::int64_t t, std::int64_t s, C score) {
  constexpr C kMasked = -static_cast<C>(INFINITY);
  if (t >= p.queries || s >= p.keys || (p.causal && s > t)) return kMasked;
  if (p.mask.data == nullptr) return score;
  const C m = load_as<C>(p.mask.data, p.mask.dtype,
                         mask_head + t * p.mask.stride[2] + s * p.mask.stride[3]);
  if (p.mask.dtype == Dtype::b8) return m != C(0) ? score : kMasked;
  return m == kMasked ? kMasked : score + m;
}

/// What dropout multiplies the probability of (row, s) by.
template <class C>
__device__ __forceinline__ C dropout_factor(const AttentionProblem& p, std::int64_t row,
                                            std::int64_t s) {
  if (p.dropout == 0) return C(1);
  const std::uint64_t index = static_cast<std::uint64_t>(row * ((p.keys + 3) / 4 * 4) + s);
  return philox_uniform(p.random, index) >= p.dropout ? static_cast<C>(p.kept) : C(0);
}

/// Launches `kernel` with more than 48 KiB of shared memory where it needs that.
inline void launch_attention(void (*kernel)(AttentionProblem), std::int64_t blocks,
                             std::size_t shared, cudaStream_t stream, const AttentionProblem& p) {
  if (blocks == 0) return;
  MT_CUDA_CHECK(cudaFuncSetAttribute(kernel_address(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared)));
  launch(kernel, dim3(blocks_for(blocks, 1)), dim3(kAttentionThreads), shared, stream, p);
}

/// Calls f.template operator()<C, Columns>() with the arithmetic type and D rounded up to 64, 128
/// or 256.
template <class F>
void dispatch_attention(Dtype dtype, std::int64_t columns, F&& f) {
  const auto by_columns = [&]<class C>() {
    if (columns <= 64)
      f.template operator()<C, 64>();
    else if (columns <= 128)
      f.template operator()<C, 128>();
    else
      f.template operator()<C, 256>();
  };
  if (dtype == Dtype::f64)
    by_columns.template operator()<double>();
  else
    by_columns.template operator()<float>();
}

}  // namespace mixtape::kernels::cuda
