// Gathering by index tensors on the CPU. Elements move as raw words of their size; where the types
// differ, a block of them is gathered first and converted as a block.
#include "kernels/index.h"

#include <algorithm>
#include <cstring>

#include "engine/thread_pool.h"
#include "kernels/cpu/index_reader.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/loop_dims.h"

namespace mixtape::kernels::cpu {

namespace {

constexpr std::int64_t kGrain = 16384;  // elements worth a thread
constexpr std::int64_t kBlock = 512;    // elements gathered before a conversion

enum Operand { kOut, kIn, kIndex };

template <class F>
void dispatch_bytes(std::size_t bytes, F&& f) {
  switch (bytes) {
    case 1: return f(TypeTag<std::uint8_t>{});
    case 2: return f(TypeTag<std::uint16_t>{});
    case 4: return f(TypeTag<std::uint32_t>{});
    default: return f(TypeTag<std::uint64_t>{});
  }
}

/// Writes runs of x's elements to out, converting where the types differ.
struct Mover {
  const View &out, &x;
  LoadFunction load = nullptr;  // null: same type
  StoreFunction store = nullptr;

  Mover(const View& out_view, const View& x_view) : out(out_view), x(x_view) {
    if (out.dtype == x.dtype) return;
    const Dtype compute = conversion_dtype(x.dtype, out.dtype);
    load = load_function(x.dtype, compute);
    store = store_function(compute, out.dtype);
  }
  /// out[to + i * to_step] = pick(i), a raw element of x, for i in [0, n).
  template <class Raw, class Pick>
  void move(std::int64_t to, std::int64_t to_step, std::int64_t n, Pick&& pick) const {
    if (!load) {
      Raw* y = out.ptr<Raw>() + to;
      for (std::int64_t i = 0; i < n; ++i) y[i * to_step] = pick(i);
      return;
    }
    Raw raw[kBlock];
    alignas(8) unsigned char values[kBlock * 8];
    for (std::int64_t b = 0; b < n; b += kBlock) {
      const std::int64_t m = std::min(kBlock, n - b);
      for (std::int64_t i = 0; i < m; ++i) raw[i] = pick(b + i);
      load(raw, 1, m, values);
      store(values, element(out.data, out.dtype, to + b * to_step), to_step, m);
    }
  }
};

/// Loops over the dimensions before and after the indexed one.
struct Select {
  LoopDims outer, inner;  // strides of out and x
  std::int64_t outer_count = 1, inner_count = 1;
  std::int64_t out_step, x_step;  // along the indexed dimension

  Select(const View& out, const View& x, int dim)
      : out_step(out.strides[dim]), x_step(x.strides[dim]) {
    for (int d = 0; d < x.dim(); ++d) {
      if (d == dim) continue;
      MT_CHECK_EQ(out.sizes[d], x.sizes[d], "index_select: size of the output's dimension ", d);
      (d < dim ? outer : inner).append(x.sizes[d], out.strides[d], x.strides[d]);
      (d < dim ? outer_count : inner_count) *= x.sizes[d];
    }
    outer.merge();
    inner.merge();
    outer.append_single();
  }
};

/// Rows of more than one element: each (outer, k) pair copies inner runs.
template <class Raw>
void select_runs(const Select& s, const Mover& mover, const IndexReader& index,
                 std::int64_t index_step, std::int64_t count) {
  const std::int64_t n = s.inner.inner(), rows = s.inner.rows();
  const std::int64_t to_step = s.inner.inner_stride(kOut), from_step = s.inner.inner_stride(kIn);
  const bool dense = !mover.load && to_step == 1 && from_step == 1;
  const Raw* x = mover.x.template ptr<const Raw>();
  Raw* y = mover.out.template ptr<Raw>();
  const auto task = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t o = t / count, k = t % count;
      const std::int64_t to = s.outer.row_offset(kOut, o) + k * s.out_step;
      const std::int64_t from = s.outer.row_offset(kIn, o) + index.at(k * index_step) * s.x_step;
      RowCursor<2> row(s.inner, 0);
      for (std::int64_t r = 0; r < rows; ++r, row.next()) {
        const Raw* p = x + from + row.offset[kIn];
        if (dense)
          std::memcpy(y + to + row.offset[kOut], p, static_cast<std::size_t>(n) * sizeof(Raw));
        else
          mover.move<Raw>(to + row.offset[kOut], to_step, n,
                          [&](std::int64_t i) { return p[i * from_step]; });
      }
    }
  };
  parallel_for(0, s.outer_count * count, std::max<std::int64_t>(1, kGrain / s.inner_count), task);
}

/// The indexed dimension is innermost: single elements.
template <class Raw>
void select_elements(const Select& s, const Mover& mover, const IndexReader& index,
                     std::int64_t index_step, std::int64_t count) {
  const auto task = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t o = begin; o < end; ++o) {
      const Raw* p = mover.x.template ptr<const Raw>() + s.outer.row_offset(kIn, o);
      mover.move<Raw>(s.outer.row_offset(kOut, o), s.out_step, count,
                      [&](std::int64_t k) { return p[index.at(k * index_step) * s.x_step]; });
    }
  };
  parallel_for(0, s.outer_count, std::max<std::int64_t>(1, kGrain / count), task);
}

}  // namespace

void index_select(const Stream&, const char* op, View out, View x, int dim, View index) {
  const std::int64_t count = index.numel(), step = index.dim() > 0 ? index.strides[0] : 0;
  const IndexReader reader(op, index, x.sizes[dim]);
  if (out.numel() == 0) {  // no element to write, but an index may still be wrong
    for (std::int64_t k = 0; k < count; ++k) reader.at(k * step);
    return;
  }
  const Select select(out, x, dim);
  const Mover mover(out, x);
  dispatch_bytes(size_of(x.dtype), [&](auto tag) {
    using Raw = typename decltype(tag)::type;
    if (select.inner_count > 1)
      select_runs<Raw>(select, mover, reader, step, count);
    else
      select_elements<Raw>(select, mover, reader, step, count);
  });
}

void gather(const Stream&, const char* op, View out, View x, int dim, View index) {
  if (out.numel() == 0) return;
  const bool number = out.dim() == 0;
  const IndexReader reader(op, index, number ? 1 : x.sizes[dim]);
  const std::int64_t x_step = number ? 0 : x.strides[dim];
  LoopDims dims;
  for (int d = 0; d < out.dim(); ++d)
    dims.append(out.sizes[d], out.strides[d], d == dim ? 0 : x.strides[d], index.strides[d]);
  dims.sort_by(kOut);
  dims.merge();
  const std::int64_t n = dims.inner(), to_step = dims.inner_stride(kOut);
  const std::int64_t from_step = dims.inner_stride(kIn), index_step = dims.inner_stride(kIndex);
  const Mover mover(out, x);
  dispatch_bytes(size_of(x.dtype), [&](auto tag) {
    using Raw = typename decltype(tag)::type;
    const auto part = [&](std::int64_t row_begin, std::int64_t row_end, std::int64_t first,
                          std::int64_t last) {
      RowCursor<3> row(dims, row_begin);
      for (std::int64_t r = row_begin; r < row_end; ++r, row.next()) {
        const Raw* p = x.ptr<const Raw>() + row.offset[kIn];
        mover.move<Raw>(
            row.offset[kOut] + first * to_step, to_step, last - first, [&](std::int64_t i) {
              const std::int64_t k = first + i;
              return p[k * from_step + reader.at(row.offset[kIndex] + k * index_step) * x_step];
            });
      }
    };
    if (dims.rows() == 1)
      parallel_for(0, n, kGrain, [&](std::int64_t b, std::int64_t e) { part(0, 1, b, e); });
    else
      parallel_for(0, dims.rows(), std::max<std::int64_t>(1, kGrain / n),
                   [&](std::int64_t b, std::int64_t e) { part(b, e, 0, n); });
  });
}

}  // namespace mixtape::kernels::cpu
