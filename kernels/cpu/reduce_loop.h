// The loop nest of the CPU's reductions. A reduction is a few functions on dense runs of the
// compute type and an accumulator; the loop finds the runs in any layout, converts them, splits
// long reductions, and combines the parts.
//
// Two forms: rows, where a reduced dimension is innermost in memory and a run goes into one
// accumulator, and columns, where a kept one is and a run goes into a row of accumulators. Splits
// depend on sizes and strides alone, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "engine/thread_pool.h"
#include "engine/view.h"

namespace mixtape::kernels::cpu {

/// One reduction over the compute type C. An accumulator is a trivial type of acc_bytes.
struct Reduction {
  Dtype compute;
  std::size_t acc_bytes;
  /// n accumulators of nothing.
  void (*init)(void* acc, std::int64_t n);
  /// acc takes in the n elements at x.
  void (*run)(const void* x, std::int64_t n, void* acc);
  /// acc[j] takes in x[r * row_stride + j] for r < rows (at most kReduceRows), each j < columns (at
  /// most kReduceColumns).
  void (*columns)(const void* x, std::int64_t row_stride, std::int64_t rows, std::int64_t columns,
                  void* acc);
  /// acc[j] takes in other[j] for j < n.
  void (*combine)(void* acc, const void* other, std::int64_t n);
};

inline constexpr std::int64_t kReduceRun = 4096;  // elements that `run` gets, at most
inline constexpr std::int64_t kReduceRows = 32, kReduceColumns = 256;

/// Largest Reduction::acc_bytes.
inline constexpr std::size_t kMaxAccBytes = 24;

/// Reduces x over the dimensions in which out has size 1, and calls finish(acc, element offset in
/// out, element offset in second) for each element of out, in any order and from several threads.
/// `second` is another output of out's sizes, or undefined. Throws if the shapes do not fit.
void reduce_loop(const char* kernel, const Reduction& reduction, const View& x, const View& out,
                 const View& second,
                 FunctionRef<void(const void*, std::int64_t, std::int64_t)> finish);

}  // namespace mixtape::kernels::cpu
