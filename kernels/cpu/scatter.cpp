// Scattered additions on the CPU. Every destination is summed by one thread, in the order of its
// sources, in the compute type, and rounded once: results depend on neither the threads nor chance.
//
// index_add groups its sources by destination row (a counting sort) and gives each thread rows.
// scatter_add gives each thread lines along the indexed dimension: no two lines share a
// destination.
#include <algorithm>

#include "engine/thread_pool.h"
#include "kernels/cpu/index_reader.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/loop_dims.h"
#include "kernels/cpu/scratch.h"
#include "kernels/elementwise.h"
#include "kernels/index.h"

namespace mixtape::kernels::cpu {

namespace {

constexpr std::int64_t kGrain = 16384;  // elements worth a thread
constexpr std::int64_t kStrip = 256;    // neighbouring lines taken together

template <class F>
void dispatch_compute(Dtype compute, F&& f) {
  if (compute == Dtype::f64)
    f(double{});
  else if (compute == Dtype::f32)
    f(float{});
  else
    f(std::int64_t{});
}

/// Sources grouped by destination: those of row r are order[start[r]] .. order[start[r + 1] - 1],
/// ascending.
struct Groups {
  std::int64_t *start, *order;

  Groups(Workspace workspace, std::int64_t count, std::int64_t rows)
      : start(static_cast<std::int64_t*>(workspace.data)), order(start + rows + 2) {
    MT_CHECK(workspace.bytes >= static_cast<std::size_t>(count + rows + 2) * sizeof(std::int64_t),
             "index_add: expected a workspace of index_add_workspace_bytes(), got ",
             workspace.bytes, " bytes");
  }
  void build(const IndexReader& index, std::int64_t step, std::int64_t count, std::int64_t rows,
             std::int64_t padding_index) {
    std::fill_n(start, rows + 2, 0);
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t r = index.at(k * step);
      if (r != padding_index) ++start[r + 2];
    }
    for (std::int64_t r = 0; r < rows; ++r) start[r + 2] += start[r + 1];
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t r = index.at(k * step);
      if (r != padding_index) order[start[r + 1]++] = k;
    }
  }
};

/// Reads and writes runs of one view in the compute type C.
template <class C>
struct Runs {
  const View& view;
  std::int64_t step;  // between elements of a run
  LoadFunction load_run;
  StoreFunction store_run;
  bool direct;  // a run is C's, dense

  Runs(const View& v, std::int64_t run_step)
      : view(v),
        step(run_step),
        load_run(load_function(v.dtype, dtype_of<C>)),
        store_run(store_function(dtype_of<C>, v.dtype)),
        direct(v.dtype == dtype_of<C> && run_step == 1) {}
  /// n elements at `offset`: the memory itself, or a copy in `buffer`.
  C* read(std::int64_t offset, std::int64_t n, C* buffer) const {
    void* at = element(view.data, view.dtype, offset);
    if (direct) return static_cast<C*>(at);
    load_run(at, step, n, buffer);
    return buffer;
  }
  void write(std::int64_t offset, std::int64_t n, const C* values) const {
    void* at = element(view.data, view.dtype, offset);
    if (at != values) store_run(values, at, step, n);
  }
};

template <class C>
void add_rows(const View& out, float beta, int dim, const View& src, const Groups& groups) {
  enum { kOut, kSrc };
  LoopDims others;
  for (int d = 0; d < out.dim(); ++d)
    if (d != dim) others.append(out.sizes[d], out.strides[d], src.strides[d]);
  others.sort_by(kOut);
  others.merge();
  const std::int64_t n = others.inner(), lines = others.rows(), rows = out.sizes[dim];
  const Runs<C> to(out, n == 1 ? 1 : others.inner_stride(kOut));
  const Runs<C> from(src, n == 1 ? 1 : others.inner_stride(kSrc));
  const auto task = [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* total_buffer = frame.take<C>(n);
    C* more_buffer = frame.take<C>(n);
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t first = groups.start[r], last = groups.start[r + 1];
      if (first == last && beta != 0) continue;
      RowCursor<2> line(others, 0);
      for (std::int64_t l = 0; l < lines; ++l, line.next()) {
        const std::int64_t target = line.offset[kOut] + r * out.strides[dim];
        C* total = total_buffer;
        if (to.direct)
          total = static_cast<C*>(element(out.data, out.dtype, target));
        else if (beta != 0)
          total = to.read(target, n, total_buffer);
        if (beta == 0) std::fill_n(total, n, C{0});
        for (std::int64_t g = first; g < last; ++g) {
          const C* more =
              from.read(line.offset[kSrc] + groups.order[g] * src.strides[dim], n, more_buffer);
          for (std::int64_t i = 0; i < n; ++i) total[i] += more[i];
        }
        to.write(target, n, total);
      }
    }
  };
  parallel_for(0, rows, std::max<std::int64_t>(1, kGrain / (n * lines)), task);
}

/// Lines along the indexed dimension: `others` are the dimensions across, `length` sources a line.
struct Scatter {
  enum { kOut, kIndex, kSrc };
  const View &out, &index, &src;
  LoopDims others;
  std::int64_t length = 1, rows = 1;  // sources and destinations of a line
  std::int64_t out_step = 0, index_step = 0, src_step = 0;

  Scatter(const View& o, const View& i, const View& s, int dim) : out(o), index(i), src(s) {
    for (int d = 0; d < index.dim(); ++d)
      if (d != dim) others.append(index.sizes[d], out.strides[d], index.strides[d], src.strides[d]);
    others.sort_by(kIndex);
    others.merge();
    if (index.dim() == 0) return;
    length = index.sizes[dim];
    rows = out.sizes[dim];
    out_step = out.strides[dim];
    index_step = index.strides[dim];
    src_step = src.strides[dim];
  }
};

/// out has the compute type: lines are added to in place, a strip of neighbouring lines at a time
/// where that walks memory in order.
template <class C>
void scatter_in_place(const Scatter& s, const IndexReader& index) {
  const std::int64_t n = s.others.inner(), rows = s.others.rows();
  const std::int64_t strips = (n + kStrip - 1) / kStrip;
  const std::int64_t out_across = s.others.inner_stride(Scatter::kOut);
  const std::int64_t index_across = s.others.inner_stride(Scatter::kIndex);
  const std::int64_t src_across = s.others.inner_stride(Scatter::kSrc);
  const LoadFunction load = load_function(s.src.dtype, dtype_of<C>);
  const bool direct = s.src.dtype == dtype_of<C>;
  const std::int64_t strip_rows = s.index_step < index_across ? 1 : kStrip;
  const auto task = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t row = t / strips, first = t % strips * kStrip;
      const std::int64_t last = std::min(n, first + kStrip);
      C* out = s.out.ptr<C>() + s.others.row_offset(Scatter::kOut, row);
      const std::int64_t index_row = s.others.row_offset(Scatter::kIndex, row);
      const std::int64_t src_row = s.others.row_offset(Scatter::kSrc, row);
      for (std::int64_t j0 = first; j0 < last; j0 += strip_rows) {
        const std::int64_t j1 = std::min(last, j0 + strip_rows);
        for (std::int64_t k = 0; k < s.length; ++k) {
          for (std::int64_t j = j0; j < j1; ++j) {
            const std::int64_t i = index.at(index_row + j * index_across + k * s.index_step);
            const std::int64_t at = src_row + j * src_across + k * s.src_step;
            C value;
            if (direct)
              value = s.src.ptr<const C>()[at];
            else
              load(element(s.src.data, s.src.dtype, at), 1, 1, &value);
            out[j * out_across + i * s.out_step] += value;
          }
        }
      }
    }
  };
  parallel_for(0, rows * strips,
               std::max<std::int64_t>(1, kGrain / (std::min(n, kStrip) * s.length)), task);
}

/// out is narrower than the compute type: a line's sources are sorted by destination (ties by
/// source), so that each destination is read, added to and rounded once.
template <class C>
void scatter_sorted(const Scatter& s, const IndexReader& index) {
  struct Source {
    std::int64_t row, k;
    bool operator<(const Source& b) const { return row != b.row ? row < b.row : k < b.k; }
  };
  const LoadFunction load = load_function(s.out.dtype, dtype_of<C>);
  const LoadFunction load_src = load_function(s.src.dtype, dtype_of<C>);
  const StoreFunction store = store_function(dtype_of<C>, s.out.dtype);
  LoopDims lines = s.others;
  lines.append_single();
  const auto task = [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    Source* sources = frame.take<Source>(s.length);
    for (std::int64_t line = begin; line < end; ++line) {
      const std::int64_t out_row = lines.row_offset(Scatter::kOut, line);
      const std::int64_t index_row = lines.row_offset(Scatter::kIndex, line);
      const std::int64_t src_row = lines.row_offset(Scatter::kSrc, line);
      for (std::int64_t k = 0; k < s.length; ++k)
        sources[k] = {index.at(index_row + k * s.index_step), k};
      std::sort(sources, sources + s.length);
      for (std::int64_t g = 0; g < s.length;) {
        const std::int64_t row = sources[g].row;
        void* target = element(s.out.data, s.out.dtype, out_row + row * s.out_step);
        C total, more;
        load(target, 1, 1, &total);
        for (; g < s.length && sources[g].row == row; ++g) {
          load_src(element(s.src.data, s.src.dtype, src_row + sources[g].k * s.src_step), 1, 1,
                   &more);
          total += more;
        }
        store(&total, target, 1, 1);
      }
    }
  };
  parallel_for(0, lines.rows(), std::max<std::int64_t>(1, kGrain / 4 / s.length), task);
}

}  // namespace

void index_add(const Stream&, const char* op, View out, float beta, int dim, View index, View src,
               std::int64_t padding_index, Workspace workspace) {
  const std::int64_t count = index.numel(), rows = out.sizes[dim];
  const std::int64_t step = index.dim() > 0 ? index.strides[0] : 0;
  const IndexReader reader(op, index, rows);
  if (out.numel() == 0) {  // nothing to add to, but an index may still be wrong
    for (std::int64_t k = 0; k < count; ++k) reader.at(k * step);
    return;
  }
  Groups groups(workspace, count, rows);
  groups.build(reader, step, count, rows, padding_index);
  dispatch_compute(compute_dtype(out.dtype),
                   [&](auto zero) { add_rows<decltype(zero)>(out, beta, dim, src, groups); });
}

void scatter_add(const Stream& stream, const char* op, View out, float beta, int dim, View index,
                 View src, Workspace) {
  if (beta == 0) fill(stream, out, 0);
  if (index.numel() == 0) return;
  const Scatter scatter(out, index, src, dim);
  const IndexReader reader(op, index, scatter.rows);
  const Dtype compute = compute_dtype(out.dtype);
  dispatch_compute(compute, [&](auto zero) {
    using C = decltype(zero);
    if (out.dtype == compute)
      scatter_in_place<C>(scatter, reader);
    else
      scatter_sorted<C>(scatter, reader);
  });
}

}  // namespace mixtape::kernels::cpu
