// Copies, conversions, fills and ranges on the CPU. Dense same-type copies are memcpy; copies that
// change which dimension is contiguous go through square tiles, so that both sides are touched a
// cache line at a time; the rest is the elementwise loop.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/thread_pool.h"
#include "kernels/cpu/elementwise_loop.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/loop_dims.h"
#include "kernels/elementwise.h"

namespace mixtape::kernels::cpu {

namespace {

constexpr std::int64_t kTile = 64;  // rows and columns of a transposed tile

/// Calls f with an unsigned integer type of `bytes` bytes: raw elements.
template <class F>
void dispatch_bytes(std::size_t bytes, F&& f) {
  switch (bytes) {
    case 1: return f(TypeTag<std::uint8_t>{});
    case 2: return f(TypeTag<std::uint16_t>{});
    case 4: return f(TypeTag<std::uint32_t>{});
    default: return f(TypeTag<std::uint64_t>{});
  }
}

void copy_dense(void* out, const void* x, std::int64_t bytes) {
  constexpr std::int64_t kGrain = std::int64_t{1} << 18;
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<char*>(out) + begin, static_cast<const char*>(x) + begin,
                static_cast<std::size_t>(end - begin));
  };
  if (bytes <= kGrain) return part(0, bytes);
  constexpr std::int64_t kLine = 64;
  parallel_for(0, (bytes + kLine - 1) / kLine, kGrain / kLine,
               [&](std::int64_t begin, std::int64_t end) {
                 part(begin * kLine, std::min(end * kLine, bytes));
               });
}

/// Same type, any strides, one row of the loop at a time. Operand 0 is out, 1 is x.
template <class Raw>
void copy_rows(const LoopDims& dims, Raw* out, const Raw* x) {
  const std::int64_t inner = dims.inner();
  const std::int64_t to = dims.inner_stride(0), from = dims.inner_stride(1);
  const std::int64_t grain = std::max<std::int64_t>(1, kParallelGrain / inner);
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    RowCursor<2> row(dims, begin);
    for (std::int64_t r = begin; r < end; ++r, row.next()) {
      Raw* y = out + row.offset[0];
      const Raw* p = x + row.offset[1];
      if (to == 1 && from == 1)
        std::memcpy(y, p, static_cast<std::size_t>(inner) * sizeof(Raw));
      else
        for (std::int64_t i = 0; i < inner; ++i) y[i * to] = p[i * from];
    }
  };
  parallel_for(0, dims.rows(), grain, part);
}

/// tile[i][j] = x[i + j * stride] for i < rows, j < columns, row length kTile.
template <class Raw>
void transpose_tile(const Raw* x, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                    Raw* tile) {
  for (std::int64_t j = 0; j < columns; ++j)
    for (std::int64_t i = 0; i < rows; ++i) tile[i * kTile + j] = x[j * stride + i];
}

/// out's innermost loop is dense and so is x's loop `dims.count - 2`: tiles over these two.
/// `convert` writes a run of `n` raw elements of x to an address in out.
template <class Raw, class Convert>
void copy_transposed(const LoopDims& dims, const View& out, const Raw* x, Convert&& convert) {
  const int r = dims.count - 2, c = dims.count - 1;
  const std::int64_t rows = dims.sizes[r], columns = dims.sizes[c];
  const std::int64_t row_tiles = (rows + kTile - 1) / kTile;
  const std::int64_t column_tiles = (columns + kTile - 1) / kTile;
  LoopDims outer = dims;  // a "row" of it is one 2-D problem
  --outer.count;
  const std::int64_t problems = outer.rows();
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    alignas(64) Raw tile[kTile * kTile];
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t i0 = t / column_tiles % row_tiles * kTile, j0 = t % column_tiles * kTile;
      const std::int64_t problem = t / (row_tiles * column_tiles);
      const std::int64_t m = std::min(kTile, rows - i0), n = std::min(kTile, columns - j0);
      const Raw* from = x + outer.row_offset(1, problem) + i0 + j0 * dims.strides[1][c];
      transpose_tile(from, dims.strides[1][c], m, n, tile);
      const std::int64_t to = outer.row_offset(0, problem) + i0 * dims.strides[0][r] + j0;
      for (std::int64_t i = 0; i < m; ++i)
        convert(tile + i * kTile, element(out.data, out.dtype, to + i * dims.strides[0][r]), n);
    }
  };
  parallel_for(0, problems * row_tiles * column_tiles,
               std::max<std::int64_t>(1, kParallelGrain / (kTile * kTile)), part);
}

/// Brings the loop along which x is dense next to the innermost one; false if this is no
/// transposition or too small a one for tiles.
bool arrange_transposed(LoopDims& dims) {
  if (dims.count < 2 || dims.inner_stride(0) != 1 || dims.inner_stride(1) == 1) return false;
  if (dims.inner() < 8) return false;
  for (int d = dims.count - 2; d >= 0; --d) {
    if (dims.strides[1][d] != 1 || dims.sizes[d] < 8) continue;
    for (; d < dims.count - 2; ++d) dims.swap_dims(d, d + 1);
    return true;
  }
  return false;
}

template <class C>
void identity_block(const void* const* in, void* out, std::int64_t n, const void*) {
  std::memcpy(out, in[0], static_cast<std::size_t>(n) * sizeof(C));
}

void copy_converting(const View& out, const View& x, LoopDims& dims) {
  const Dtype compute = conversion_dtype(x.dtype, out.dtype);
  if (arrange_transposed(dims)) {
    const LoadFunction load = load_function(x.dtype, compute);
    const StoreFunction store = store_function(compute, out.dtype);
    dispatch_bytes(size_of(x.dtype), [&](auto tag) {
      using Raw = typename decltype(tag)::type;
      copy_transposed(dims, out, x.ptr<const Raw>(),
                      [=](const Raw* from, void* to, std::int64_t n) {
                        alignas(64) unsigned char values[kTile * 8];
                        load(from, 1, n, values);
                        store(values, to, 1, n);
                      });
    });
    return;
  }
  const BlockFunction identity =
      compute == Dtype::f32 ? identity_block<float> : identity_block<std::int64_t>;
  const Operand inputs[] = {x};
  elementwise("copy", identity, nullptr, compute, out, inputs);
}

}  // namespace

void copy(const Stream&, View out, View x) {
  if (out.numel() == 0) return;
  if (x.sizes != out.sizes) x = x.expand_to(out.sizes);
  LoopDims dims;
  for (int i = 0; i < out.dim(); ++i) dims.append(out.sizes[i], out.strides[i], x.strides[i]);
  dims.sort_by(0);
  dims.merge();
  if (out.dtype != x.dtype) return copy_converting(out, x, dims);
  const std::size_t bytes = size_of(x.dtype);
  if (dims.count == 0 || (dims.count == 1 && dims.strides[0][0] == 1 && dims.strides[1][0] == 1)) {
    return copy_dense(out.data, x.data, dims.inner() * static_cast<std::int64_t>(bytes));
  }
  dispatch_bytes(bytes, [&](auto tag) {
    using Raw = typename decltype(tag)::type;
    if (arrange_transposed(dims)) {
      copy_transposed(dims, out, x.ptr<const Raw>(), [](const Raw* from, void* to, std::int64_t n) {
        std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(Raw));
      });
    } else {
      copy_rows(dims, out.ptr<Raw>(), x.ptr<const Raw>());
    }
  });
}

void fill(const Stream&, View out, Scalar value) {
  const std::int64_t total = out.numel();
  if (total == 0) return;
  alignas(8) unsigned char number[8];
  store_scalar(value, out.dtype, number);
  if (!out.contiguous()) {
    LoopDims dims;
    for (int i = 0; i < out.dim(); ++i) dims.append(out.sizes[i], out.strides[i], 0);
    dims.sort_by(0);
    dims.merge();
    return dispatch_bytes(size_of(out.dtype), [&](auto tag) {
      using Raw = typename decltype(tag)::type;
      copy_rows(dims, out.ptr<Raw>(), reinterpret_cast<const Raw*>(number));
    });
  }
  dispatch_bytes(size_of(out.dtype), [&](auto tag) {
    using Raw = typename decltype(tag)::type;
    Raw raw;
    std::memcpy(&raw, number, sizeof raw);
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      std::fill(out.ptr<Raw>() + begin, out.ptr<Raw>() + end, raw);
    };
    if (total <= 2 * kParallelGrain)
      part(0, total);
    else
      parallel_for(0, total, 2 * kParallelGrain, part);
  });
}

void arange(const Stream&, View out, Scalar start, Scalar step) {
  const bool real =
      is_floating(out.dtype) || start.kind() == Dtype::f64 || step.kind() == Dtype::f64;
  const Dtype compute = real ? Dtype::f64 : Dtype::i64;
  const StoreFunction store = store_function(compute, out.dtype);
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    alignas(64) double reals[kBlockElements];
    alignas(64) std::int64_t integers[kBlockElements];
    for (std::int64_t b = begin; b < end; b += kBlockElements) {
      const std::int64_t n = std::min(kBlockElements, end - b);
      if (real) {
        const double first = start.to<double>(), by = step.to<double>();
        for (std::int64_t i = 0; i < n; ++i)
          reals[i] = std::fma(static_cast<double>(b + i), by, first);
      } else {
        const std::int64_t first = start.to<std::int64_t>(), by = step.to<std::int64_t>();
        for (std::int64_t i = 0; i < n; ++i) integers[i] = first + (b + i) * by;
      }
      const void* values = real ? static_cast<const void*>(reals) : integers;
      store(values, element(out.data, out.dtype, b), 1, n);
    }
  };
  parallel_for(0, out.numel(), kParallelGrain, part);
}

}  // namespace mixtape::kernels::cpu
