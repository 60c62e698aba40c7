#include "engine/shape.h"

#include <ostream>

namespace mixtape {

std::int64_t Shape::numel() const {
  std::int64_t n = 1;
  bool overflow = false;
  for (const std::int64_t v : *this) {
    if (v == 0) return 0;
    overflow |= __builtin_mul_overflow(n, v, &n);
  }
  MT_CHECK(!overflow, "Shape: expected at most 2^63 - 1 elements, got the sizes ", *this);
  return n;
}

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  out << '(';
  for (int i = 0; i < s.size(); ++i) out << (i ? ", " : "") << s[i];
  return out << (s.size() == 1 ? ",)" : ")");
}

Shape contiguous_strides(const Shape& sizes) {
  Shape strides = sizes;
  std::int64_t step = 1;
  for (int i = sizes.size() - 1; i >= 0; --i) {
    strides[i] = step;
    const bool overflow = __builtin_mul_overflow(step, std::max<std::int64_t>(sizes[i], 1), &step);
    MT_CHECK(!overflow || i == 0, "Shape: the strides of the sizes ", sizes, " pass 2^63 - 1");
  }
  return strides;
}

Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b) {
  const Shape& longer = a.size() >= b.size() ? a : b;
  const Shape& shorter = a.size() >= b.size() ? b : a;
  Shape out = longer;
  const int lead = longer.size() - shorter.size();
  for (int i = 0; i < shorter.size(); ++i) {
    const std::int64_t p = longer[lead + i], q = shorter[i];
    MT_CHECK(p == q || p == 1 || q == 1, op, ": shapes ", a, " and ", b, " do not broadcast");
    out[lead + i] = p == 1 ? q : p;
  }
  return out;
}

int normalize_dim(const char* op, std::int64_t dim, int ndim) {
  const int range = std::max(ndim, 1);
  MT_CHECK(dim >= -range && dim < range, op, ": expected a dimension in [", -range, ", ", range - 1,
           "], got ", dim);
  return static_cast<int>(dim < 0 ? dim + range : dim);
}

// Walks both size lists from the last dimension. A run of source dimensions that is contiguous in
// itself ("chunk") can be cut into any target sizes with the same product.
bool reshape_strides(const Shape& sizes, const Shape& strides, const Shape& target, Shape& out) {
  const std::int64_t n = sizes.numel();
  MT_CHECK(target.numel() == n, "reshape: expected a shape of ", n, " elements, got ", target);
  if (sizes == target) {
    out = strides;
    return true;
  }
  if (n == 0 || sizes.empty()) {
    out = contiguous_strides(target);
    return true;
  }
  Shape result = target;
  int t = target.size() - 1;
  std::int64_t base = strides.back();  // stride of the chunk's last element
  std::int64_t chunk = 1, cut = 1;     // elements of the chunk, and of the target within it
  for (int s = sizes.size() - 1; s >= 0; --s) {
    chunk *= sizes[s];
    const bool ends = s == 0 || (sizes[s - 1] != 1 && strides[s - 1] != chunk * base);
    if (!ends) continue;
    while (t >= 0 && (cut < chunk || target[t] == 1)) {
      result[t] = cut * base;
      cut *= target[t];
      --t;
    }
    if (cut != chunk) return false;
    if (s > 0) {
      base = strides[s - 1];
      chunk = cut = 1;
    }
  }
  if (t != -1) return false;
  out = result;
  return true;
}

}  // namespace mixtape
