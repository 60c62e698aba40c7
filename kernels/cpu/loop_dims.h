// The nest of loops over several strided operands of one shape: dimensions ordered and merged, so
// that most calls come down to one or two loops, and walked row by row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/shape.h"

namespace mixtape::kernels::cpu {

/// Sizes of the loops, outermost first, and each operand's stride in them (elements).
struct LoopDims {
  static constexpr int kMaxOperands = 5;

  int count = 0, operands = 0;
  std::int64_t sizes[kMaxDims + 1];
  std::int64_t strides[kMaxOperands][kMaxDims + 1];

  /// The innermost size, 1 without dimensions.
  std::int64_t inner() const { return count > 0 ? sizes[count - 1] : 1; }
  /// Number of rows: the product of all sizes but the innermost.
  std::int64_t rows() const {
    std::int64_t n = 1;
    for (int d = 0; d + 1 < count; ++d) n *= sizes[d];
    return n;
  }
  std::int64_t inner_stride(int k) const { return count > 0 ? strides[k][count - 1] : 0; }

  /// Adds an innermost loop, unless it has size 1.
  template <class... Strides>
  void append(std::int64_t size, Strides... s) {
    operands = sizeof...(s);
    if (size == 1) return;
    sizes[count] = size;
    int k = 0;
    ((strides[k++][count] = s), ...);
    ++count;
  }

  /// Adds an innermost loop of one iteration, so that a row is a single position of the others.
  void append_single() {
    sizes[count] = 1;
    for (int k = 0; k < operands; ++k) strides[k][count] = 0;
    ++count;
  }

  /// Orders the loops by operand k's strides, largest first (equal ones keep their order).
  void sort_by(int k) {
    for (int i = 1; i < count; ++i)
      for (int d = i; d > 0 && strides[k][d - 1] < strides[k][d]; --d) swap_dims(d - 1, d);
  }
  void swap_dims(int a, int b) {
    std::swap(sizes[a], sizes[b]);
    for (int o = 0; o < operands; ++o) std::swap(strides[o][a], strides[o][b]);
  }

  /// Merges neighbouring loops that every operand steps through as one.
  void merge() {
    if (count == 0) return;
    int last = 0;
    for (int d = 1; d < count; ++d) {
      bool one = true;
      for (int k = 0; k < operands; ++k) one &= strides[k][last] == strides[k][d] * sizes[d];
      if (one)
        sizes[last] *= sizes[d];
      else
        sizes[++last] = sizes[d];
      for (int k = 0; k < operands; ++k) strides[k][last] = strides[k][d];
    }
    count = last + 1;
  }

  /// Offset of operand k at the first element of row `row`.
  std::int64_t row_offset(int k, std::int64_t row) const {
    std::int64_t offset = 0;
    for (int d = count - 2; d > 0; --d) {
      offset += row % sizes[d] * strides[k][d];
      row /= sizes[d];
    }
    return count >= 2 ? offset + row * strides[k][0] : 0;
  }
};

/// Steps through rows in order, with the offsets of operands [0, kOperands).
template <int kOperands>
class RowCursor {
 public:
  RowCursor(const LoopDims& dims, std::int64_t row) : dims_(dims) {
    for (int d = dims.count - 2; d >= 0; --d) {
      index_[d] = row % dims.sizes[d];
      row /= dims.sizes[d];
      for (int k = 0; k < kOperands; ++k) offset[k] += index_[d] * dims.strides[k][d];
    }
  }
  void next() {
    for (int d = dims_.count - 2; d >= 0; --d) {
      for (int k = 0; k < kOperands; ++k) offset[k] += dims_.strides[k][d];
      if (++index_[d] < dims_.sizes[d]) return;
      for (int k = 0; k < kOperands; ++k) offset[k] -= index_[d] * dims_.strides[k][d];
      index_[d] = 0;
    }
  }

  std::int64_t offset[kOperands] = {};

 private:
  const LoopDims& dims_;
  std::int64_t index_[kMaxDims] = {};
};

}  // namespace mixtape::kernels::cpu
