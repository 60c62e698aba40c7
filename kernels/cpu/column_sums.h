// Sums over the rows of a matrix, column by column (gradients of weights and biases), with the same
// bits for any number of threads: rows are cut into chunks by their count alone, a chunk is summed
// in float within kFlushRows rows and in double beyond, and chunks are added in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/thread_pool.h"
#include "kernels/cpu/convert.h"

namespace mixtape::kernels::cpu {

inline constexpr std::int64_t kChunkRows = 32, kMaxChunks = 32, kFlushRows = 64;

/// Number of chunks that `rows` rows are cut into, and the rows of each.
inline std::int64_t row_chunks(std::int64_t rows) {
  return std::clamp<std::int64_t>((rows + kChunkRows - 1) / kChunkRows, 1, kMaxChunks);
}
inline std::int64_t rows_per_chunk(std::int64_t rows) {
  return (rows + row_chunks(rows) - 1) / row_chunks(rows);
}

/// Running sums of one chunk: `part` (n) in C, `total` (n) in double; both start as 0.
template <class C>
class ColumnSums {
 public:
  ColumnSums(C* part, double* total, std::int64_t n) : part_(part), total_(total), n_(n) {
    std::fill(part_, part_ + n_, C(0));
    std::fill(total_, total_ + n_, 0.0);
  }
  /// Where a row adds its values; call row_done() after each row and flush() after the last.
  C* part() { return part_; }
  void row_done() {
    if (++rows_ % kFlushRows == 0) flush();
  }
  void flush() {
    for (std::int64_t i = 0; i < n_; ++i) {
      total_[i] += static_cast<double>(part_[i]);
      part_[i] = 0;
    }
  }

 private:
  C* part_;
  double* total_;
  std::int64_t n_, rows_ = 0;
};

/// out = sum over chunks of partial[chunk * stride + i] + beta * out; an absent view is skipped.
inline void store_column_sums(const View& out, const double* partial, std::int64_t chunks,
                              std::int64_t stride, float beta) {
  if (!out) return;
  constexpr std::int64_t kColumnGrain = 256;
  parallel_for(0, out.numel(), kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (std::int64_t c = 0; c < chunks; ++c) sum += partial[c * stride + i];
      void* const to = element_address(out.data, out.dtype, i * out.stride(-1));
      if (beta != 0) {
        double old = 0;
        load_elements(out.dtype, to, &old, 1);
        sum += beta * old;
      }
      store_elements(out.dtype, to, &sum, 1);
    }
  });
}

}  // namespace mixtape::kernels::cpu
