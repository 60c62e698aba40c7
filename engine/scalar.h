// A host number passed to an op: keeps whether it was written as an integer, a real or a bool,
// because PyTorch's promotion treats them differently (3 + int tensor stays int, 3.0 makes it
// float).
#pragma once

#include <concepts>
#include <cstdint>
#include <iosfwd>

#include "engine/dtype.h"

namespace mixtape {

class Scalar {
 public:
  Scalar() = default;
  template <std::floating_point T>
  Scalar(T v) : real_(static_cast<double>(v)), kind_(Dtype::f64) {}
  template <std::integral T>
  Scalar(T v)
      : real_(static_cast<double>(v)),
        integer_(static_cast<std::int64_t>(v)),
        kind_(std::same_as<T, bool> ? Dtype::b8 : Dtype::i64) {}

  /// f64, i64 or b8: how it was written.
  Dtype kind() const { return kind_; }
  template <class T>
  T to() const {
    return kind_ == Dtype::f64 ? static_cast<T>(real_) : static_cast<T>(integer_);
  }

 private:
  double real_ = 0;
  std::int64_t integer_ = 0;
  Dtype kind_ = Dtype::i64;
};

std::ostream& operator<<(std::ostream& out, const Scalar& s);

/// Result type of `t` with scalar `s`: t unless s is of a higher kind (bool < int < float), then
/// i64 or f32 (the default float type), as torch.result_type.
Dtype promote_scalar(Dtype t, const Scalar& s);

}  // namespace mixtape
