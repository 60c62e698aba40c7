#include "engine/scalar.h"

#include <ostream>

namespace mixtape {

std::ostream& operator<<(std::ostream& out, const Scalar& s) {
  switch (s.kind()) {
    case Dtype::f64: return out << s.to<double>();
    case Dtype::b8: return out << (s.to<bool>() ? "true" : "false");
    default: return out << s.to<std::int64_t>();
  }
}

Dtype promote_scalar(Dtype t, const Scalar& s) {
  const auto rank = [](Dtype d) { return is_floating(d) ? 2 : d == Dtype::b8 ? 0 : 1; };
  if (rank(s.kind()) <= rank(t)) return t;
  return s.kind() == Dtype::f64 ? Dtype::f32 : s.kind();
}

}  // namespace mixtape
