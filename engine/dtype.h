// Element types, their C++ storage types, and PyTorch's promotion lattice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string_view>
#include <type_traits>

#include "engine/check.h"
#include "engine/half.h"

namespace mixtape {

enum class Dtype : std::uint8_t { f32, f16, bf16, f64, i64, i32, u8, b8 };

inline constexpr int kDtypeCount = 8;

constexpr std::size_t size_of(Dtype t) {
  constexpr std::size_t kSizes[kDtypeCount] = {4, 2, 2, 8, 8, 4, 1, 1};
  return kSizes[static_cast<int>(t)];
}
constexpr bool is_floating(Dtype t) { return static_cast<int>(t) <= static_cast<int>(Dtype::f64); }
constexpr bool is_low_precision(Dtype t) { return t == Dtype::f16 || t == Dtype::bf16; }
constexpr bool is_integral(Dtype t) { return !is_floating(t) && t != Dtype::b8; }

/// "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8" or "bool".
std::string_view name_of(Dtype t);
std::ostream& operator<<(std::ostream& out, Dtype t);

/// The type that a and b meet in when both are tensors of one or more dimensions
/// (torch.promote_types): f16 with bf16 gives f32, u8 with i32 gives i32, bool with anything gives
/// the other.
Dtype promote_types(Dtype a, Dtype b);

/// Arithmetic type of a storage type: f64 computes in double, other floats in float.
constexpr Dtype compute_dtype(Dtype t) {
  return is_floating(t) ? (t == Dtype::f64 ? Dtype::f64 : Dtype::f32) : Dtype::i64;
}

/// Unit roundoff of a floating type (2^-24 for f32, 2^-11 for f16, 2^-8 for bf16, 2^-53 for f64).
double unit_roundoff(Dtype t);

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::f32;
};
template <>
struct DtypeOf<Half> {
  static constexpr Dtype value = Dtype::f16;
};
template <>
struct DtypeOf<BFloat16> {
  static constexpr Dtype value = Dtype::bf16;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::f64;
};
template <>
struct DtypeOf<std::int64_t> {
  static constexpr Dtype value = Dtype::i64;
};
template <>
struct DtypeOf<std::int32_t> {
  static constexpr Dtype value = Dtype::i32;
};
template <>
struct DtypeOf<std::uint8_t> {
  static constexpr Dtype value = Dtype::u8;
};
template <>
struct DtypeOf<bool> {
  static constexpr Dtype value = Dtype::b8;
};
template <class T>
inline constexpr Dtype dtype_of = DtypeOf<std::remove_cv_t<T>>::value;

template <class T>
struct TypeTag {
  using type = T;
};

/// Calls f(TypeTag<T>{}) with the storage type of t.
template <class F>
decltype(auto) dispatch_dtype(Dtype t, F&& f) {
  switch (t) {
    case Dtype::f32: return f(TypeTag<float>{});
    case Dtype::f16: return f(TypeTag<Half>{});
    case Dtype::bf16: return f(TypeTag<BFloat16>{});
    case Dtype::f64: return f(TypeTag<double>{});
    case Dtype::i64: return f(TypeTag<std::int64_t>{});
    case Dtype::i32: return f(TypeTag<std::int32_t>{});
    case Dtype::u8: return f(TypeTag<std::uint8_t>{});
    case Dtype::b8: return f(TypeTag<bool>{});
  }
  MT_THROW("dispatch_dtype: invalid dtype ", static_cast<int>(t));
}

/// As dispatch_dtype, for the four floating types; throws "op: expected a floating dtype, got ...".
template <class F>
decltype(auto) dispatch_floating(const char* op, Dtype t, F&& f) {
  switch (t) {
    case Dtype::f32: return f(TypeTag<float>{});
    case Dtype::f16: return f(TypeTag<Half>{});
    case Dtype::bf16: return f(TypeTag<BFloat16>{});
    case Dtype::f64: return f(TypeTag<double>{});
    default: MT_THROW(op, ": expected a floating dtype, got ", name_of(t));
  }
}

/// Arithmetic type: float for float, Half and BFloat16; double for double; int64 for the rest.
template <class T>
using compute_t =
    std::conditional_t<std::is_same_v<T, double>, double,
                       std::conditional_t<std::is_same_v<T, float> || std::is_same_v<T, Half> ||
                                              std::is_same_v<T, BFloat16>,
                                          float, std::int64_t>>;

}  // namespace mixtape
