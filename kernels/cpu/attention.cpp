// Attention forward on the CPU: a task holds kChunk queries of one head and passes once over the
// keys, block by block, with a running maximum and sum of each row (online softmax). Storage types
// are converted a tile at a time.
#include "kernels/attention.h"

#include "engine/thread_pool.h"
#include "kernels/cpu/attention_tiles.h"

namespace mixtape::kernels::cpu {
namespace {

/// The queries of one task and what is known of their rows so far.
template <class C>
struct RowState {
  C* q;         // (rows, D), scaled
  C* out;       // (rows, D): sum of exp(score - max) v
  C* max;       // (rows)
  double* sum;  // (rows): sum of exp(score - max)
};

/// Turns a row of scores into exp(score - max) and brings what was summed before to the same
/// maximum. `padded` is a multiple of two registers.
template <class C>
void online_softmax_row(C* scores, std::int64_t padded, C& max, double& sum, C* out,
                        std::int64_t out_columns) {
  using P = RowPacket<C>;
  constexpr std::int64_t kLanes = P::kLanes;
  auto high0 = P::splat(kMasked<C>), high1 = high0;
  for (std::int64_t j = 0; j < padded; j += 2 * kLanes) {
    high0 = math::maximum(high0, P::load(scores + j));
    high1 = math::maximum(high1, P::load(scores + j + kLanes));
  }
  const C top = math::maximum(max, max_of_lanes(math::maximum(high0, high1)));
  if (top == kMasked<C>) return std::fill(scores, scores + padded, C(0));
  const auto shift = P::splat(top);
  auto sum0 = P::splat(0), sum1 = sum0;
  for (std::int64_t j = 0; j < padded; j += 2 * kLanes) {
    const auto e0 = math::exp(P::load(scores + j) - shift);
    const auto e1 = math::exp(P::load(scores + j + kLanes) - shift);
    P::store(scores + j, e0, kLanes);
    P::store(scores + j + kLanes, e1, kLanes);
    sum0 = sum0 + e0;
    sum1 = sum1 + e1;
  }
  const double added = static_cast<double>(sum_of_lanes(sum0 + sum1));
  if (top != max) {
    const C shrink = std::exp(max - top);
    if (sum != 0) scale_row(out, out_columns, shrink);
    sum *= static_cast<double>(shrink);
    max = top;
  }
  sum += added;
}

template <class C>
void multiply_row(C* row, const C* factors, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) row[j] *= factors[j];
}

template <class C>
class ForwardTask {
 public:
  explicit ForwardTask(const AttentionForward& forward)
      : f_(forward),
        a_(forward.args),
        drop_(a_),
        queries_(a_.q.size(2)),
        keys_(a_.k.size(2)),
        d_(a_.q.size(3)),
        ld_(tile_ld<C>(d_)) {}

  /// Queries [first, first + rows) of head h of sample b.
  void run(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t rows) const {
    ScratchFrame frame;
    RowState<C> s{frame.take<C>(rows * ld_), frame.take<C>(rows * ld_), frame.take<C>(rows),
                  frame.take<double>(rows)};
    C* const k_rows = frame.take<C>(kKeys * ld_);
    C* const k_columns = frame.take<C>(d_ * kLdKeys);
    C* const v = frame.take<C>(kKeys * ld_);
    C* const scores = frame.take<C>(kQueries * kLdKeys);
    C* const row = frame.take<C>(kLdKeys);
    const ScoreMask<C> mask(a_, b, h, row);
    const std::int64_t g = h / (a_.q.size(1) / a_.k.size(1)),
                       base = (b * a_.q.size(1) + h) * queries_;
    start(HeadRows(a_.q, b, h), first, rows, s);
    const HeadRows k_head(a_.k, b, g), v_head(a_.v, b, g);
    const std::int64_t end = a_.causal ? std::min(keys_, first + rows) : keys_;
    for (std::int64_t key = 0; key < end; key += kKeys) {
      const std::int64_t count = std::min(kKeys, end - key);
      load_tile(k_head, key, count, k_rows, ld_);
      transpose_tile(k_rows, ld_, count, d_, k_columns, kLdKeys);
      load_tile(v_head, key, count, v, ld_);
      for (std::int64_t r = 0; r < rows; r += kQueries) {
        const std::int64_t tile = std::min(kQueries, rows - r);
        const std::int64_t n = visible_keys(a_.causal, first + r + tile - 1, key, count);
        if (n == 0) continue;
        const std::int64_t padded = tile_columns<C>(n);
        tile_product<false>(tile, padded, d_, {s.q + r * ld_, ld_, 1}, k_columns, kLdKeys, scores,
                            kLdKeys);
        for (std::int64_t i = 0; i < tile; ++i) {
          const std::int64_t t = first + r + i;
          const RowPart part{base + t, key, visible_keys(a_.causal, t, key, n), padded};
          C* const p = scores + i * kLdKeys;
          mask.apply(p, part, t);
          online_softmax_row(p, padded, s.max[r + i], s.sum[r + i], s.out + (r + i) * ld_,
                             tile_columns<C>(d_));
          if (!drop_) continue;
          drop_.factors(part, row);
          multiply_row(p, row, padded);
        }
        tile_product<true>(tile, tile_columns<C>(d_), n, {scores, kLdKeys, 1}, v, ld_,
                           s.out + r * ld_, ld_);
      }
    }
    finish(HeadRows(f_.out, b, h), base, first, rows, s);
  }

 private:
  static constexpr std::int64_t kLdKeys = tile_ld<C>(kKeys);

  void start(const HeadRows& q, std::int64_t first, std::int64_t rows, const RowState<C>& s) const {
    load_tile(q, first, rows, s.q, ld_);
    for (std::int64_t i = 0; i < rows; ++i) scale_row(s.q + i * ld_, d_, static_cast<C>(a_.scale));
    std::fill(s.out, s.out + rows * ld_, C(0));
    std::fill(s.max, s.max + rows, kMasked<C>);
    std::fill(s.sum, s.sum + rows, 0.0);
  }

  void finish(const HeadRows& out, std::int64_t base, std::int64_t first, std::int64_t rows,
              const RowState<C>& s) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      const bool masked = s.max[i] == kMasked<C>;
      C* const o = s.out + i * ld_;
      scale_row(o, d_, masked ? C(0) : static_cast<C>(1 / s.sum[i]));
      store_elements(out.dtype, out.row(first + i), o, d_);
      if (f_.lse)
        f_.lse.ptr<C>()[base + first + i] =
            masked ? kMasked<C>
                   : static_cast<C>(static_cast<double>(s.max[i]) + std::log(s.sum[i]));
    }
  }

  const AttentionForward& f_;
  const AttentionArgs& a_;
  ProbabilityDropout<C> drop_;
  std::int64_t queries_, keys_, d_, ld_;
};

template <class C>
void forward(const AttentionForward& f) {
  const ForwardTask<C> task(f);
  const std::int64_t heads = f.args.q.size(1), queries = f.args.q.size(2);
  const std::int64_t chunks = (queries + kChunk - 1) / kChunk;
  const std::int64_t rows = chunk_rows(queries);
  parallel_for(0, f.args.q.size(0) * heads * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t head = i / chunks, c = i % chunks;
      // First, last, second, last but one: any run of tasks has causal rows of all lengths.
      const std::int64_t first = (c % 2 == 0 ? c / 2 : chunks - 1 - c / 2) * rows;
      task.run(head / heads, head % heads, first, std::min(rows, queries - first));
    }
  });
}

}  // namespace

std::size_t attention_forward_workspace_bytes(const Stream&, const AttentionForward&) { return 0; }

void attention_forward(const Stream&, const AttentionForward& args, Workspace) {
  kernels::detail::check_attention(args);
  if (args.out.dtype == Dtype::f64)
    forward<double>(args);
  else
    forward<float>(args);
}

}  // namespace mixtape::kernels::cpu
