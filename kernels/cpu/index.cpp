// Gathering and scattering on the CPU. Additions are grouped by destination first (a counting
// sort), so that each destination is summed by one thread, in the order of the indices, before one
// rounding.
#include "kernels/index.h"

#include <cstring>

#include "engine/thread_pool.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/scratch.h"
#include "kernels/elementwise.h"

namespace mixtape::kernels {
namespace cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements a thread should have at least

std::int64_t index_at(const View& index, std::int64_t offset) {
  if (index.dtype == Dtype::i64) return static_cast<const std::int64_t*>(index.data)[offset];
  return static_cast<const std::int32_t*>(index.data)[offset];
}

std::int64_t checked(const char* op, std::int64_t value, std::int64_t bound) {
  MT_CHECK(value >= 0 && value < bound, op, ": expected an index in [0, ", bound, "), got ", value);
  return value;
}

/// Offsets of position `flat` (row-major in `sizes`) in up to three arrays, leaving out dimension
/// `skip` (-1: none).
struct Offsets {
  std::int64_t at[3] = {0, 0, 0};
};
template <class... Strides>
Offsets offsets_of(std::int64_t flat, const Shape& sizes, int skip, const Strides&... strides) {
  Offsets out;
  for (int d = sizes.size() - 1; d >= 0; --d) {
    if (d == skip) continue;
    const std::int64_t i = flat % sizes[d];
    flat /= sizes[d];
    int n = 0;
    ((out.at[n++] += i * strides[d]), ...);
  }
  return out;
}

/// The elements of one slice across `dim`, as lines along one other dimension.
struct Lines {
  Shape others;       // sizes with `dim` and the line's dimension replaced by 1
  int line_dim = -1;  // -1: lines of one element
  std::int64_t length = 1, count = 1;

  Lines(const Shape& sizes, int dim) : others(sizes) {
    others[dim] = 1;
    for (int d = sizes.size() - 1; d >= 0 && line_dim < 0; --d) {
      if (d != dim) line_dim = d;
    }
    if (line_dim >= 0) {
      length = sizes[line_dim];
      others[line_dim] = 1;
    }
    for (const std::int64_t s : others) count *= s;
  }
  std::int64_t stride(const View& v) const { return line_dim < 0 ? 0 : v.strides[line_dim]; }
};

/// Sources grouped by destination: those of row r are order[start[r]] .. order[start[r + 1]].
struct Groups {
  std::int64_t *start, *order;
  Groups(Workspace workspace, std::int64_t count, std::int64_t rows)
      : start(static_cast<std::int64_t*>(workspace.data)), order(start + rows + 2) {
    MT_CHECK(workspace.bytes >= static_cast<std::size_t>(count + rows + 2) * sizeof(std::int64_t),
             "index_add: expected a workspace of index_add_workspace_bytes(), got ",
             workspace.bytes, " bytes");
  }
  /// destination(k) is in [0, rows), or negative to leave source k out.
  template <class F>
  void build(std::int64_t count, std::int64_t rows, F&& destination) {
    std::fill(start, start + rows + 2, 0);
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t r = destination(k);
      if (r >= 0) ++start[r + 2];
    }
    for (std::int64_t r = 0; r < rows; ++r) start[r + 2] += start[r + 1];
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t r = destination(k);
      if (r >= 0) order[start[r + 1]++] = k;
    }
  }
};

template <class F>
void with_compute(Dtype compute, F&& f) {
  if (compute == Dtype::f64)
    f(double{});
  else if (compute == Dtype::f32)
    f(float{});
  else
    f(std::int64_t{});
}

}  // namespace

void index_select(const Stream& stream, const char* op, View out, View x, int dim, View index) {
  const std::int64_t count = index.numel(), bound = x.sizes[dim];
  for (std::int64_t k = 0; k < count; ++k) checked(op, index_at(index, k * index.stride(0)), bound);
  if (out.numel() == 0) return;
  const std::int64_t width = out.numel() / count;
  const auto slice_of = [dim](View v, std::int64_t i) {
    v.data = const_cast<void*>(element(v.data, v.dtype, i * v.strides[dim]));
    v.sizes[dim] = 1;
    return v;
  };
  const View first_out = slice_of(out, 0), first_x = slice_of(x, 0);
  const bool rows =
      dim == 0 && out.dtype == x.dtype && first_out.contiguous() && first_x.contiguous();
  const std::size_t bytes = static_cast<std::size_t>(width) * size_of(out.dtype);
  parallel_for(0, count, std::max<std::int64_t>(1, kGrain / width),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t k = begin; k < end; ++k) {
                   const std::int64_t i = index_at(index, k * index.stride(0));
                   if (rows)
                     std::memcpy(slice_of(out, k).data, slice_of(x, i).data, bytes);
                   else
                     copy(stream, slice_of(out, k), slice_of(x, i));
                 }
               });
}

void index_add(const Stream&, const char* op, View out, float beta, int dim, View index, View src,
               std::int64_t padding_index, Workspace workspace) {
  const std::int64_t count = index.numel(), rows = out.sizes[dim];
  for (std::int64_t k = 0; k < count; ++k) checked(op, index_at(index, k * index.stride(0)), rows);
  if (out.numel() == 0) return;
  Groups groups(workspace, count, rows);
  groups.build(count, rows, [&](std::int64_t k) {
    const std::int64_t r = index_at(index, k * index.stride(0));
    return r == padding_index ? -1 : r;
  });
  const Lines lines(out.sizes, dim);
  const Dtype compute = compute_dtype(out.dtype);
  const LoadFunction load_out = load_function(out.dtype, compute),
                     load_src = load_function(src.dtype, compute);
  const StoreFunction store = store_function(compute, out.dtype);
  with_compute(compute, [&](auto zero) {
    using C = decltype(zero);
    parallel_for(0, rows, std::max<std::int64_t>(1, kGrain / (lines.length * lines.count)),
                 [&](std::int64_t begin, std::int64_t end) {
                   ScratchFrame frame;
                   C* total = frame.take<C>(lines.length);
                   C* more = frame.take<C>(lines.length);
                   for (std::int64_t r = begin; r < end; ++r) {
                     const std::int64_t first = groups.start[r], last = groups.start[r + 1];
                     if (first == last && beta != 0) continue;
                     for (std::int64_t l = 0; l < lines.count; ++l) {
                       const Offsets at =
                           offsets_of(l, lines.others, dim, out.strides, src.strides);
                       void* target = element(out.data, out.dtype, at.at[0] + r * out.strides[dim]);
                       if (beta != 0)
                         load_out(target, lines.stride(out), lines.length, total);
                       else
                         std::fill(total, total + lines.length, C(0));
                       for (std::int64_t g = first; g < last; ++g) {
                         const std::int64_t k = groups.order[g];
                         load_src(element(src.data, src.dtype, at.at[1] + k * src.strides[dim]),
                                  lines.stride(src), lines.length, more);
                         for (std::int64_t i = 0; i < lines.length; ++i) total[i] += more[i];
                       }
                       store(total, target, lines.stride(out), lines.length);
                     }
                   }
                 });
  });
}

void gather(const Stream&, const char* op, View out, View x, int dim, View index) {
  const std::int64_t count = out.numel(), bound = out.dim() == 0 ? 1 : x.sizes[dim];
  const std::int64_t step = out.dim() == 0 ? 0 : x.strides[dim];
  const Dtype compute = conversion_dtype(x.dtype, out.dtype);
  const LoadFunction load = load_function(x.dtype, compute);
  const StoreFunction store = store_function(compute, out.dtype);
  parallel_for(0, count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      Offsets at = offsets_of(p, out.sizes, -1, out.strides, index.strides);
      at.at[2] = offsets_of(p, out.sizes, -1, x.strides).at[0];
      if (out.dim() > 0) {  // x's own position along dim is replaced by the index
        std::int64_t inner = 1;
        for (int d = out.dim() - 1; d > dim; --d) inner *= out.sizes[d];
        at.at[2] -= p / inner % out.sizes[dim] * step;
      }
      const std::int64_t i = checked(op, index_at(index, at.at[1]), bound);
      alignas(8) unsigned char value[8];
      load(element(x.data, x.dtype, at.at[2] + i * step), 0, 1, value);
      store(value, element(out.data, out.dtype, at.at[0]), 0, 1);
    }
  });
}

void scatter_add(const Stream& stream, const char* op, View out, float beta, int dim, View index,
                 View src, Workspace workspace) {
  const std::int64_t count = index.numel(), rows = out.numel(),
                     bound = out.dim() == 0 ? 1 : out.sizes[dim];
  if (beta == 0) fill(stream, out, 0);
  if (count == 0) return;
  Shape order = contiguous_strides(out.sizes);  // destinations are numbered in row-major order
  Groups groups(workspace, count, rows);
  const auto destination = [&](std::int64_t p) {
    const Offsets at = offsets_of(p, index.sizes, -1, index.strides, order);
    const std::int64_t i = checked(op, index_at(index, at.at[0]), bound);
    if (out.dim() == 0) return std::int64_t{0};
    std::int64_t inner = 1;
    for (int d = index.dim() - 1; d > dim; --d) inner *= index.sizes[d];
    return at.at[1] + (i - p / inner % index.sizes[dim]) * order[dim];
  };
  groups.build(count, rows, destination);
  const Dtype compute = compute_dtype(out.dtype);
  const LoadFunction load_out = load_function(out.dtype, compute),
                     load_src = load_function(src.dtype, compute);
  const StoreFunction store = store_function(compute, out.dtype);
  with_compute(compute, [&](auto zero) {
    using C = decltype(zero);
    parallel_for(0, rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        if (groups.start[r] == groups.start[r + 1]) continue;
        void* target =
            element(out.data, out.dtype, offsets_of(r, out.sizes, -1, out.strides).at[0]);
        C total, more;
        load_out(target, 0, 1, &total);
        for (std::int64_t g = groups.start[r]; g < groups.start[r + 1]; ++g) {
          const std::int64_t offset =
              offsets_of(groups.order[g], index.sizes, -1, src.strides).at[0];
          load_src(element(src.data, src.dtype, offset), 0, 1, &more);
          total += more;
        }
        store(&total, target, 0, 1);
      }
    });
  });
}

}  // namespace cpu
}  // namespace mixtape::kernels
