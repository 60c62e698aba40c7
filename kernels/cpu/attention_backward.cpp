// Attention backward on the CPU. The probabilities of a (query tile, key block) pair are remade
// from the saved log-sum-exp; with P the probabilities after dropout's factors Z and delta =
// sum(dout * out) of a row,
//
//   dv += P^T dout,   dS = p * (Z * (dout v^T) - delta),   dk += dS^T (scale q),   dq += scale dS
//   k.
//
// Two schedules with the same sums in the same order. Where there are heads enough for the threads,
// a task takes all of one key-value head and each pair once. Else one pass is split over key blocks
// (dk, dv) and one over query chunks (dq), and each pair's products are made twice.
#include "engine/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/cpu/attention_tiles.h"

namespace mixtape::kernels::cpu {
namespace {

/// One block of keys and values with what is summed for it; dk and dv are null where not wanted.
template <class C>
struct KeyBlock {
  std::int64_t key, count;
  C *k, *k_columns, *v_columns;  // (count, D), (D, count), (D, count)
  C *dk, *dv;                    // (count, D)
};

/// One tile of queries, of head h.
template <class C>
struct QueryTile {
  std::int64_t first, rows;
  C *q, *dout;                 // (rows, D); q scaled, dout 0 in rows without a key
  C *lse, *delta;              // (rows)
  C *probabilities, *dscores;  // (rows, count)
};

template <class C>
double dot(const C* a, const C* b, std::int64_t n) {
  using P = RowPacket<C>;
  return row_sums<C, 1>(n, [&](std::int64_t i, int count) {
    return std::array{P::load(a + i, count, C(0)) * P::load(b + i, count, C(0))};
  })[0];
}

template <class C>
class BackwardPass {
 public:
  explicit BackwardPass(const AttentionBackward& backward)
      : b_(backward),
        a_(backward.args),
        drop_(a_),
        heads_(a_.q.size(1)),
        groups_(a_.k.size(1)),
        queries_(a_.q.size(2)),
        keys_(a_.k.size(2)),
        d_(a_.q.size(3)),
        ld_(tile_ld<C>(d_)) {}

  static std::size_t workspace_bytes(const AttentionBackward& b) {
    const View& q = b.args.q;
    if (!b.dq) return 0;
    return static_cast<std::size_t>(q.size(0) * q.size(1) * q.size(2) * tile_ld<C>(q.size(3))) *
           sizeof(C);
  }

  void run(Workspace workspace) const {
    const std::int64_t pairs = a_.k.size(0) * groups_;
    const bool wants_keys = b_.dk || b_.dv;
    if (wants_keys && pairs >= num_threads()) {
      MT_CHECK(workspace.bytes >= workspace_bytes(b_),
               "attention_backward: expected a workspace of ", workspace_bytes(b_), " bytes, got ",
               workspace.bytes);
      C* const sums = b_.dq ? static_cast<C*>(workspace.data) : nullptr;
      return parallel_for(0, pairs, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) whole_head(i / groups_, i % groups_, sums);
      });
    }
    if (wants_keys) run_keys(pairs);
    if (b_.dq) run_queries();
  }

 private:
  static constexpr std::int64_t kLdKeys = tile_ld<C>(kKeys);

  /// All of key-value head g: dk, dv, and dq in `sums` (B, H, T, ld).
  void whole_head(std::int64_t b, std::int64_t g, C* sums) const {
    const std::int64_t per_group = heads_ / groups_, h0 = g * per_group;
    ScratchFrame frame;
    KeyBlock<C> block = take_block(frame, true);
    const QueryTile<C> tile = take_tile(frame);
    const auto sums_of = [&](std::int64_t h) { return sums + (b * heads_ + h) * queries_ * ld_; };
    if (sums != nullptr) std::fill(sums_of(h0), sums_of(h0 + per_group), C(0));
    for (std::int64_t key = 0; key < keys_; key += kKeys) {
      load_block(b, g, key, block);
      for (std::int64_t h = h0; h < h0 + per_group; ++h)
        visit(b, h, 0, queries_, block, tile, sums != nullptr ? sums_of(h) : nullptr);
      store_block(b, g, block);
    }
    if (sums == nullptr) return;
    for (std::int64_t h = h0; h < h0 + per_group; ++h) store_dq(b, h, 0, queries_, sums_of(h));
  }

  void run_keys(std::int64_t pairs) const {
    const std::int64_t blocks = (keys_ + kKeys - 1) / kKeys, per_group = heads_ / groups_;
    parallel_for(0, pairs * blocks, 1, [&](std::int64_t begin, std::int64_t end) {
      ScratchFrame frame;
      KeyBlock<C> block = take_block(frame, true);
      const QueryTile<C> tile = take_tile(frame);
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t b = i / blocks / groups_, g = i / blocks % groups_;
        load_block(b, g, balanced(i % blocks, blocks) * kKeys, block);
        for (std::int64_t h = g * per_group; h < (g + 1) * per_group; ++h)
          visit(b, h, 0, queries_, block, tile, nullptr);
        store_block(b, g, block);
      }
    });
  }

  void run_queries() const {
    const std::int64_t chunks = (queries_ + kChunk - 1) / kChunk, most = chunk_rows(queries_);
    const std::int64_t tasks = a_.q.size(0) * heads_ * chunks;
    parallel_for(0, tasks, 1, [&](std::int64_t begin, std::int64_t end) {
      ScratchFrame frame;
      KeyBlock<C> block = take_block(frame, false);
      const QueryTile<C> tile = take_tile(frame);
      C* const sums = frame.take<C>(kChunk * ld_);
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t b = i / chunks / heads_, h = i / chunks % heads_;
        const std::int64_t first = balanced(i % chunks, chunks) * most;
        const std::int64_t rows = std::min(most, queries_ - first);
        std::fill(sums, sums + rows * ld_, C(0));
        const std::int64_t end_key = a_.causal ? std::min(keys_, first + rows) : keys_;
        for (std::int64_t key = 0; key < end_key; key += kKeys) {
          load_block(b, h / (heads_ / groups_), key, block);
          visit(b, h, first, rows, block, tile, sums);
        }
        store_dq(b, h, first, rows, sums);
      }
    });
  }

  /// First, last, second, last but one ...: any run of tasks has short and long ones.
  static std::int64_t balanced(std::int64_t i, std::int64_t n) {
    return i % 2 == 0 ? i / 2 : n - 1 - i / 2;
  }

  KeyBlock<C> take_block(ScratchFrame& frame, bool wants_keys) const {
    KeyBlock<C> block{};
    block.k = frame.take<C>(kKeys * ld_);
    block.k_columns = frame.take<C>(d_ * kLdKeys);
    block.v_columns = frame.take<C>(d_ * kLdKeys);
    if (wants_keys && b_.dk) block.dk = frame.take<C>(kKeys * ld_);
    if (wants_keys && b_.dv) block.dv = frame.take<C>(kKeys * ld_);
    return block;
  }
  QueryTile<C> take_tile(ScratchFrame& frame) const {
    QueryTile<C> tile{};
    tile.q = frame.take<C>(kQueries * ld_);
    tile.dout = frame.take<C>(kQueries * ld_);
    tile.lse = frame.take<C>(kQueries);
    tile.delta = frame.take<C>(kQueries);
    tile.probabilities = frame.take<C>(kQueries * kLdKeys);
    tile.dscores = frame.take<C>(kQueries * kLdKeys);
    return tile;
  }

  void load_block(std::int64_t b, std::int64_t g, std::int64_t key, KeyBlock<C>& block) const {
    block.key = key;
    block.count = std::min(kKeys, keys_ - key);
    load_tile(HeadRows(a_.v, b, g), key, block.count, block.k, ld_);
    transpose_tile(block.k, ld_, block.count, d_, block.v_columns, kLdKeys);
    load_tile(HeadRows(a_.k, b, g), key, block.count, block.k, ld_);
    transpose_tile(block.k, ld_, block.count, d_, block.k_columns, kLdKeys);
    for (C* const sums : {block.dk, block.dv})
      if (sums != nullptr) std::fill(sums, sums + block.count * ld_, C(0));
  }
  void store_block(std::int64_t b, std::int64_t g, const KeyBlock<C>& block) const {
    const auto store = [&](const View& to, const C* sums) {
      if (sums == nullptr) return;
      const HeadRows rows(to, b, g);
      for (std::int64_t i = 0; i < block.count; ++i)
        store_elements(rows.dtype, rows.row(block.key + i), sums + i * ld_, d_);
    };
    store(b_.dk, block.dk);
    store(b_.dv, block.dv);
  }
  void store_dq(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t rows,
                C* sums) const {
    const HeadRows to(b_.dq, b, h);
    for (std::int64_t i = 0; i < rows; ++i) {
      scale_row(sums + i * ld_, d_, static_cast<C>(a_.scale));
      store_elements(to.dtype, to.row(first + i), sums + i * ld_, d_);
    }
  }

  /// Adds what queries [first, first + rows) of head h have with the block to its dk and dv, and to
  /// dq (rows, ld) unless null.
  void visit(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t rows,
             const KeyBlock<C>& block, QueryTile<C> tile, C* dq) const {
    std::int64_t r = a_.causal ? std::max<std::int64_t>(0, block.key - first) : 0;
    for (r = r / kQueries * kQueries; r < rows; r += kQueries) {
      tile.first = first + r;
      tile.rows = std::min(kQueries, rows - r);
      load_queries(b, h, tile);
      visit_tile(b, h, block, tile, dq != nullptr ? dq + r * ld_ : nullptr);
    }
  }

  void load_queries(std::int64_t b, std::int64_t h, const QueryTile<C>& tile) const {
    load_tile(HeadRows(a_.q, b, h), tile.first, tile.rows, tile.q, ld_);
    load_tile(HeadRows(b_.dout, b, h), tile.first, tile.rows, tile.dout, ld_);
    const HeadRows out(b_.out, b, h);
    const C* const lse = b_.lse.ptr<C>() + (b * heads_ + h) * queries_ + tile.first;
    C* const row = tile.probabilities;  // free until the products
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      C* const dout = tile.dout + i * ld_;
      scale_row(tile.q + i * ld_, d_, static_cast<C>(a_.scale));
      tile.lse[i] = lse[i];
      tile.delta[i] = 0;
      if (lse[i] == kMasked<C>) {
        std::fill(dout, dout + d_, C(0));
        continue;
      }
      for (std::int64_t j = 0; j < d_; j += kKeys) {
        const std::int64_t n = std::min(kKeys, d_ - j);
        load_elements(out.dtype, element_address(out.row(tile.first + i), out.dtype, j), row, n);
        tile.delta[i] += static_cast<C>(dot(dout + j, row, n));
      }
    }
  }

  void visit_tile(std::int64_t b, std::int64_t h, const KeyBlock<C>& block,
                  const QueryTile<C>& tile, C* dq) const {
    const std::int64_t last = tile.first + tile.rows - 1;
    const std::int64_t n = visible_keys(a_.causal, last, block.key, block.count);
    if (n == 0) return;
    const std::int64_t padded = tile_columns<C>(n), columns = tile_columns<C>(d_);
    const bool wants_scores = block.dk != nullptr || dq != nullptr;
    C *const p = tile.probabilities, *const ds = tile.dscores;
    tile_product<false>(tile.rows, padded, d_, {tile.q, ld_, 1}, block.k_columns, kLdKeys, p,
                        kLdKeys);
    if (wants_scores)
      tile_product<false>(tile.rows, padded, d_, {tile.dout, ld_, 1}, block.v_columns, kLdKeys, ds,
                          kLdKeys);
    ScratchRow row;
    const ScoreMask<C> mask(a_, b, h, row.values);
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      const std::int64_t t = tile.first + i;
      const RowPart part{(b * heads_ + h) * queries_ + t, block.key,
                         visible_keys(a_.causal, t, block.key, n), padded};
      mask.apply(p + i * kLdKeys, part, t);
      finish_row(part, tile.lse[i], tile.delta[i], p + i * kLdKeys,
                 wants_scores ? ds + i * kLdKeys : nullptr, row.values);
    }
    if (block.dv != nullptr)
      tile_product<true>(n, columns, tile.rows, {p, 1, kLdKeys}, tile.dout, ld_, block.dv, ld_);
    if (block.dk != nullptr)
      tile_product<true>(n, columns, tile.rows, {ds, 1, kLdKeys}, tile.q, ld_, block.dk, ld_);
    if (dq != nullptr)
      tile_product<true>(tile.rows, columns, n, {ds, kLdKeys, 1}, block.k, ld_, dq, ld_);
  }

  struct ScratchRow {
    alignas(64) C values[kLdKeys];
  };

  /// From masked scores and dout v^T to P and dS of a row.
  void finish_row(const RowPart& part, C lse, C delta, C* p, C* ds, C* factors) const {
    using R = RowPacket<C>;
    if (lse == kMasked<C>) {
      std::fill(p, p + part.padded, C(0));
      if (ds != nullptr) std::fill(ds, ds + part.padded, C(0));
      return;
    }
    const bool drops = static_cast<bool>(drop_);
    if (drops) drop_.factors(part, factors);
    const auto shift = R::splat(lse), mean = R::splat(delta);
    for_each_packet<C>(0, part.padded, [&](auto i, int count, auto) {
      auto probability = math::exp(R::load(p + i, count, C(0)) - shift);
      if (ds != nullptr) {
        auto g = R::load(ds + i, count, C(0));
        if (drops) g = g * R::load(factors + i, count, C(0));
        R::store(ds + i, probability * (g - mean), count);
      }
      if (drops) probability = probability * R::load(factors + i, count, C(0));
      R::store(p + i, probability, count);
    });
  }

  const AttentionBackward& b_;
  const AttentionArgs& a_;
  ProbabilityDropout<C> drop_;
  std::int64_t heads_, groups_, queries_, keys_, d_, ld_;
};

}  // namespace

std::size_t attention_backward_workspace_bytes(const Stream&, const AttentionBackward& args) {
  return args.args.q.dtype == Dtype::f64 ? BackwardPass<double>::workspace_bytes(args)
                                         : BackwardPass<float>::workspace_bytes(args);
}

void attention_backward(const Stream&, const AttentionBackward& args, Workspace workspace) {
  kernels::detail::check_attention(args);
  if (args.args.q.dtype == Dtype::f64)
    BackwardPass<double>(args).run(workspace);
  else
    BackwardPass<float>(args).run(workspace);
}

}  // namespace mixtape::kernels::cpu
