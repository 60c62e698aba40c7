// Planning and running reductions; see reduce_loop.h.
#include "kernels/cpu/reduce_loop.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/load_store.h"
#include "kernels/cpu/loop_dims.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {

namespace {

using Finish = FunctionRef<void(const void*, std::int64_t, std::int64_t)>;

constexpr std::int64_t kGrain = 32768;  // elements worth a thread
constexpr std::int64_t kBufferElements = kReduceRows * kReduceColumns;
constexpr std::int64_t kMaxPartials = 1 << 16;  // accumulators of split reductions
constexpr std::int64_t kMaxTasks = 64;          // parts that splitting aims at

enum Operand { kOut, kSecond, kIn };  // operands of the kept dimensions

struct Plan {
  const Reduction& f;
  Finish finish;
  View x;
  LoopDims kept;     // strides of out, second, x
  LoopDims reduced;  // stride of x
  std::int64_t outputs = 1, count = 1;
  LoadFunction load;
  bool direct;  // x has the compute type
};

bool by_columns(const Plan& p) {
  if (p.kept.count == 0 || p.reduced.count == 0) return false;
  return p.kept.inner_stride(kIn) < p.reduced.inner_stride(0);
}

Plan make_plan(const char* kernel, const Reduction& f, const View& x, const View& out,
               const View& second, Finish finish) {
  MT_CHECK_EQ(out.dim(), x.dim(), kernel, ": dimensions of the output");
  Plan p{f, finish, x, {}, {}, 1, 1, load_function(x.dtype, f.compute), x.dtype == f.compute};
  for (int i = 0; i < x.dim(); ++i) {
    const bool kept = out.sizes[i] == x.sizes[i];
    MT_CHECK(kept || out.sizes[i] == 1, kernel, ": expected an output of size 1 or ", x.sizes[i],
             " in dimension ", i, ", got ", out.sizes);
    if (kept)
      p.kept.append(x.sizes[i], out.strides[i], second ? second.strides[i] : 0, x.strides[i]);
    else
      p.reduced.append(x.sizes[i], x.strides[i]);
    (kept ? p.outputs : p.count) *= x.sizes[i];
  }
  p.kept.sort_by(kIn);
  p.kept.merge();
  p.reduced.sort_by(0);
  p.reduced.merge();
  return p;
}

/// f(element offset, length) for the runs of the innermost reduced dimension that cover the reduced
/// elements [begin, end).
template <class F>
void for_each_run(const LoopDims& reduced, std::int64_t begin, std::int64_t end, F&& f) {
  if (begin >= end) return;
  const std::int64_t inner = reduced.inner(), stride = reduced.inner_stride(0);
  RowCursor<1> row(reduced, begin / inner);
  std::int64_t first = begin % inner;
  for (std::int64_t i = begin; i < end; row.next(), first = 0) {
    const std::int64_t n = std::min(inner - first, end - i);
    f(row.offset[0] + first * stride, n);
    i += n;
  }
}

/// Takes the reduced elements [begin, end) of the output whose first element is at x's `offset`
/// into acc. Short runs and other types are gathered in a buffer first.
void reduce_row(const Plan& p, std::int64_t offset, std::int64_t begin, std::int64_t end,
                void* acc) {
  constexpr std::int64_t kShort = 64;
  const std::int64_t stride = p.reduced.inner_stride(0);
  alignas(64) unsigned char buffer[1024 * 8];
  constexpr std::int64_t kCapacity = 1024;
  std::int64_t used = 0;
  const auto flush = [&] {
    if (used > 0) p.f.run(buffer, used, acc);
    used = 0;
  };
  const bool whole = p.direct && stride == 1;
  for_each_run(p.reduced, begin, end, [&](std::int64_t at, std::int64_t n) {
    at += offset;
    if (whole && (n >= kShort || n == end - begin)) {
      for (std::int64_t i = 0; i < n; i += kReduceRun)
        p.f.run(element(p.x.data, p.x.dtype, at + i), std::min(kReduceRun, n - i), acc);
      return;
    }
    while (n > 0) {
      const std::int64_t m = std::min(n, kCapacity - used);
      p.load(element(p.x.data, p.x.dtype, at), stride, m, element(buffer, p.f.compute, used));
      used += m;
      at += m * stride;
      n -= m;
      if (used == kCapacity) flush();
    }
  });
  flush();
}

/// Parts that a reduction of `count` elements is split into when there are `tasks` without it.
std::int64_t split_count(std::int64_t tasks, std::int64_t count, std::int64_t elements_per_item,
                         std::int64_t outputs) {
  const std::int64_t wanted = (kMaxTasks + tasks - 1) / tasks;
  const std::int64_t worthwhile = count * elements_per_item / (kGrain / 2);
  return std::max<std::int64_t>(1, std::min({wanted, worthwhile, kMaxPartials / outputs}));
}

/// Combines the parts of each output and finishes it. partial: parts x outputs accumulators.
void finish_parts(const Plan& p, std::int64_t parts, unsigned char* partial) {
  const std::size_t bytes = p.f.acc_bytes;
  for (std::int64_t s = 1; s < parts; ++s)
    p.f.combine(partial, partial + static_cast<std::size_t>(s * p.outputs) * bytes, p.outputs);
  const std::int64_t inner = p.kept.inner();
  RowCursor<2> row(p.kept, 0);
  for (std::int64_t r = 0; r < p.kept.rows(); ++r, row.next())
    for (std::int64_t j = 0; j < inner; ++j)
      p.finish(partial + static_cast<std::size_t>(r * inner + j) * bytes,
               row.offset[kOut] + j * p.kept.inner_stride(kOut),
               row.offset[kSecond] + j * p.kept.inner_stride(kSecond));
}

void reduce_rows(const Plan& p) {
  const std::int64_t parts = split_count(p.outputs, p.count, 1, p.outputs);
  const std::int64_t inner = p.kept.inner();
  const auto outputs_at = [&](std::int64_t begin, std::int64_t end, auto&& body) {
    RowCursor<3> row(p.kept, begin / inner);
    std::int64_t j = begin % inner;
    for (std::int64_t o = begin; o < end; ++o) {
      body(o, row, j);
      if (++j < inner) continue;
      j = 0;
      row.next();
    }
  };
  if (parts == 1) {
    const auto task = [&](std::int64_t begin, std::int64_t end) {
      outputs_at(begin, end, [&](std::int64_t, const RowCursor<3>& row, std::int64_t j) {
        alignas(8) unsigned char acc[kMaxAccBytes];
        p.f.init(acc, 1);
        reduce_row(p, row.offset[kIn] + j * p.kept.inner_stride(kIn), 0, p.count, acc);
        p.finish(acc, row.offset[kOut] + j * p.kept.inner_stride(kOut),
                 row.offset[kSecond] + j * p.kept.inner_stride(kSecond));
      });
    };
    parallel_for(0, p.outputs,
                 std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, p.count)), task);
    return;
  }
  ScratchFrame frame;
  auto* partial =
      frame.take<unsigned char>(p.outputs * parts * static_cast<std::int64_t>(p.f.acc_bytes));
  const std::int64_t length = (p.count + parts - 1) / parts;
  parallel_for(0, parts, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      outputs_at(0, p.outputs, [&](std::int64_t o, const RowCursor<3>& row, std::int64_t j) {
        void* acc = partial + static_cast<std::size_t>(s * p.outputs + o) * p.f.acc_bytes;
        p.f.init(acc, 1);
        const std::int64_t begin = std::min(p.count, s * length);
        reduce_row(p, row.offset[kIn] + j * p.kept.inner_stride(kIn), begin,
                   std::min(p.count, begin + length), acc);
      });
    }
  });
  finish_parts(p, parts, partial);
}

/// Takes `rows` rows of `columns` elements, row_stride apart, into acc[0, columns).
void reduce_column_block(const Plan& p, std::int64_t at, std::int64_t row_stride, std::int64_t rows,
                         std::int64_t columns, std::int64_t column_stride, void* acc) {
  alignas(64) unsigned char buffer[kBufferElements * 8];
  for (std::int64_t r = 0; r < rows; r += kReduceRows) {
    const std::int64_t m = std::min(kReduceRows, rows - r);
    const void* block = element(p.x.data, p.x.dtype, at + r * row_stride);
    if (p.direct && column_stride == 1) {
      p.f.columns(block, row_stride, m, columns, acc);
      continue;
    }
    if (column_stride == 1 && row_stride == columns) {
      p.load(block, 1, m * columns, buffer);
    } else {
      for (std::int64_t i = 0; i < m; ++i)
        p.load(element(block, p.x.dtype, i * row_stride), column_stride, columns,
               element(buffer, p.f.compute, i * columns));
    }
    p.f.columns(buffer, columns, m, columns, acc);
  }
}

/// Takes the reduced elements [begin, end) of `columns` neighbouring outputs into acc[0, columns).
/// Narrow rows that follow each other in memory are taken several at a time, as one wide row.
void reduce_columns_part(const Plan& p, std::int64_t offset, std::int64_t columns,
                         std::int64_t begin, std::int64_t end, unsigned char* acc) {
  const std::int64_t row_stride = p.reduced.inner_stride(0);
  const std::int64_t column_stride = p.kept.inner_stride(kIn);
  const bool dense = column_stride == 1 && row_stride == columns;
  const std::int64_t fold = dense ? kReduceColumns / columns : 1;
  p.f.init(acc, columns * fold);
  for_each_run(p.reduced, begin, end, [&](std::int64_t at, std::int64_t n) {
    const std::int64_t wide = fold > 1 ? n / fold : 0;
    reduce_column_block(p, offset + at, row_stride * fold, wide, columns * fold, 1, acc);
    const std::int64_t done = wide * fold;
    reduce_column_block(p, offset + at + done * row_stride, row_stride, n - done, columns,
                        column_stride, acc);
  });
  for (std::int64_t k = 1; k < fold; ++k)
    p.f.combine(acc, acc + static_cast<std::size_t>(k * columns) * p.f.acc_bytes, columns);
}

void reduce_columns(const Plan& p) {
  const std::int64_t inner = p.kept.inner(), rows = p.kept.rows();
  const std::int64_t tiles = (inner + kReduceColumns - 1) / kReduceColumns;
  const std::int64_t width = std::min(inner, kReduceColumns);
  const std::int64_t parts = split_count(rows * tiles, p.count, width, p.outputs);
  const std::int64_t length = (p.count + parts - 1) / parts;
  const std::size_t bytes = p.f.acc_bytes;
  ScratchFrame frame;
  unsigned char* partial =
      parts == 1 ? nullptr
                 : frame.take<unsigned char>(p.outputs * parts * static_cast<std::int64_t>(bytes));
  const auto task = [&](std::int64_t first, std::int64_t last) {
    alignas(64) unsigned char acc[kReduceColumns * kMaxAccBytes];
    for (std::int64_t t = first; t < last; ++t) {
      const std::int64_t s = t / (rows * tiles), row = t / tiles % rows;
      const std::int64_t j0 = t % tiles * width, n = std::min(width, inner - j0);
      const std::int64_t begin = std::min(p.count, s * length);
      const std::int64_t offset = p.kept.row_offset(kIn, row) + j0 * p.kept.inner_stride(kIn);
      reduce_columns_part(p, offset, n, begin, std::min(p.count, begin + length), acc);
      if (parts > 1) {
        std::memcpy(partial + static_cast<std::size_t>(s * p.outputs + row * inner + j0) * bytes,
                    acc, static_cast<std::size_t>(n) * bytes);
        continue;
      }
      const std::int64_t out = p.kept.row_offset(kOut, row);
      const std::int64_t second = p.kept.row_offset(kSecond, row);
      for (std::int64_t j = 0; j < n; ++j)
        p.finish(acc + static_cast<std::size_t>(j) * bytes,
                 out + (j0 + j) * p.kept.inner_stride(kOut),
                 second + (j0 + j) * p.kept.inner_stride(kSecond));
    }
  };
  parallel_for(0, rows * tiles * parts,
               std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width * length)), task);
  if (parts > 1) finish_parts(p, parts, partial);
}

}  // namespace

void reduce_loop(const char* kernel, const Reduction& reduction, const View& x, const View& out,
                 const View& second, Finish finish) {
  const Plan plan = make_plan(kernel, reduction, x, out, second, finish);
  if (plan.outputs == 0) return;
  if (by_columns(plan))
    reduce_columns(plan);
  else
    reduce_rows(plan);
}

}  // namespace mixtape::kernels::cpu
