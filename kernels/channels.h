// The problem that normalisations over channels share: (N, C, S) views in one of two packed
// layouts.
#pragma once

#include "engine/check.h"
#include "engine/view.h"

namespace mixtape::kernels {

struct ChannelLayout {
  std::int64_t n, c, s;
  bool channels_last;  // also of one value a channel, where the layouts are the same
  std::int64_t values() const { return n * s; }  // of one channel
};

/// Reads the layout off x's strides; throws unless x is (N, C, S) and packed.
inline ChannelLayout channel_layout(const char* op, const View& x) {
  MT_CHECK(x.dim() == 3, op, ": expected x (N, C, S), got ", x.sizes);
  const ChannelLayout l{x.size(0), x.size(1), x.size(2), x.size(2) == 1};
  if (l.channels_last || x.contiguous()) {
    MT_CHECK(x.contiguous(), op, ": expected x contiguous, got strides ", x.strides);
    return l;
  }
  MT_CHECK((l.n == 1 || x.stride(0) == l.c * l.s) && (l.c == 1 || x.stride(1) == 1) &&
               x.stride(2) == l.c,
           op, ": expected x contiguous or channels-last, got sizes ", x.sizes, " strides ",
           x.strides);
  return {l.n, l.c, l.s, true};
}

/// Checks that `others` (absent ones aside) have x's sizes, dtype and layout.
inline void check_like_x(const char* op, const View& x, std::initializer_list<View> others) {
  const bool last = channel_layout(op, x).channels_last;
  for (const View& v : others) {
    if (!v) continue;
    MT_CHECK(v.sizes == x.sizes && v.dtype == x.dtype, op, ": expected ", x.dtype, " of ", x.sizes,
             ", got ", v.dtype, " of ", v.sizes);
    MT_CHECK(x.numel() == 0 || channel_layout(op, v).channels_last == last, op,
             ": expected one layout, got strides ", v.strides, " beside ", x.strides);
  }
}

/// Checks that `vectors` (absent ones aside) are contiguous (C) of a floating dtype.
inline void check_channel_vectors(const char* op, std::int64_t channels,
                                  std::initializer_list<View> vectors) {
  for (const View& v : vectors) {
    MT_CHECK(
        !v || (v.dim() == 1 && v.size(0) == channels && is_floating(v.dtype) && v.contiguous()), op,
        ": expected a contiguous vector of ", channels, " values, got ", v.dtype, " of ", v.sizes,
        " strides ", v.strides);
  }
}

/// A packed view as the rows that lie side by side in memory: (N S, C) channels-last, (N C, S)
/// planar.
inline View packed_rows(const View& v, const ChannelLayout& l) {
  if (!v) return v;
  View rows = v;
  const std::int64_t width = l.channels_last ? l.c : l.s;
  rows.sizes = {l.channels_last ? l.n * l.s : l.n * l.c, width};
  rows.strides = {width, 1};
  return rows;
}

}  // namespace mixtape::kernels
