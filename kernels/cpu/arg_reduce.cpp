// The largest or smallest value along a dimension and where it first is, on the CPU. Rows: the best
// of each L1-sized run by registers, then one search in the runs that improve on it. Columns:
// a running best and its index for a strip of neighbouring outputs.
#include <algorithm>

#include "engine/thread_pool.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/loop_dims.h"
#include "kernels/cpu/register.h"
#include "kernels/reduce.h"

namespace mixtape::kernels::cpu {

namespace {

constexpr std::int64_t kGrain = 32768, kRun = 1024, kColumns = 256, kMaxParts = 64;

enum Operand { kValues, kIndices, kIn };

struct Problem {
  View values, indices, x;
  LoopDims kept;
  std::int64_t n = 1, stride = 0;  // of the reduced dimension
  std::int64_t outputs = 1;
  LoadFunction load;
  StoreFunction store;  // of a value; null without values
  bool direct;
};

/// x is better than best: beyond it, or the first NaN.
template <class Op, class V>
auto beats(V x, V best) {
  if constexpr (std::is_same_v<Op, Max>)
    return (x > best) | ((x != x) & (best == best));
  else
    return (x < best) | ((x != x) & (best == best));
}

template <class C>
struct Best {
  C value;
  std::int64_t index;
};

template <class Op, class C>
C best_of(const C* x, std::int64_t n) {
  using R = Register<C>;
  C best = x[0];
  std::int64_t i = 0;
  if (n >= R::kLanes) {
    auto lanes = R::load(x);
    for (i = R::kLanes; i + R::kLanes <= n; i += R::kLanes) lanes = Op::take(lanes, R::load(x + i));
    for (std::int64_t k = 0; k < R::kLanes; ++k) best = Op::take(best, lanes[k]);
  }
  for (; i < n; ++i) best = Op::take(best, x[i]);
  return best;
}

/// Best of elements [begin, end) of the row at x's `offset`.
template <class Op, class C>
Best<C> search_row(const Problem& p, std::int64_t offset, std::int64_t begin, std::int64_t end) {
  alignas(64) C buffer[kRun];
  Best<C> best{};
  for (std::int64_t i = begin; i < end; i += kRun) {
    const std::int64_t n = std::min(kRun, end - i);
    const void* at = element(p.x.data, p.x.dtype, offset + i * p.stride);
    const C* run = static_cast<const C*>(at);
    if (!p.direct || p.stride != 1) {
      p.load(at, p.stride, n, buffer);
      run = buffer;
    }
    const C value = best_of<Op>(run, n);
    if (i != begin && !beats<Op>(value, best.value)) continue;
    std::int64_t k = 0;
    while (!(run[k] == value || (run[k] != run[k] && value != value))) ++k;
    best = {value, i + k};
  }
  return best;
}

template <class C>
void write(const Problem& p, std::int64_t values_at, std::int64_t indices_at, const Best<C>& best) {
  p.indices.ptr<std::int64_t>()[indices_at] = best.index;
  if (p.store) p.store(&best.value, element(p.values.data, p.values.dtype, values_at), 1, 1);
}

/// One output at a time, its row split among threads.
template <class Op, class C>
void search_long_row(const Problem& p, std::int64_t offset, std::int64_t parts, Best<C>& best) {
  Best<C> found[kMaxParts];
  const std::int64_t length = (p.n + parts - 1) / parts;
  parallel_for(0, parts, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s)
      found[s] = search_row<Op, C>(p, offset, s * length, std::min(p.n, (s + 1) * length));
  });
  best = found[0];
  for (std::int64_t s = 1; s < parts; ++s)
    if (beats<Op>(found[s].value, best.value)) best = found[s];
}

template <class Op, class C>
void search_rows(const Problem& p) {
  const std::int64_t inner = p.kept.inner();
  const bool split = p.outputs < 16 && p.n >= 4 * kGrain;
  const std::int64_t parts = split ? std::min(kMaxParts, p.n / kGrain) : 1;
  const auto task = [&](std::int64_t begin, std::int64_t end) {
    RowCursor<3> row(p.kept, begin / inner);
    std::int64_t j = begin % inner;
    for (std::int64_t o = begin; o < end; ++o) {
      const std::int64_t offset = row.offset[kIn] + j * p.kept.inner_stride(kIn);
      Best<C> best;
      if (split)
        search_long_row<Op>(p, offset, parts, best);
      else
        best = search_row<Op, C>(p, offset, 0, p.n);
      write(p, row.offset[kValues] + j * p.kept.inner_stride(kValues),
            row.offset[kIndices] + j * p.kept.inner_stride(kIndices), best);
      if (++j < inner) continue;
      j = 0;
      row.next();
    }
  };
  if (split)
    task(0, p.outputs);
  else
    parallel_for(0, p.outputs, std::max<std::int64_t>(1, kGrain / p.n), task);
}

/// best and where[0, columns) take in row `i`; where counts in integers as wide as C.
template <class Op, class C, class I>
void take_row(const C* x, std::int64_t columns, std::int64_t i, C* best, I* where) {
  using R = Register<C>;
  using RI = Register<I>;
  const typename RI::Lanes index = typename RI::Lanes{} + static_cast<I>(i);
  std::int64_t j = 0;
  for (; j + R::kLanes <= columns; j += R::kLanes) {
    const auto v = R::load(x + j), b = R::load(best + j);
    const auto better = beats<Op>(v, b);
    const typename R::Lanes new_best = better ? v : b;
    const typename RI::Lanes new_where = better ? index : RI::load(where + j);
    std::memcpy(best + j, &new_best, sizeof new_best);
    std::memcpy(where + j, &new_where, sizeof new_where);
  }
  for (; j < columns; ++j) {
    if (!beats<Op>(x[j], best[j])) continue;
    best[j] = x[j];
    where[j] = static_cast<I>(i);
  }
}

template <class Op, class C>
void search_columns(const Problem& p) {
  using I = std::conditional_t<sizeof(C) == 4, std::int32_t, std::int64_t>;
  const std::int64_t inner = p.kept.inner(), stride = p.kept.inner_stride(kIn);
  const std::int64_t tiles = (inner + kColumns - 1) / kColumns;
  const auto task = [&](std::int64_t first, std::int64_t last) {
    alignas(64) C best[kColumns], buffer[kColumns];
    alignas(64) I where[kColumns];
    for (std::int64_t t = first; t < last; ++t) {
      const std::int64_t row = t / tiles, j0 = t % tiles * kColumns;
      const std::int64_t n = std::min(kColumns, inner - j0);
      const std::int64_t offset = p.kept.row_offset(kIn, row) + j0 * stride;
      p.load(element(p.x.data, p.x.dtype, offset), stride, n, best);
      std::fill_n(where, n, I{0});
      for (std::int64_t i = 1; i < p.n; ++i) {
        const void* at = element(p.x.data, p.x.dtype, offset + i * p.stride);
        const C* x = static_cast<const C*>(at);
        if (!p.direct || stride != 1) {
          p.load(at, stride, n, buffer);
          x = buffer;
        }
        take_row<Op>(x, n, i, best, where);
      }
      const std::int64_t values_at = p.kept.row_offset(kValues, row);
      const std::int64_t indices_at = p.kept.row_offset(kIndices, row);
      for (std::int64_t j = 0; j < n; ++j)
        write(p, values_at + (j0 + j) * p.kept.inner_stride(kValues),
              indices_at + (j0 + j) * p.kept.inner_stride(kIndices), Best<C>{best[j], where[j]});
    }
  };
  parallel_for(0, p.kept.rows() * tiles,
               std::max<std::int64_t>(1, kGrain / (std::min(inner, kColumns) * p.n)), task);
}

template <class Op, class C>
void search(const Problem& p) {
  const bool columns = p.kept.count > 0 && p.kept.inner_stride(kIn) < p.stride &&
                       p.n <= std::numeric_limits<std::int32_t>::max();
  if (columns)
    search_columns<Op, C>(p);
  else
    search_rows<Op, C>(p);
}

}  // namespace

void arg_reduce(const Stream&, bool largest, View values, View indices, View x, int dim) {
  if (indices.numel() == 0) return;
  const Dtype compute = compute_dtype(x.dtype);
  Problem p{values,  indices,           x, {}, 1, 0, 1, load_function(x.dtype, compute),
            nullptr, x.dtype == compute};
  if (values) p.store = store_function(compute, values.dtype);
  for (int i = 0; i < x.dim(); ++i) {
    MT_CHECK(indices.sizes[i] == (i == dim ? 1 : x.sizes[i]), "arg_reduce: expected sizes ",
             x.sizes, " with 1 in dimension ", dim, ", got ", indices.sizes);
    if (i == dim) {
      p.n = x.sizes[i];
      p.stride = x.strides[i];
    } else {
      p.kept.append(x.sizes[i], values ? values.strides[i] : 0, indices.strides[i], x.strides[i]);
      p.outputs *= x.sizes[i];
    }
  }
  MT_CHECK(p.n > 0, "arg_reduce: expected at least one element along dimension ", dim, ", got ",
           x.sizes);
  p.kept.sort_by(kIn);
  p.kept.merge();
  const auto run = [&](auto op) {
    using Op = decltype(op);
    if (compute == Dtype::f64)
      search<Op, double>(p);
    else if (compute == Dtype::i64)
      search<Op, std::int64_t>(p);
    else
      search<Op, float>(p);
  };
  if (largest)
    run(Max{});
  else
    run(Min{});
}

}  // namespace mixtape::kernels::cpu
