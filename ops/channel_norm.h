// What batch and group normalisation share: x (N, C, ..) as the (N, C, S) that their kernels take,
// and the checks of vectors over channels.
#pragma once

#include "ops/op_support.h"

namespace mixtape {

/// t, packed, as (N, C, S).
inline View channels_of(const Tensor& t, bool channels_last) {
  if (!t) return {};
  View v = t.view();
  const std::int64_t n = t.size(0), c = t.size(1);
  std::int64_t s = 1;
  for (int d = 2; d < t.dim(); ++d) s *= t.size(d);
  v.sizes = {n, c, s};
  v.strides = channels_last ? Shape{c * s, 1, c} : Shape{c * s, s, 1};
  return v;
}

inline void check_channels(const char* op, const Tensor& x) {
  check_floating(op, "x", x);
  MT_CHECK(x.dim() >= 2, op, ": expected x (N, C, ..), got ", x.describe());
}

inline void check_channel_vector(const char* op, const char* what, const Tensor& v,
                                 const Tensor& x) {
  MT_CHECK(!v || (v.shape() == Shape{x.size(1)} && is_floating(v.dtype())), op, ": expected ", what,
           " (", x.size(1), ") of a floating dtype for x ", x.shape(), ", got ", v.describe());
}

}  // namespace mixtape
