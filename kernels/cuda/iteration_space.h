// The index space that the operands of one kernel share: broadcast to one shape, dimensions of size
// 1 dropped, ordered by the output's strides and merged where every operand steps through two
// dimensions as through one. Most calls come down to one or two dimensions.
//
// Kernels with 32-bit indices run on pieces of it: for_each_piece halves the space until every
// operand's offsets fit.
#pragma once

#include <cstdint>
#include <limits>

#include "engine/view.h"

namespace mixtape::kernels::cuda {

/// kOperands operands; operand 0 is the output. Dimensions are innermost first.
template <int kOperands>
struct IterationSpace {
  int dims = 0;
  std::int64_t sizes[kMaxDims];
  std::int64_t strides[kOperands][kMaxDims];  // in elements, 0 where the operand is broadcast
  char* data[kOperands];                      // nullptr: the operand is a number
  Dtype dtypes[kOperands];

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int d = 0; d < dims; ++d) n *= sizes[d];
    return n;
  }
  std::int64_t inner_size() const { return dims > 0 ? sizes[0] : 1; }
  /// Operand k's innermost stride; 1 for a space of one element.
  std::int64_t inner_stride(int k) const { return dims > 0 ? strides[k][0] : 1; }
  /// One dense run in every operand that is not a number.
  bool contiguous() const {
    if (dims > 1) return false;
    for (int k = 0; k < kOperands; ++k)
      if (data[k] != nullptr && inner_stride(k) != 1) return false;
    return true;
  }
  /// Elements and offsets below 2^31.
  bool fits_32bit() const {
    constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
    if (numel() > kLimit) return false;
    for (int k = 0; k < kOperands; ++k) {
      std::int64_t last = 0;
      for (int d = 0; d < dims; ++d) last += (sizes[d] - 1) * strides[k][d];
      if (last > kLimit) return false;
    }
    return true;
  }
  /// The dimension that reaches furthest.
  int longest_dim() const {
    int longest = 0;
    std::int64_t reach = -1;
    for (int d = 0; d < dims; ++d)
      for (int k = 0; k < kOperands; ++k)
        if ((sizes[d] - 1) * strides[k][d] >= reach) {
          reach = (sizes[d] - 1) * strides[k][d];
          longest = d;
        }
    return longest;
  }
  /// Elements [begin, begin + count) of dimension d.
  IterationSpace slice(int d, std::int64_t begin, std::int64_t count) const {
    IterationSpace part = *this;
    part.sizes[d] = count;
    for (int k = 0; k < kOperands; ++k)
      if (data[k] != nullptr)
        part.data[k] += begin * strides[k][d] * static_cast<std::int64_t>(size_of(dtypes[k]));
    return part;
  }
};

namespace detail {

/// Orders by operand 0's strides, smallest first (equal ones keep their order).
template <int K>
void sort_dims(IterationSpace<K>& space) {
  for (int i = 1; i < space.dims; ++i)
    for (int d = i; d > 0 && space.strides[0][d - 1] > space.strides[0][d]; --d) {
      std::swap(space.sizes[d - 1], space.sizes[d]);
      for (int k = 0; k < K; ++k) std::swap(space.strides[k][d - 1], space.strides[k][d]);
    }
}

template <int K>
void merge_dims(IterationSpace<K>& space) {
  if (space.dims == 0) return;
  int top = 0;
  for (int d = 1; d < space.dims; ++d) {
    bool one = true;
    for (int k = 0; k < K; ++k)
      one = one && space.strides[k][d] == space.strides[k][top] * space.sizes[top];
    if (one) {
      space.sizes[top] *= space.sizes[d];
      continue;
    }
    ++top;
    space.sizes[top] = space.sizes[d];
    for (int k = 0; k < K; ++k) space.strides[k][top] = space.strides[k][d];
  }
  space.dims = top + 1;
}

}  // namespace detail

/// views[0] is the output, whose sizes the others broadcast to; nullptr is a number. Throws
/// "name: expected operands that broadcast to (..), got (..)".
template <int K>
IterationSpace<K> make_iteration_space(const char* name, const View* const (&views)[K]) {
  IterationSpace<K> space;
  const View& out = *views[0];
  for (int k = 1; k < K; ++k) {
    if (views[k] == nullptr) continue;
    const Shape& sizes = views[k]->sizes;
    bool valid = sizes.size() <= out.dim();
    for (int d = 1; valid && d <= sizes.size(); ++d) {
      const std::int64_t size = sizes[sizes.size() - d];
      valid = size == 1 || size == out.sizes[out.dim() - d];
    }
    MT_CHECK(valid, name, ": expected operands that broadcast to ", out.sizes, ", got ", sizes);
  }
  for (int d = out.dim() - 1; d >= 0; --d) {
    if (out.sizes[d] == 1) continue;
    space.sizes[space.dims] = out.sizes[d];
    for (int k = 0; k < K; ++k) {
      std::int64_t stride = 0;
      if (views[k] != nullptr) {
        const int e = d - out.dim() + views[k]->dim();
        if (e >= 0 && views[k]->sizes[e] != 1) stride = views[k]->strides[e];
      }
      space.strides[k][space.dims] = stride;
    }
    ++space.dims;
  }
  for (int k = 0; k < K; ++k) {
    space.data[k] = views[k] != nullptr ? static_cast<char*>(views[k]->data) : nullptr;
    space.dtypes[k] = views[k] != nullptr ? views[k]->dtype : Dtype::f32;
  }
  detail::sort_dims(space);
  detail::merge_dims(space);
  return space;
}

/// Calls f(piece) on parts of the space that are all fits_32bit(), and cover it.
template <int K, class F>
void for_each_piece(const IterationSpace<K>& space, F&& f) {
  if (space.fits_32bit()) {
    f(space);
    return;
  }
  const int d = space.longest_dim();
  const std::int64_t half = space.sizes[d] / 2;
  for_each_piece(space.slice(d, 0, half), f);
  for_each_piece(space.slice(d, half, space.sizes[d] - half), f);
}

}  // namespace mixtape::kernels::cuda
