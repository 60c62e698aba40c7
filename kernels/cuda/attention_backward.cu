// Attention backward in three kernels: delta = sum(dout * out) of each row; dk and dv, one block
// for a tile of keys that passes over the queries; dq, one block for a tile of queries that passes
// over the keys. Probabilities are remade from the saved log-sum-exp. Formulas are those of
// kernels/cpu/attention_backward.cpp.
#include "kernels/cuda/attention_own.h"
#include "kernels/cuda/attention_tiles.cuh"

namespace mixtape::kernels::cuda {
namespace {

template <class C>
inline constexpr C kNoKeys = -static_cast<C>(INFINITY);  // lse of a row that attends to nothing

/// Names the rows of a head that attend to no key: what reaches them does not matter.
template <class C>
struct SkipRowsWithoutKeys {
  const C* lse;
  __device__ bool operator()(std::int64_t t) const { return lse[t] == kNoKeys<C>; }
};

template <class C>
__global__ void attention_delta_kernel(const AttentionProblem p, std::int64_t rows) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (row >= rows) return;
  const std::int64_t t = row % p.queries, h = row / p.queries % p.heads,
                     b = row / p.queries / p.heads;
  const std::int64_t dout = head_offset(p.dout, b, h) + t * p.dout.stride[2],
                     out = head_offset(p.out, b, h) + t * p.out.stride[2];
  C sum = C(0);
  for (int d = threadIdx.x % kWarp; d < p.columns; d += kWarp)
    sum += load_as<C>(p.dout.data, p.dout.dtype, dout + d) *
           load_as<C>(p.out.data, p.out.dtype, out + d);
  sum = warp_reduce(sum, Sum{});
  if (threadIdx.x % kWarp == 0)
    static_cast<C*>(p.delta)[row] = static_cast<const C*>(p.lse)[row] == kNoKeys<C> ? C(0) : sum;
}

template <class C, int Columns, int Side>
struct BackwardTiles {
  C q[Side][Columns + 1], dout[Side][Columns + 1];
  C k[Side][Columns + 1], v[Side][Columns + 1];
  C p[Side][Side + 1], ds[Side][Side + 1];
};

/// Fills tile.p (with dropout's factors) and tile.ds for queries from `first` and keys from `key`.
template <class C, int Columns, int Side>
__device__ __forceinline__ void remake_probabilities(const AttentionProblem& p,
                                                     BackwardTiles<C, Columns, Side>& tile,
                                                     std::int64_t mask_head, std::int64_t head_row,
                                                     std::int64_t first, std::int64_t key) {
  constexpr int kEach = Side / kSide;
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  C score[kEach][kEach], dp[kEach][kEach];
  multiply_rows<C, Side, Side, Columns>(tile.q, tile.k, p.columns, score);
  multiply_rows<C, Side, Side, Columns>(tile.dout, tile.v, p.columns, dp);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int r = y + kSide * i;
    const std::int64_t t = first + r, row = head_row + t;
    const bool present = t < p.queries;
    const C lse = present ? static_cast<const C*>(p.lse)[row] : kNoKeys<C>;
    const C delta = present ? static_cast<const C*>(p.delta)[row] : C(0);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int n = x + kSide * j;
      C probability = C(0), ds = C(0);
      if (lse != kNoKeys<C>) {
        const C factor = dropout_factor<C>(p, row, key + n);
        probability = exp(masked_score(p, mask_head, t, key + n, score[i][j]) - lse);
        ds = probability * (factor * dp[i][j] - delta);
        probability *= factor;
      }
      tile.p[r][n] = probability;
      tile.ds[r][n] = ds;
    }
  }
}

template <class C, int Rows, int Columns>
__device__ __forceinline__ void store_rows(const AttentionOperand& to, std::int64_t head,
                                           std::int64_t first, std::int64_t end, int columns,
                                           C factor,
                                           const C (&sums)[Rows / kSide][Columns / kSide]) {
  if (to.data == nullptr) return;
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
#pragma unroll
  for (int i = 0; i < Rows / kSide; ++i) {
    const std::int64_t t = first + y + kSide * i;
    if (t >= end) continue;
#pragma unroll
    for (int c = 0; c < Columns / kSide; ++c)
      if (x + kSide * c < columns)
        store_as<C>(to.data, to.dtype, head + t * to.stride[2] + x + kSide * c,
                    sums[i][c] * factor);
  }
}

template <class C, int Columns, int Side>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_backward_keys_kernel(const AttentionProblem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& tile = *reinterpret_cast<BackwardTiles<C, Columns, Side>*>(memory);
  const std::int64_t tiles = ceil_div<std::int64_t>(p.keys, Side);
  const std::int64_t key = blockIdx.x % tiles * Side;
  const std::int64_t b = blockIdx.x / tiles / p.groups, g = blockIdx.x / tiles % p.groups;
  const std::int64_t per_group = p.heads / p.groups;
  load_rows<C, Side, Columns>(p.k, head_offset(p.k, b, g), key, p.keys, p.columns, C(1), tile.k,
                              SkipNone{});
  load_rows<C, Side, Columns>(p.v, head_offset(p.v, b, g), key, p.keys, p.columns, C(1), tile.v,
                              SkipNone{});
  C dk[Side / kSide][Columns / kSide] = {}, dv[Side / kSide][Columns / kSide] = {};
  for (std::int64_t h = g * per_group; h < (g + 1) * per_group; ++h) {
    const std::int64_t head_row = (b * p.heads + h) * p.queries;
    const SkipRowsWithoutKeys<C> skip{static_cast<const C*>(p.lse) + head_row};
    for (std::int64_t first = p.causal ? key : 0; first < p.queries; first += Side) {
      __syncthreads();  // the tiles before have been read
      load_rows<C, Side, Columns>(p.q, head_offset(p.q, b, h), first, p.queries, p.columns,
                                  static_cast<C>(p.scale), tile.q, SkipNone{});
      load_rows<C, Side, Columns>(p.dout, head_offset(p.dout, b, h), first, p.queries, p.columns,
                                  C(1), tile.dout, skip);
      __syncthreads();
      remake_probabilities(p, tile, head_offset(p.mask, b, h), head_row, first, key);
      __syncthreads();
      add_weighted_rows<C, Side, Columns>(
          Side, [&](int n, int r) { return tile.p[n][r]; }, tile.dout, dv);
      add_weighted_rows<C, Side, Columns>(
          Side, [&](int n, int r) { return tile.ds[n][r]; }, tile.q, dk);
    }
  }
  store_rows<C, Side, Columns>(p.dk, head_offset(p.dk, b, g), key, p.keys, p.columns, C(1), dk);
  store_rows<C, Side, Columns>(p.dv, head_offset(p.dv, b, g), key, p.keys, p.columns, C(1), dv);
}

template <class C, int Columns, int Side>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_backward_queries_kernel(const AttentionProblem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& tile = *reinterpret_cast<BackwardTiles<C, Columns, Side>*>(memory);
  const std::int64_t tiles = ceil_div<std::int64_t>(p.queries, Side);
  const std::int64_t first = (tiles - 1 - blockIdx.x % tiles) * Side;  // longest rows first
  const std::int64_t b = blockIdx.x / tiles / p.heads, h = blockIdx.x / tiles % p.heads;
  const std::int64_t g = h / (p.heads / p.groups), head_row = (b * p.heads + h) * p.queries;
  const SkipRowsWithoutKeys<C> skip{static_cast<const C*>(p.lse) + head_row};
  load_rows<C, Side, Columns>(p.q, head_offset(p.q, b, h), first, p.queries, p.columns,
                              static_cast<C>(p.scale), tile.q, SkipNone{});
  load_rows<C, Side, Columns>(p.dout, head_offset(p.dout, b, h), first, p.queries, p.columns, C(1),
                              tile.dout, skip);
  C dq[Side / kSide][Columns / kSide] = {};
  const std::int64_t end = p.causal ? min(p.keys, first + Side) : p.keys;
  for (std::int64_t key = 0; key < end; key += Side) {
    __syncthreads();
    load_rows<C, Side, Columns>(p.k, head_offset(p.k, b, g), key, p.keys, p.columns, C(1), tile.k,
                                SkipNone{});
    load_rows<C, Side, Columns>(p.v, head_offset(p.v, b, g), key, p.keys, p.columns, C(1), tile.v,
                                SkipNone{});
    __syncthreads();
    remake_probabilities(p, tile, head_offset(p.mask, b, h), head_row, first, key);
    __syncthreads();
    add_weighted_rows<C, Side, Columns>(
        Side, [&](int n, int r) { return tile.ds[r][n]; }, tile.k, dq);
  }
  store_rows<C, Side, Columns>(p.dq, head_offset(p.dq, b, h), first, p.queries, p.columns,
                               static_cast<C>(p.scale), dq);
}

/// Up to 98 KiB of shared memory, 134 KiB for double with D > 128.
template <class C, int Columns>
constexpr int backward_side() {
  if (sizeof(C) == 8) return Columns == 64 ? 32 : 16;
  return Columns == 64 ? 64 : Columns == 128 ? 32 : 16;
}

template <class C>
void launch_delta(const AttentionProblem& p, std::int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  constexpr int kThreads = 256;
  launch(attention_delta_kernel<C>, dim3(blocks_for(rows, kThreads / kWarp)), dim3(kThreads), 0,
         stream, p, rows);
}

}  // namespace

std::size_t own_attention_backward_workspace_bytes(const AttentionBackward& args) {
  return static_cast<std::size_t>(args.lse.numel()) * size_of(args.lse.dtype);  // delta
}

void own_attention_backward(const Stream& stream, const AttentionBackward& args,
                            Workspace workspace) {
  const std::size_t bytes = own_attention_backward_workspace_bytes(args);
  MT_CHECK(workspace.bytes >= bytes, "attention_backward: expected a workspace of ", bytes,
           " bytes, got ", workspace.bytes);
  AttentionProblem p(args.args);
  p.out = AttentionOperand(args.out);
  p.dout = AttentionOperand(args.dout);
  p.dq = AttentionOperand(args.dq);
  p.dk = AttentionOperand(args.dk);
  p.dv = AttentionOperand(args.dv);
  p.lse = args.lse.data;
  p.delta = workspace.data;
  const cudaStream_t queue = native_stream(stream);
  const std::int64_t batch = args.args.q.size(0);
  dispatch_attention(args.args.q.dtype, p.columns, [&]<class C, int Columns>() {
    constexpr int kSideOfTiles = backward_side<C, Columns>();
    constexpr std::size_t kShared = sizeof(BackwardTiles<C, Columns, kSideOfTiles>);
    launch_delta<C>(p, args.lse.numel(), queue);
    if (args.dk || args.dv)
      launch_attention(attention_backward_keys_kernel<C, Columns, kSideOfTiles>,
                       batch * p.groups * ceil_div<std::int64_t>(p.keys, kSideOfTiles), kShared,
                       queue, p);
    if (args.dq)
      launch_attention(attention_backward_queries_kernel<C, Columns, kSideOfTiles>,
                       batch * p.heads * ceil_div<std::int64_t>(p.queries, kSideOfTiles), kShared,
                       queue, p);
  });
}

}  // namespace mixtape::kernels::cuda
