#include "kernels/cuda/conv_layout.h"

namespace mixtape::kernels::cuda {
namespace {

bool strides_match(const View& v, ConvLayout layout, int first) {
  if (v.numel() == 0) return true;
  const Shape packed = packed_strides(v.sizes, layout);
  for (int d = first; d < 4; ++d)
    if (v.size(d) != 1 && v.stride(d) != packed[d]) return false;
  return true;
}

}  // namespace

Shape packed_strides(const Shape& n, ConvLayout layout) {
  if (layout == ConvLayout::channels_last) return {n[1] * n[2] * n[3], 1, n[1] * n[3], n[1]};
  return {n[1] * n[2] * n[3], n[2] * n[3], n[3], 1};
}

bool has_layout(const View& v, ConvLayout layout) {
  return strides_match(v, layout, 1) &&
         (v.numel() == 0 || v.size(0) == 1 || v.stride(0) >= v.size(1) * v.size(2) * v.size(3));
}

bool is_packed(const View& v, ConvLayout layout) { return strides_match(v, layout, 0); }

ConvLayout layout_of(const char* op, const char* name, const View& v) {
  MT_CHECK(v.dim() == 4, op, ": expected ", name, " of 4 dimensions, got ", v.sizes);
  if (has_layout(v, ConvLayout::planar)) return ConvLayout::planar;
  MT_CHECK(is_packed(v, ConvLayout::channels_last), op, ": expected ", name,
           " contiguous or channels-last, got sizes ", v.sizes, " with strides ", v.strides);
  return ConvLayout::channels_last;
}

View as_rows(const View& v) {
  View rows = v;
  rows.sizes = {v.size(0) * v.size(2) * v.size(3), v.size(1)};
  rows.strides = {v.size(1), 1};
  return rows;
}

View as_planes(const View& v) {
  View planes = v;
  const std::int64_t pixels = v.size(2) * v.size(3);
  planes.sizes = {v.size(0), v.size(1), pixels};
  planes.strides = {v.size(0) == 1 ? v.size(1) * pixels : v.stride(0),
                    v.size(1) == 1 ? pixels : v.stride(1), 1};
  return planes;
}

}  // namespace mixtape::kernels::cuda
