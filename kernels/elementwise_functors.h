// The formulas of every elementwise op and of its derivative, written once.
//
// Each is a template over T: float, double, int64 (where kIntegral), the CPU backend's SIMD packet,
// and Tensor. The Tensor instance of a derivative is what create_graph records, so a formula
// written here has derivatives of any order. Formulas use only + - * /, numbers, and the functions
// of mixtape::math, which each T provides: exp log sqrt tanh erf abs pow select(mask, a, b) and the
// comparisons gt ge lt le eq ne (a mask: bool, a packet mask, a bool Tensor), maximum, minimum.
//
// To add an op: a functor here, a line in elementwise.def, a row in tests/op_cases.cpp.
#pragma once

#include <cmath>
#include <cstdint>

#include "engine/half.h"

namespace mixtape::math {

// Scalars. Packets (kernels/cpu/packet.h) and Tensor (ops/elementwise.cpp) overload the same names.
#define MT_MATH      \
  template <class T> \
  requires(std::is_arithmetic_v<T>) MT_HOST_DEVICE inline
MT_MATH
T exp(T x) { return std::exp(x); }
MT_MATH
T log(T x) { return std::log(x); }
MT_MATH
T sqrt(T x) { return std::sqrt(x); }
MT_MATH
T tanh(T x) { return std::tanh(x); }
MT_MATH
T erf(T x) { return std::erf(x); }
MT_MATH
T abs(T x) { return x < T(0) ? -x : x == T(0) ? T(0) : x; }
MT_MATH
T pow(T x, T y) { return std::pow(x, y); }
MT_MATH
bool gt(T a, T b) { return a > b; }
MT_MATH
bool ge(T a, T b) { return a >= b; }
MT_MATH
bool lt(T a, T b) { return a < b; }
MT_MATH
bool le(T a, T b) { return a <= b; }
MT_MATH
bool eq(T a, T b) { return a == b; }
MT_MATH
bool ne(T a, T b) { return a != b; }
MT_MATH
T select(bool mask, T a, T b) { return mask ? a : b; }
MT_MATH
T constant(T /*like*/, double value) { return static_cast<T>(value); }
/// NaN in either operand gives NaN.
MT_MATH
T maximum(T a, T b) { return a != a || a > b ? a : b != b ? b : a == b ? a : b; }
MT_MATH
T minimum(T a, T b) { return a != a || a < b ? a : b != b ? b : a == b ? a : b; }
#undef MT_MATH

}  // namespace mixtape::math

namespace mixtape::functors {

/// What a unary derivative reads besides dy.
enum class Reads : std::uint8_t { nothing, input, output };

#define MT_F         \
  template <class T> \
  MT_HOST_DEVICE

// ---- unary: value(x) and derivative(dy, saved) = dy * f'(x)
// --------------------------------------

struct Neg {
  static constexpr Reads kReads = Reads::nothing;
  static constexpr bool kIntegral = true, kFull = false;  // kFull: fp32 under autocast
  MT_F
  static T value(T x) { return -x; }
  MT_F
  static T derivative(T dy, T) { return -dy; }
};
struct Abs {  // derivative at 0 is 0
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kIntegral = true, kFull = false;
  MT_F
  static T value(T x) { return math::abs(x); }
  MT_F
  static T derivative(T dy, T x) {
    const T zero = math::constant(x, 0.0);
    return math::select(math::gt(x, zero), dy, math::select(math::lt(x, zero), -dy, zero));
  }
};
struct Exp {
  static constexpr Reads kReads = Reads::output;
  static constexpr bool kIntegral = false, kFull = true;
  MT_F
  static T value(T x) { return math::exp(x); }
  MT_F
  static T derivative(T dy, T y) { return dy * y; }
};
struct Log {
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kIntegral = false, kFull = true;
  MT_F
  static T value(T x) { return math::log(x); }
  MT_F
  static T derivative(T dy, T x) { return dy / x; }
};
struct Sqrt {
  static constexpr Reads kReads = Reads::output;
  static constexpr bool kIntegral = false, kFull = false;
  MT_F
  static T value(T x) { return math::sqrt(x); }
  MT_F
  static T derivative(T dy, T y) { return dy / (y + y); }
};
struct Relu {  // derivative at 0 is 0, at NaN 1
  static constexpr Reads kReads = Reads::output;
  static constexpr bool kIntegral = true, kFull = false;
  MT_F
  static T value(T x) {  // NaN stays NaN
    const T zero = math::constant(x, 0.0);
    return math::select(math::le(x, zero), zero, x);
  }
  MT_F
  static T derivative(T dy, T y) {
    const T zero = math::constant(y, 0.0);
    return math::select(math::le(y, zero), zero, dy);
  }
};
/// Exact GELU, x * Phi(x) (Hendrycks and Gimpel 2016).
struct Gelu {
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kIntegral = false, kFull = false;
  MT_F
  static T value(T x) {
    return x * (math::erf(x * math::constant(x, 0.70710678118654752440)) + math::constant(x, 1.0)) *
           math::constant(x, 0.5);
  }
  MT_F
  static T derivative(T dy, T x) {
    const T half = math::constant(x, 0.5);
    const T cdf = half + half * math::erf(x * math::constant(x, 0.70710678118654752440));
    const T pdf =
        math::exp(x * x * math::constant(x, -0.5)) * math::constant(x, 0.39894228040143267794);
    return dy * (cdf + x * pdf);
  }
};
/// GELU's tanh form, as GPT-2 and cuBLASLt's epilogue compute it.
struct GeluTanh {
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kIntegral = false, kFull = false;
  MT_F
  static T inner(T x) {  // tanh(sqrt(2/pi) (x + 0.044715 x^3))
    const T x2 = x * x;
    return math::tanh(math::constant(x, 0.79788456080286535588) * x *
                      (math::constant(x, 1.0) + math::constant(x, 0.044715) * x2));
  }
  MT_F
  static T value(T x) { return math::constant(x, 0.5) * x * (math::constant(x, 1.0) + inner(x)); }
  MT_F
  static T derivative(T dy, T x) {
    const T one = math::constant(x, 1.0), half = math::constant(x, 0.5);
    const T t = inner(x);
    const T slope =
        math::constant(x, 0.79788456080286535588) * (one + math::constant(x, 3 * 0.044715) * x * x);
    return dy * (half * (one + t) + half * x * (one - t * t) * slope);
  }
};
struct Sigmoid {
  static constexpr Reads kReads = Reads::output;
  static constexpr bool kIntegral = false, kFull = false;
  MT_F
  static T value(T x) {
    const T one = math::constant(x, 1.0);
    return one / (one + math::exp(-x));
  }
  MT_F
  static T derivative(T dy, T y) { return dy * y * (math::constant(y, 1.0) - y); }
};
/// x * sigmoid(x), also called swish.
struct Silu {
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kIntegral = false, kFull = false;
  MT_F
  static T value(T x) { return x * Sigmoid::value(x); }
  MT_F
  static T derivative(T dy, T x) {
    const T one = math::constant(x, 1.0), s = Sigmoid::value(x);
    return dy * s * (one + x * (one - s));
  }
};
struct Tanh {
  static constexpr Reads kReads = Reads::output;
  static constexpr bool kIntegral = false, kFull = false;
  MT_F
  static T value(T x) { return math::tanh(x); }
  MT_F
  static T derivative(T dy, T y) { return dy * (math::constant(y, 1.0) - y * y); }
};

struct Erf {
  static constexpr Reads kReads = Reads::input;
  static constexpr bool kIntegral = false, kFull = false;
  MT_F
  static T value(T x) { return math::erf(x); }
  MT_F
  static T derivative(T dy, T x) {
    return dy * math::constant(x, 1.12837916709551257390) * math::exp(-(x * x));
  }
};

// ---- binary: value(a, b), derivative_a(dy, a, b), derivative_b(dy, a, b)
// --------------------------- kNeeds: what the derivatives read besides dy: bit 0 derivative_a
// reads a, bit 1 it reads b, bit 2 derivative_b reads a, bit 3 it reads b.

/// Shared by comparisons: output b8, no derivative.
struct Comparison {
  static constexpr bool kIntegral = true, kFull = false, kComparison = true;
  static constexpr unsigned kNeeds = 0;
};
struct Arithmetic {
  static constexpr bool kIntegral = true, kFull = false, kComparison = false;
};

struct Add : Arithmetic {
  static constexpr unsigned kNeeds = 0;
  MT_F
  static T value(T a, T b) { return a + b; }
  MT_F
  static T derivative_a(T dy, T, T) { return dy; }
  MT_F
  static T derivative_b(T dy, T, T) { return dy; }
};
struct Sub : Arithmetic {
  static constexpr unsigned kNeeds = 0;
  MT_F
  static T value(T a, T b) { return a - b; }
  MT_F
  static T derivative_a(T dy, T, T) { return dy; }
  MT_F
  static T derivative_b(T dy, T, T) { return -dy; }
};
struct Mul : Arithmetic {
  static constexpr unsigned kNeeds = 0b0110;
  MT_F
  static T value(T a, T b) { return a * b; }
  MT_F
  static T derivative_a(T dy, T, T b) { return dy * b; }
  MT_F
  static T derivative_b(T dy, T a, T) { return dy * a; }
};
struct Div {  // true division: integers are divided as floats
  static constexpr bool kIntegral = false, kFull = false, kComparison = false;
  static constexpr unsigned kNeeds = 0b1110;
  MT_F
  static T value(T a, T b) { return a / b; }
  MT_F
  static T derivative_a(T dy, T, T b) { return dy / b; }
  MT_F
  static T derivative_b(T dy, T a, T b) { return -(dy * (a / b)) / b; }
};
struct Pow {  // d/da = b a^(b-1), 0 where b = 0; d/db = a^b log a, 0 where a = 0
  static constexpr bool kIntegral = false, kFull = true, kComparison = false;
  static constexpr unsigned kNeeds = 0b1111;
  MT_F
  static T value(T a, T b) { return math::pow(a, b); }
  MT_F
  static T derivative_a(T dy, T a, T b) {
    const T zero = math::constant(b, 0.0);
    return math::select(math::eq(b, zero), zero, dy * b * math::pow(a, b - math::constant(b, 1.0)));
  }
  MT_F
  static T derivative_b(T dy, T a, T b) {
    const T zero = math::constant(a, 0.0), one = math::constant(a, 1.0);
    const auto is_zero = math::eq(a, zero);
    return math::select(is_zero, zero,
                        dy * math::pow(a, b) * math::log(math::select(is_zero, one, a)));
  }
};
struct Maximum : Arithmetic {  // a tie gives half of dy to each, a NaN all of it to both
  static constexpr unsigned kNeeds = 0b1111;
  MT_F
  static T value(T a, T b) { return math::maximum(a, b); }
  MT_F
  static T derivative_a(T dy, T a, T b) {
    const T zero = math::constant(a, 0.0);
    return math::select(math::lt(a, b), zero,
                        math::select(math::eq(a, b), dy * math::constant(a, 0.5), dy));
  }
  MT_F
  static T derivative_b(T dy, T a, T b) { return derivative_a(dy, b, a); }
};
struct Minimum : Arithmetic {
  static constexpr unsigned kNeeds = 0b1111;
  MT_F
  static T value(T a, T b) { return math::minimum(a, b); }
  MT_F
  static T derivative_a(T dy, T a, T b) { return Maximum::derivative_a(dy, b, a); }
  MT_F
  static T derivative_b(T dy, T a, T b) { return Maximum::derivative_a(dy, a, b); }
};

#define MT_COMPARISON(Functor, relation)                                                         \
  struct Functor : Comparison {                                                                  \
    MT_F                                                                                         \
    static T value(T a, T b) {                                                                   \
      return math::select(math::relation(a, b), math::constant(a, 1.0), math::constant(a, 0.0)); \
    }                                                                                            \
  };
MT_COMPARISON(Equal, eq)
MT_COMPARISON(NotEqual, ne)
MT_COMPARISON(Less, lt)
MT_COMPARISON(LessEqual, le)
MT_COMPARISON(Greater, gt)
MT_COMPARISON(GreaterEqual, ge)
#undef MT_COMPARISON
#undef MT_F

}  // namespace mixtape::functors
