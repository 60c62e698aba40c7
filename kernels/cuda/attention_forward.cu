// Attention forward, one block for a tile of queries: a pass over the keys with a running maximum
// and sum of each row. Shared memory holds the queries, one tile of keys and then values, and the
// probabilities.
#include "kernels/cuda/attention_own.h"
#include "kernels/cuda/attention_tiles.cuh"

namespace mixtape::kernels::cuda {
namespace {

template <class C, int Columns, int Rows, int Keys>
struct ForwardTiles {
  C q[Rows][Columns + 1];
  C kv[Keys][Columns + 1];
  C p[Rows][Keys + 1];
};

template <class C, int Columns, int Rows, int Keys>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_forward_kernel(const AttentionProblem p) {
  constexpr int kRowsEach = Rows / kSide, kKeysEach = Keys / kSide, kColumnsEach = Columns / kSide;
  constexpr C kMasked = -static_cast<C>(INFINITY);
  extern __shared__ __align__(16) unsigned char memory[];
  auto& tile = *reinterpret_cast<ForwardTiles<C, Columns, Rows, Keys>*>(memory);
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  const std::int64_t tiles = ceil_div<std::int64_t>(p.queries, Rows);
  const std::int64_t first = (tiles - 1 - blockIdx.x % tiles) * Rows;  // longest rows first
  const std::int64_t b = blockIdx.x / tiles / p.heads, h = blockIdx.x / tiles % p.heads;
  const std::int64_t g = h / (p.heads / p.groups), row0 = (b * p.heads + h) * p.queries + first;
  const std::int64_t k_head = head_offset(p.k, b, g), v_head = head_offset(p.v, b, g);
  const std::int64_t mask_head = head_offset(p.mask, b, h);

  load_rows<C, Rows, Columns>(p.q, head_offset(p.q, b, h), first, p.queries, p.columns,
                              static_cast<C>(p.scale), tile.q, SkipNone{});
  C sums[kRowsEach][kColumnsEach] = {}, top[kRowsEach], total[kRowsEach];
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) top[i] = kMasked, total[i] = C(0);

  const std::int64_t end = p.causal ? min(p.keys, first + Rows) : p.keys;
  for (std::int64_t key = 0; key < end; key += Keys) {
    __syncthreads();  // the values of the tile before have been read
    load_rows<C, Keys, Columns>(p.k, k_head, key, p.keys, p.columns, C(1), tile.kv, SkipNone{});
    __syncthreads();
    C score[kRowsEach][kKeysEach];
    multiply_rows<C, Rows, Keys, Columns>(tile.q, tile.kv, p.columns, score);
    __syncthreads();  // the keys have been read
    load_rows<C, Keys, Columns>(p.v, v_head, key, p.keys, p.columns, C(1), tile.kv, SkipNone{});
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int r = y + kSide * i;
      C highest = top[i];
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        score[i][j] = masked_score(p, mask_head, first + r, key + x + kSide * j, score[i][j]);
        highest = Max{}(highest, score[i][j]);
      }
      highest = warp_reduce(highest, Max{}, kSide);
      const bool none = highest == kMasked;
      const C shrink = none ? C(1) : exp(top[i] - highest);
      C added = C(0);
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        const C e = none ? C(0) : exp(score[i][j] - highest);
        added += e;
        tile.p[r][x + kSide * j] = e * dropout_factor<C>(p, row0 + r, key + x + kSide * j);
      }
      total[i] = total[i] * shrink + warp_reduce(added, Sum{}, kSide);
      top[i] = highest;
#pragma unroll
      for (int c = 0; c < kColumnsEach; ++c) sums[i][c] *= shrink;
    }
    __syncthreads();
    add_weighted_rows<C, Rows, Columns>(
        Keys, [&](int n, int r) { return tile.p[r][n]; }, tile.kv, sums);
  }

  const std::int64_t out_head = head_offset(p.out, b, h);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::int64_t t = first + y + kSide * i;
    if (t >= p.queries) continue;
    const bool none = top[i] == kMasked;
    const C inverse = none ? C(0) : C(1) / total[i];
#pragma unroll
    for (int c = 0; c < kColumnsEach; ++c)
      if (x + kSide * c < p.columns)
        store_as<C>(p.out.data, p.out.dtype, out_head + t * p.out.stride[2] + x + kSide * c,
                    sums[i][c] * inverse);
    if (x == 0 && p.lse != nullptr)
      static_cast<C*>(p.lse)[row0 + y + kSide * i] = none ? kMasked : top[i] + log(total[i]);
  }
}

/// Tiles that leave shared memory for two blocks and registers without spilling.
template <class C, int Columns>
struct ForwardShape {
  static constexpr int kRows =
      sizeof(C) == 8 ? (Columns == 256 ? 16 : 32) : (Columns == 256 ? 32 : 64);
  static constexpr int kKeys = kRows;
};

}  // namespace

void own_attention_forward(const Stream& stream, const AttentionForward& args) {
  AttentionProblem p(args.args);
  p.out = AttentionOperand(args.out);
  p.lse = args.lse ? args.lse.data : nullptr;
  dispatch_attention(args.out.dtype, p.columns, [&]<class C, int Columns>() {
    constexpr int kRows = ForwardShape<C, Columns>::kRows, kKeys = ForwardShape<C, Columns>::kKeys;
    launch_attention(attention_forward_kernel<C, Columns, kRows, kKeys>,
                     args.args.q.size(0) * p.heads * ceil_div<std::int64_t>(p.queries, kRows),
                     sizeof(ForwardTiles<C, Columns, kRows, kKeys>), native_stream(stream), p);
  });
}

}  // namespace mixtape::kernels::cuda
