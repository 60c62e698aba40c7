// Helpers shared by the op families.
#pragma once

#include <utility>

#include "engine/op.h"
#include "kernels/kernel.h"
#include "ops/ops.h"

namespace mixtape {

inline Stream stream_of(const Tensor& t) { return Stream::current(t.device()); }
inline View view_or_absent(const Tensor& t) { return t ? t.view() : View{}; }

/// FLOPs of a product of (m, k) by (k, n) matrices.
inline double product_flops(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

/// A workspace that lives until the end of the scope.
struct ScratchWorkspace {
  ScratchWorkspace(std::size_t bytes, Device device) : scratch(bytes, device) {}
  operator Workspace() const { return {scratch.data(), scratch.bytes()}; }
  Scratch scratch;
};

/// Promotion of two operands as PyTorch does it: a 0-d tensor changes the dtype only if it is of a
/// higher kind (bool < integer < float) than the other.
Dtype result_dtype(const Tensor& a, const Tensor& b);

/// The memory of a contiguous tensor as (N, columns) rows.
inline View rows_of(const Tensor& t, std::int64_t columns) {
  View v = t.view();
  v.sizes = {columns == 0 ? 0 : t.numel() / columns, columns};
  v.strides = {columns, 1};
  return v;
}

/// The same memory with dimensions a and b exchanged.
inline View transposed(View v, int a = 0, int b = 1) {
  std::swap(v.sizes[a], v.sizes[b]);
  std::swap(v.strides[a], v.strides[b]);
  return v;
}

inline void check_floating(const char* op, const char* what, const Tensor& t) {
  MT_CHECK(is_floating(t.dtype()), op, ": expected ", what, " of a floating dtype, got ",
           t.describe());
}

}  // namespace mixtape
