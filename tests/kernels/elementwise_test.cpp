// Elementwise kernels against float64 formulas written here independently of the functors, over
// every op, layout and floating dtype; special values; in place; bit-equal runs.
#include "kernels/elementwise.h"

#include <algorithm>
#include <functional>

#include "tests/kernels/layouts.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;
using std::abs;

double gelu(double x) { return 0.5 * x * std::erfc(-x * M_SQRT1_2); }
double gelu_slope(double x) {
  return 0.5 * std::erfc(-x * M_SQRT1_2) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
}
double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double gelu_tanh_slope(double x) {
  const double t = std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }
double one(double) { return 1; }

/// f, its slope as a function of what the kernel is given (`by_output`: f's output), and the size
/// of the terms that cancel in each, for tolerances.
struct UnaryCase {
  UnaryOp op;
  const char* name;
  double (*f)(double);
  double (*slope)(double);
  bool by_output, positive;
  double (*term)(double);  // of f beyond |f|
  double (*slope_term)(double);
};
const UnaryCase kUnaryCases[] = {
    {UnaryOp::neg, "neg", [](double x) { return -x; }, [](double) { return -1.0; }, false, false,
     nullptr, nullptr},
    {UnaryOp::abs, "abs", [](double x) { return std::fabs(x); },
     [](double x) { return x > 0   ? 1.0
                           : x < 0 ? -1.0
                                   : 0.0; }, false, false, nullptr, nullptr},
    {UnaryOp::exp, "exp", [](double x) { return std::exp(x); }, [](double y) { return y; }, true,
     false, nullptr, nullptr},
    {UnaryOp::log, "log", [](double x) { return std::log(x); }, [](double x) { return 1 / x; },
     false, true, nullptr, nullptr},
    {UnaryOp::sqrt, "sqrt", [](double x) { return std::sqrt(x); },
     [](double y) { return 1 / (2 * y); }, true, true, nullptr, nullptr},
    {UnaryOp::relu, "relu", [](double x) { return x > 0 ? x : 0.0; },
     [](double y) { return y > 0 ? 1.0 : 0.0; }, true, false, nullptr, nullptr},
    {UnaryOp::gelu, "gelu", gelu, gelu_slope, false, false, [](double x) { return abs(x); },
     [](double x) { return 1 + x * x; }},
    {UnaryOp::gelu_tanh, "gelu_tanh", gelu_tanh, gelu_tanh_slope, false, false,
     [](double x) { return abs(x); }, [](double x) { return 1 + x * x * (1 + x * x); }},
    {UnaryOp::silu, "silu", [](double x) { return x * sigmoid(x); }, silu_slope, false, false,
     nullptr, [](double x) { return 1 + abs(x); }},
    {UnaryOp::sigmoid, "sigmoid", sigmoid, [](double y) { return y * (1 - y); }, true, false,
     nullptr, one},
    {UnaryOp::tanh, "tanh", [](double x) { return std::tanh(x); },
     [](double y) { return 1 - y * y; }, true, false, nullptr, one},
    {UnaryOp::erf, "erf", [](double x) { return std::erf(x); },
     [](double x) { return 2 / std::sqrt(M_PI) * std::exp(-x * x); }, false, false, nullptr,
     [](double x) { return (1 + x * x) * std::exp(-x * x); }},
};
constexpr int kUnaryCount = 0
#define MT_UNARY(function, Functor) +1
#include "kernels/elementwise.def"
    ;
static_assert(std::size(kUnaryCases) == kUnaryCount, "an op of elementwise.def has no case here");

/// f and both partial derivatives; comparisons have none.
struct BinaryCase {
  BinaryOp op;
  const char* name;
  double (*f)(double, double);
  double (*da)(double, double);
  double (*db)(double, double);
  bool positive = false;
};
const BinaryCase kBinaryCases[] = {
    {BinaryOp::add, "add", [](double a, double b) { return a + b; },
     [](double, double) { return 1.0; }, [](double, double) { return 1.0; }},
    {BinaryOp::sub, "sub", [](double a, double b) { return a - b; },
     [](double, double) { return 1.0; }, [](double, double) { return -1.0; }},
    {BinaryOp::mul, "mul", [](double a, double b) { return a * b; },
     [](double, double b) { return b; }, [](double a, double) { return a; }},
    {BinaryOp::div, "div", [](double a, double b) { return a / b; },
     [](double, double b) { return 1 / b; }, [](double a, double b) { return -a / (b * b); }},
    {BinaryOp::pow, "pow", [](double a, double b) { return std::pow(a, b); },
     [](double a, double b) { return b * std::pow(a, b - 1); },
     [](double a, double b) { return std::pow(a, b) * std::log(a); }, true},
    {BinaryOp::maximum, "maximum", [](double a, double b) { return std::max(a, b); },
     [](double a, double b) { return a > b    ? 1.0
                                     : a == b ? 0.5
                                              : 0.0; },
     [](double a, double b) { return b > a    ? 1.0
                                     : a == b ? 0.5
                                              : 0.0; }},
    {BinaryOp::minimum, "minimum", [](double a, double b) { return std::min(a, b); },
     [](double a, double b) { return a < b    ? 1.0
                                     : a == b ? 0.5
                                              : 0.0; },
     [](double a, double b) { return b < a    ? 1.0
                                     : a == b ? 0.5
                                              : 0.0; }},
    {BinaryOp::eq, "eq", [](double a, double b) { return double(a == b); }, nullptr, nullptr},
    {BinaryOp::ne, "ne", [](double a, double b) { return double(a != b); }, nullptr, nullptr},
    {BinaryOp::lt, "lt", [](double a, double b) { return double(a < b); }, nullptr, nullptr},
    {BinaryOp::le, "le", [](double a, double b) { return double(a <= b); }, nullptr, nullptr},
    {BinaryOp::gt, "gt", [](double a, double b) { return double(a > b); }, nullptr, nullptr},
    {BinaryOp::ge, "ge", [](double a, double b) { return double(a >= b); }, nullptr, nullptr},
};
constexpr int kBinaryCount = 0
#define MT_BINARY(function, Functor) +1
#include "kernels/elementwise.def"
    ;
static_assert(std::size(kBinaryCases) == kBinaryCount, "an op of elementwise.def has no case here");

/// Smallest positive number of the type: rounding below it is absolute.
double smallest(Dtype t) {
  switch (t) {
    case Dtype::f16: return 0x1p-24;
    case Dtype::f64: return 0x1p-1074;
    case Dtype::bf16: return 0x1p-133;
    default: return 0x1p-149;
  }
}

/// x, or the infinity that it becomes in `dtype`.
double in_range(Dtype dtype, double x) {
  const double stored = rounded(dtype, x);
  return std::isinf(stored) ? stored : x;
}

class Elementwise : public ::testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Stream stream() const { return Stream::current(device()); }

  /// Random values of the dtype; positive ones in [0.05, 3) where asked. Some are exact ties.
  Values inputs(Dtype dtype, const Shape& sizes, unsigned seed, bool positive) const {
    Values v = normals(dtype, sizes.numel(), seed, 2.0);
    for (std::size_t i = 0; i < v.size(); ++i) {
      if (i % 7 == 3) v[i] = 1;
      if (positive) v[i] = rounded(dtype, 0.05 + std::fmod(std::fabs(v[i]), 2.9));
    }
    return v;
  }
};

TEST_P(Elementwise, UnaryMatchesReferenceOnEveryLayoutAndDtype) {
  for (const UnaryCase& c : kUnaryCases) {
    for (Dtype x_dtype : kFloatingDtypes) {
      const Dtype out_dtype = x_dtype == Dtype::f16 ? Dtype::f32 : x_dtype;
      for (const Layout& l : layouts()) {
        SCOPED_TRACE(std::string(c.name) + " " + l.name + " " + std::string(name_of(x_dtype)));
        Buffer x(device(), x_dtype, l.a_sizes, l.a_strides,
                 inputs(x_dtype, l.a_sizes, 1, c.positive));
        Buffer out(device(), out_dtype, l.sizes, l.out_strides);
        const Dtype compute = compute_dtype(x_dtype);
        unary(stream(), c.op, compute, out.view(), x.view());
        const Values given = broadcast(x.get(), l.a_sizes, l.sizes);
        Values want, bound;
        for (double v : given) {
          want.push_back(c.f(v));
          const double term = abs(want.back()) + (c.term ? c.term(v) : 0);
          bound.push_back(unit_roundoff(out_dtype) * abs(want.back()) +
                          4 * unit_roundoff(compute) * term + smallest(out_dtype));
        }
        expect_close(out.get(), want, bound);
        out.check_guards();
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Elementwise, UnaryBackwardMatchesReference) {
  for (const UnaryCase& c : kUnaryCases) {
    for (Dtype dtype : kFloatingDtypes) {
      const Dtype saved_dtype = dtype == Dtype::bf16 ? Dtype::f32 : dtype;
      for (const Layout& l : layouts()) {
        SCOPED_TRACE(std::string(c.name) + " " + l.name + " " + std::string(name_of(dtype)));
        Values x = inputs(saved_dtype, l.b_sizes, 2, c.positive);
        if (c.by_output)
          for (double& v : x) v = rounded(saved_dtype, c.f(v));
        Buffer saved(device(), saved_dtype, l.b_sizes, l.b_strides, x);
        Buffer dy(device(), dtype, l.a_sizes, l.a_strides, inputs(dtype, l.a_sizes, 3, false));
        Buffer dx(device(), dtype, l.sizes, l.out_strides);
        unary_backward(stream(), c.op, dx.view(), dy.view(), saved.view());
        const Values s = broadcast(saved.get(), l.b_sizes, l.sizes);
        const Values d = broadcast(dy.get(), l.a_sizes, l.sizes);
        Values want, bound;
        for (std::size_t i = 0; i < s.size(); ++i) {
          want.push_back(d[i] * c.slope(s[i]));
          const double term = abs(want[i]) + abs(d[i]) * (c.slope_term ? c.slope_term(s[i]) : 0);
          bound.push_back(unit_roundoff(dtype) * abs(want[i]) + 8 * compute_roundoff(dtype) * term +
                          smallest(dtype));
        }
        expect_close(dx.get(), want, bound);
        dx.check_guards();
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Elementwise, BinaryMatchesReferenceOnEveryLayoutAndDtype) {
  for (const BinaryCase& c : kBinaryCases) {
    for (Dtype a_dtype : kFloatingDtypes) {
      for (Dtype b_dtype : {a_dtype, Dtype::f32}) {
        const bool comparison = c.da == nullptr;
        const Dtype wide = promote_types(a_dtype, b_dtype);
        const Dtype out_dtype = comparison ? Dtype::b8 : wide;
        const Dtype compute = compute_dtype(wide);
        for (const Layout& l : layouts()) {
          SCOPED_TRACE(std::string(c.name) + " " + l.name + " " + std::string(name_of(a_dtype)));
          Buffer a(device(), a_dtype, l.a_sizes, l.a_strides,
                   inputs(a_dtype, l.a_sizes, 4, c.positive));
          Buffer b(device(), b_dtype, l.b_sizes, l.b_strides,
                   inputs(b_dtype, l.b_sizes, 5, c.op == BinaryOp::div));
          Buffer out(device(), out_dtype, l.sizes, l.out_strides);
          binary(stream(), c.op, compute, out.view(), a.view(), b.view());
          const Values x = broadcast(a.get(), l.a_sizes, l.sizes);
          const Values y = broadcast(b.get(), l.b_sizes, l.sizes);
          Values want, bound;
          for (std::size_t i = 0; i < x.size(); ++i) {
            want.push_back(in_range(wide, c.f(x[i], y[i])));
            bound.push_back(comparison ? 0
                                       : (unit_roundoff(wide) + 2 * unit_roundoff(compute)) *
                                                 abs(want[i]) +
                                             smallest(wide));
          }
          expect_close(out.get(), want, bound);
          out.check_guards();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(Elementwise, BinaryBackwardMatchesReference) {
  for (const BinaryCase& c : kBinaryCases) {
    if (c.da == nullptr) continue;
    for (Dtype dtype : kFloatingDtypes) {
      for (const Layout& l : layouts()) {
        for (int input : {0, 1}) {
          SCOPED_TRACE(std::string(c.name) + " " + l.name + " " + std::string(name_of(dtype)));
          Buffer a(device(), dtype, l.a_sizes, l.a_strides,
                   inputs(dtype, l.a_sizes, 6, c.positive));
          Buffer b(device(), dtype, l.b_sizes, l.b_strides,
                   inputs(dtype, l.b_sizes, 7, c.op == BinaryOp::div));
          Buffer dy(device(), dtype, l.sizes, inputs(dtype, l.sizes, 8, false));
          Buffer dx(device(), dtype, l.sizes, l.out_strides);
          binary_backward(stream(), c.op, input, dx.view(), dy.view(), a.view(), b.view());
          const Values x = broadcast(a.get(), l.a_sizes, l.sizes);
          const Values y = broadcast(b.get(), l.b_sizes, l.sizes);
          const Values d = dy.get();
          Values want, bound;
          for (std::size_t i = 0; i < x.size(); ++i) {
            const double exact = d[i] * (input == 0 ? c.da : c.db)(x[i], y[i]);
            want.push_back(in_range(dtype, exact));
            // b - 1 is rounded before it is an exponent.
            const double terms = c.op == BinaryOp::pow ? 8 + abs(y[i] * std::log(x[i])) : 8;
            bound.push_back((unit_roundoff(dtype) + terms * compute_roundoff(dtype)) * abs(exact) +
                            smallest(dtype));
          }
          expect_close(dx.get(), want, bound);
          dx.check_guards();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(Elementwise, NumbersStandForOperands) {
  Buffer x(device(), Dtype::f32, {5}, Values{1, 2, 3, 4, 5});
  Buffer out(device(), Dtype::f32, {5});
  binary(stream(), BinaryOp::sub, Dtype::f32, out.view(), Scalar(10), x.view());
  expect_same(out.get(), {9, 8, 7, 6, 5});
  binary(stream(), BinaryOp::mul, Dtype::f32, out.view(), x.view(), Scalar(0.1));
  expect_same(out.get(), rounded(Dtype::f32, {0.1f * 1, 0.1f * 2, 0.1f * 3, 0.1f * 4, 0.1f * 5}));
  binary(stream(), BinaryOp::add, Dtype::f32, out.view(), Scalar(1.5), Scalar(true));
  expect_same(out.get(), {2.5, 2.5, 2.5, 2.5, 2.5});
  // Derivatives that need neither operand take none.
  binary_backward(stream(), BinaryOp::sub, 1, out.view(), x.view(), Operand(), Operand());
  expect_same(out.get(), {-1, -2, -3, -4, -5});
  binary_backward(stream(), BinaryOp::mul, 0, out.view(), x.view(), Operand(), Scalar(2));
  expect_same(out.get(), {2, 4, 6, 8, 10});
}

TEST_P(Elementwise, IntegersAreExact) {
  const double big = 9007199254740992.0;  // 2^53
  Buffer a(device(), Dtype::i64, {4}, Values{big, -7, 0, 5});
  Buffer b(device(), Dtype::i32, {4}, Values{1, 3, -2, 5});
  Buffer out(device(), Dtype::i64, {4}), flags(device(), Dtype::b8, {4});
  binary(stream(), BinaryOp::sub, Dtype::i64, out.view(), a.view(), b.view());
  expect_same(out.get(), {big - 1, -10, 2, 0});
  binary(stream(), BinaryOp::mul, Dtype::i64, out.view(), b.view(), b.view());
  expect_same(out.get(), {1, 9, 4, 25});
  binary(stream(), BinaryOp::maximum, Dtype::i64, out.view(), a.view(), b.view());
  expect_same(out.get(), {big, 3, 0, 5});
  binary(stream(), BinaryOp::eq, Dtype::i64, flags.view(), a.view(), b.view());
  expect_same(flags.get(), {0, 0, 0, 1});
  binary(stream(), BinaryOp::lt, Dtype::i64, flags.view(), a.view(), Scalar(5));
  expect_same(flags.get(), {0, 1, 1, 0});
  unary(stream(), UnaryOp::abs, Dtype::i64, out.view(), a.view());
  expect_same(out.get(), {big, 7, 0, 5});
  unary(stream(), UnaryOp::relu, Dtype::i64, out.view(), a.view());
  expect_same(out.get(), {big, 0, 0, 5});
  Buffer bytes(device(), Dtype::u8, {4}, Values{255, 3, 0, 1}),
      truth(device(), Dtype::b8, {4}, Values{1, 0, 1, 1});
  binary(stream(), BinaryOp::add, Dtype::i64, out.view(), bytes.view(), truth.view());
  expect_same(out.get(), {256, 3, 1, 2});
  Buffer quotient(device(), Dtype::f32, {4});
  binary(stream(), BinaryOp::div, Dtype::f32, quotient.view(), b.view(), Scalar(2));
  expect_same(quotient.get(), {0.5, 1.5, -1, 2.5});
}

TEST_P(Elementwise, SpecialValues) {
  const Values x = {kInfinity, -kInfinity, kNaN, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 100, -200};
  const auto n = static_cast<std::int64_t>(x.size());
  for (Dtype dtype : {Dtype::f32, Dtype::f64}) {
    SCOPED_TRACE(std::string(name_of(dtype)));
    Buffer in(device(), dtype, {n}, x), out(device(), dtype, {n});
    const auto check = [&](UnaryOp op, std::function<double(double)> f) {
      SCOPED_TRACE(static_cast<int>(op));
      unary(stream(), op, dtype, out.view(), in.view());
      Values want;
      for (double v : in.get()) want.push_back(rounded(dtype, f(v)));
      expect_close(out.get(), want, 2 * smallest(dtype), 4 * unit_roundoff(dtype));
    };
    check(UnaryOp::exp, [](double v) { return std::exp(v); });
    check(UnaryOp::log, [](double v) { return std::log(v); });
    check(UnaryOp::sqrt, [](double v) { return std::sqrt(v); });
    check(UnaryOp::tanh, [](double v) { return std::tanh(v); });
    check(UnaryOp::sigmoid, [](double v) { return sigmoid(v); });
    check(UnaryOp::abs, [](double v) { return std::fabs(v); });
    check(UnaryOp::relu, [](double v) { return std::isnan(v) ? v : v > 0 ? v : 0.0; });
  }
}

TEST_P(Elementwise, MaximumMinimumAndReluPropagateNaN) {
  Buffer a(device(), Dtype::f32, {5}, Values{kNaN, 1, kNaN, kInfinity, -kInfinity});
  Buffer b(device(), Dtype::f32, {5}, Values{1, kNaN, kNaN, 2, 2});
  Buffer out(device(), Dtype::f32, {5});
  binary(stream(), BinaryOp::maximum, Dtype::f32, out.view(), a.view(), b.view());
  expect_same(out.get(), {kNaN, kNaN, kNaN, kInfinity, 2});
  binary(stream(), BinaryOp::minimum, Dtype::f32, out.view(), a.view(), b.view());
  expect_same(out.get(), {kNaN, kNaN, kNaN, 2, -kInfinity});
  // A gradient passes through a NaN, so that a NaN on its way back is not lost there.
  Buffer dy(device(), Dtype::f32, {5}, Values{1, 2, kNaN, 4, 5});
  binary_backward(stream(), BinaryOp::maximum, 0, out.view(), dy.view(), a.view(), b.view());
  expect_same(out.get(), {1, 2, kNaN, 4, 0});
  binary_backward(stream(), BinaryOp::minimum, 1, out.view(), dy.view(), a.view(), b.view());
  expect_same(out.get(), {1, 2, kNaN, 4, 0});
  unary_backward(stream(), UnaryOp::relu, out.view(), dy.view(), a.view());
  expect_same(out.get(), {1, 2, kNaN, 4, 0});
}

TEST_P(Elementwise, PowOfSpecialBases) {
  const Values a = {0, 0, 0, -2, -2, 2, kInfinity, 1, -0.0, 4, kNaN, kNaN};
  const Values b = {0, 2, -1, 3, 0.5, -2, 0.5, kNaN, 3, 0.5, 0, 2};
  Buffer x(device(), Dtype::f32, {12}, a), y(device(), Dtype::f32, {12}, b);
  Buffer out(device(), Dtype::f32, {12});
  binary(stream(), BinaryOp::pow, Dtype::f32, out.view(), x.view(), y.view());
  Values want;
  for (std::size_t i = 0; i < a.size(); ++i) want.push_back(std::pow(a[i], b[i]));
  expect_same(out.get(), want);
  // d/da at b = 0 is 0 and d/db at a = 0 is 0, not NaN.
  Buffer dy(device(), Dtype::f32, {12}, Values(12, 1.0));
  binary_backward(stream(), BinaryOp::pow, 0, out.view(), dy.view(), x.view(), y.view());
  EXPECT_EQ(out.get()[0], 0);
  EXPECT_EQ(out.get()[1], 0);
  EXPECT_EQ(out.get()[3], 12);
  binary_backward(stream(), BinaryOp::pow, 1, out.view(), dy.view(), x.view(), y.view());
  EXPECT_EQ(out.get()[0], 0);
  EXPECT_EQ(out.get()[1], 0);
}

// Against the formulas in IEEE float, with divisors from the smallest subnormal to infinity.
TEST_P(Elementwise, DivisionGradientsOverTheWholeRange) {
  for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const bool half = dtype == Dtype::f16;
    const double least = half ? 0x1p-24 : dtype == Dtype::bf16 ? 0x1p-133 : 0x1p-149;
    const double most = half ? 65504 : 0x1.fep127;
    Values dys, as, bs;
    for (double dy : {1.0, -2.0}) {
      for (double a : {0.0, 1.0, -1.5, least, half ? 0x1p-12 : 0x1p-118, most}) {
        for (double b :
             {1.0, -3.0, 0.0, least, half ? 0x1p-14 : 0x1p-120, most / 2, most, kInfinity}) {
          dys.push_back(dy);
          as.push_back(a);
          bs.push_back(b);
        }
      }
    }
    const auto n = static_cast<std::int64_t>(dys.size());
    Buffer dy(device(), dtype, {n}, dys), a(device(), dtype, {n}, as), b(device(), dtype, {n}, bs),
        dx(device(), dtype, {n});
    for (int input : {0, 1}) {
      binary_backward(stream(), BinaryOp::div, input, dx.view(), dy.view(), a.view(), b.view());
      Values want, bound;
      for (std::size_t i = 0; i < dys.size(); ++i) {
        const float d = static_cast<float>(dys[i]), x = static_cast<float>(as[i]),
                    y = static_cast<float>(bs[i]);
        want.push_back(rounded(dtype, input == 0 ? d / y : -(d * (x / y)) / y));
        // One more rounding of the storage type, and its spacing where it underflows.
        bound.push_back(std::isfinite(want.back())
                            ? 2 * unit_roundoff(dtype) * std::fabs(want.back()) + least
                            : 0);
      }
      expect_close(dx.get(), want, bound);
      dx.check_guards();
    }
  }
}

TEST_P(Elementwise, ResultBeyondF16IsInfinity) {
  Buffer x(device(), Dtype::f16, {3}, Values{60000, -60000, 300});
  Buffer out(device(), Dtype::f16, {3});
  binary(stream(), BinaryOp::add, Dtype::f32, out.view(), x.view(), x.view());
  expect_same(out.get(), {kInfinity, -kInfinity, 600});
  // The intermediate is float: a product beyond 65504 that a division brings back stays finite.
  binary(stream(), BinaryOp::mul, Dtype::f32, out.view(), x.view(), Scalar(1.0 / 1024));
  expect_same(out.get(), rounded(Dtype::f16, {60000.0 / 1024, -60000.0 / 1024, 300.0 / 1024}));
}

TEST_P(Elementwise, WhereSelectsOnEveryLayout) {
  for (Dtype condition_dtype : {Dtype::b8, Dtype::u8}) {
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::i64, Dtype::u8}) {
      for (const Layout& l : layouts()) {
        SCOPED_TRACE(std::string(l.name) + " " + std::string(name_of(dtype)));
        Values flags = normals(Dtype::f32, l.sizes.numel(), 9);
        for (double& f : flags) f = f > 0;
        Values av = normals(Dtype::f32, l.a_sizes.numel(), 10, 50), bv = av;
        for (double& v : av) v = rounded(dtype, std::floor(std::fabs(v)));
        bv.resize(static_cast<std::size_t>(l.b_sizes.numel()), 3);
        for (double& v : bv) v = std::floor(std::fabs(v) / 2);
        Buffer condition(device(), condition_dtype, l.sizes, flags);
        Buffer a(device(), dtype, l.a_sizes, l.a_strides, av);
        Buffer b(device(), dtype, l.b_sizes, l.b_strides, bv);
        Buffer out(device(), dtype, l.sizes, l.out_strides);
        where(stream(), compute_dtype(dtype), out.view(), condition.view(), a.view(), b.view());
        const Values x = broadcast(a.get(), l.a_sizes, l.sizes);
        const Values y = broadcast(b.get(), l.b_sizes, l.sizes);
        Values want;
        for (std::size_t i = 0; i < x.size(); ++i) want.push_back(flags[i] != 0 ? x[i] : y[i]);
        expect_same(out.get(), want);
        out.check_guards();
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Elementwise, WhereTakesNumbersAndKeepsNaNOfTheOtherBranchOut) {
  Buffer condition(device(), Dtype::b8, {3}, Values{1, 0, 1});
  Buffer x(device(), Dtype::f32, {3}, Values{1, kNaN, kInfinity}), out(device(), Dtype::f32, {3});
  where(stream(), Dtype::f32, out.view(), condition.view(), x.view(), Scalar(0));
  expect_same(out.get(), {1, 0, kInfinity});
}

TEST_P(Elementwise, ClampAndItsDerivative) {
  const Values x = {-2, -1, -0.5, 0, 0.5, 1, 2, kNaN, kInfinity, -kInfinity};
  for (Dtype dtype : kFloatingDtypes) {
    Buffer in(device(), dtype, {10}, x), out(device(), dtype, {10}),
        dy(device(), dtype, {10}, Values(10, 3));
    const Dtype compute = compute_dtype(dtype);
    clamp(stream(), compute, out.view(), in.view(), -1.0, 1);
    expect_same(out.get(), {-1, -1, -0.5, 0, 0.5, 1, 1, kNaN, 1, -1});
    clamp(stream(), compute, out.view(), in.view(), -kInfinity, 0.5);
    expect_same(out.get(), {-2, -1, -0.5, 0, 0.5, 0.5, 0.5, kNaN, 0.5, -kInfinity});
    clamp(stream(), compute, out.view(), in.view(), kNaN, 1);
    expect_same(out.get(), Values(10, kNaN));
    clamp(stream(), compute, out.view(), in.view(), 0, kNaN);
    expect_same(out.get(), Values(10, kNaN));
    clamp_backward(stream(), out.view(), dy.view(), in.view(), -1, 1.0);
    expect_same(out.get(), {0, 3, 3, 3, 3, 3, 0, 0, 0, 0});
    out.check_guards();
  }
  Buffer integers(device(), Dtype::i64, {4}, Values{-5, 0, 5, 100}), out(device(), Dtype::i64, {4});
  clamp(stream(), Dtype::i64, out.view(), integers.view(), -1, 7);
  expect_same(out.get(), {-1, 0, 5, 7});
  clamp(stream(), Dtype::i64, out.view(), integers.view(), 1, kInfinity);
  expect_same(out.get(), {1, 1, 5, 100});
}

TEST_P(Elementwise, InPlace) {
  for (Dtype dtype : kFloatingDtypes) {
    const Values v = normals(dtype, 3000, 11);
    Buffer x(device(), dtype, {60, 50}, {1, 60}, v), other(device(), dtype, {60, 50}, v);
    unary(stream(), UnaryOp::neg, compute_dtype(dtype), x.view(), x.view());
    binary(stream(), BinaryOp::add, compute_dtype(dtype), x.view(), x.view(), other.view());
    expect_close(x.get(), Values(3000, 0.0), Values(3000, 0.0));
    x.check_guards();
  }
}

TEST_P(Elementwise, RunsAndThreadCountsAreBitEqual) {
  const std::int64_t n = 300'001;
  Buffer a(device(), Dtype::f32, {n}, normals(Dtype::f32, n, 12));
  Buffer b(device(), Dtype::bf16, {n}, normals(Dtype::bf16, n, 13));
  Values first;
  for_thread_counts([&](int) {
    Buffer y(device(), Dtype::f32, {n}), z(device(), Dtype::f16, {n});
    unary(stream(), UnaryOp::gelu, Dtype::f32, y.view(), a.view());
    binary(stream(), BinaryOp::mul, Dtype::f32, z.view(), y.view(), b.view());
    y.check_guards();
    z.check_guards();
    Values got = y.get();
    const Values second = z.get();
    got.insert(got.end(), second.begin(), second.end());
    if (first.empty()) first = got;
    expect_same(got, first);
  });
}

TEST_P(Elementwise, WrongCallsThrow) {
  Buffer x(device(), Dtype::f32, {2, 3}), y(device(), Dtype::f32, {2, 4});
  Buffer integers(device(), Dtype::i64, {2, 3});
  EXPECT_THROW(binary(stream(), BinaryOp::add, Dtype::f32, x.view(), x.view(), y.view()), Error);
  EXPECT_THROW(unary(stream(), UnaryOp::exp, Dtype::i64, integers.view(), integers.view()), Error);
  EXPECT_THROW(binary_backward(stream(), BinaryOp::lt, 0, x.view(), x.view(), x.view(), x.view()),
               Error);
}

INSTANTIATE_TEST_SUITE_P(Devices, Elementwise, ::testing::ValuesIn(test_devices()),
                         [](const auto& info) { return device_name(info.param); });

}  // namespace
}  // namespace mixtape::testing
