#include "engine/channels_last.h"

namespace mixtape {

bool is_channels_last(const Tensor& x) {
  if (!x || x.dim() != 4) return false;
  const Shape &n = x.shape(), &s = x.strides();
  return n[1] > 1 && s[1] == 1 && s[3] == n[1] && s[2] == n[1] * n[3] && s[0] == n[1] * n[2] * n[3];
}

Tensor empty_in_layout(const Shape& n, Dtype dtype, Device device, bool channels_last) {
  Tensor t = Tensor::empty(n, dtype, device);
  if (channels_last) t.impl()->strides = {n[1] * n[2] * n[3], 1, n[1] * n[3], n[1]};
  return t;
}

void follow_layout(Tensor& out, Inputs in) {
  if (out.dim() != 4) return;
  for (const Tensor& t : in) {
    if (!t || t.shape() != out.shape()) continue;
    if (is_channels_last(t)) out = empty_in_layout(out.shape(), out.dtype(), out.device(), true);
    return;
  }
}

}  // namespace mixtape
