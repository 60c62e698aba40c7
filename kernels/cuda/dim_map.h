// A set of dimensions as a kernel argument: turns a linear index into the offsets of up to three
// views.
#pragma once

#include <cstdint>

#include "engine/shape.h"
#include "kernels/cuda/fast_divide.cuh"

namespace mixtape::kernels::cuda {

/// Dimensions innermost first, strides in elements.
struct DimMap {
  static constexpr int kOperands = 3;

  std::int32_t dims = 0;
  bool wide = false;  // indices of 2^31 and more: plain 64-bit division
  FastDivide fast[kMaxDims];
  std::int64_t sizes[kMaxDims];
  std::int64_t strides[kOperands][kMaxDims] = {};

  std::int64_t count() const {
    std::int64_t n = 1;
    for (int d = 0; d < dims; ++d) n *= sizes[d];
    return n;
  }
  void append(std::int64_t size, const std::int64_t (&stride)[kOperands]);
  /// Orders by operand 0's strides, smallest first, and merges what every operand steps through as
  /// one.
  void sort_and_merge();
  /// Makes offsets() usable; after the last change.
  void prepare();

  /// Offsets of operands [0, K) at element `index`, counted from dimension `from` outwards.
  template <int K>
  MT_HOST_DEVICE void offsets(std::int64_t index, std::int64_t (&offset)[K], int from = 0) const {
    for (int k = 0; k < K; ++k) offset[k] = 0;
    for (int d = from; d < dims; ++d) {
      std::int64_t i = index;
      if (d + 1 < dims) {
        if (wide) {
          index = i / sizes[d];
          i -= index * sizes[d];
        } else {
          std::uint32_t rest = static_cast<std::uint32_t>(i);
          index = fast[d].divide(rest);
          i = rest;
        }
      }
      for (int k = 0; k < K; ++k) offset[k] += i * strides[k][d];
    }
  }
};

}  // namespace mixtape::kernels::cuda
