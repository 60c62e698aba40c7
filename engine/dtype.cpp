#include "engine/dtype.h"

#include <ostream>

namespace mixtape {

std::string_view name_of(Dtype t) {
  constexpr std::string_view kNames[kDtypeCount] = {"float32", "float16", "bfloat16", "float64",
                                                    "int64",   "int32",   "uint8",    "bool"};
  const int i = static_cast<int>(t);
  return i < kDtypeCount ? kNames[i] : "invalid";
}

std::ostream& operator<<(std::ostream& out, Dtype t) { return out << name_of(t); }

Dtype promote_types(Dtype a, Dtype b) {
  if (a == b || b == Dtype::b8) return a;
  if (a == Dtype::b8) return b;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  // Two different types of one kind: the wider holds both, except that neither 16-bit float holds
  // the other.
  if (is_low_precision(a) && is_low_precision(b)) return Dtype::f32;
  return size_of(a) > size_of(b) ? a : b;
}

double unit_roundoff(Dtype t) {
  switch (t) {
    case Dtype::f32: return 0x1p-24;
    case Dtype::f16: return 0x1p-11;
    case Dtype::bf16: return 0x1p-8;
    case Dtype::f64: return 0x1p-53;
    default: MT_THROW("unit_roundoff: expected a floating dtype, got ", t);
  }
}

}  // namespace mixtape
