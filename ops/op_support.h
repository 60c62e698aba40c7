// Helpers shared by the op families.
#pragma once

#include <utility>

#include "engine/channels_last.h"
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

/// t channels-last or contiguous; t itself where it already is.
inline Tensor in_layout(const Tensor& t, bool channels_last) {
  if (!channels_last) return t.contiguous();
  return is_channels_last(t) ? t : t.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
}

/// Has write(view) overwrite the gradient of an input, in new channels-last memory or, contiguous,
/// wherever `dx` wants it.
template <class Write>
void write_gradient(GradDst& dx, bool channels_last, Device device, Write&& write) {
  const Tensor to =
      channels_last ? empty_in_layout(dx.meta().shape, dx.meta().dtype, device, true) : dx.out();
  write(to.view());
  if (channels_last) dx.set(to);
}
/// The same, in the layout of the incoming gradient.
template <class Write>
void write_gradient(GradDst& dx, const Tensor& dy, Write&& write) {
  write_gradient(dx, is_channels_last(dy), dy.device(), std::forward<Write>(write));
}

inline void check_floating(const char* op, const char* what, const Tensor& t) {
  MT_CHECK(is_floating(t.dtype()), op, ": expected ", what, " of a floating dtype, got ",
           t.describe());
}

}  // namespace mixtape
