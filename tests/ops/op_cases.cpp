// The table of ops: for every line of ops.def, inputs and a float64 reference. Each row is run in
// all modes of op_harness_test.cpp. To add an op, specialise add_cases for it here.
#include "tests/ops/op_case.h"

#include <algorithm>
#include <limits>

#include "engine/generator.h"
#include "ops/ops.h"

namespace mixtape::testing {

using List = std::vector<OpCase>;
using Args = std::vector<Tensor>;
using Scalar1 = std::function<double(double)>;
using Scalar2 = std::function<double(double, double)>;
using UnaryFunction = Tensor (*)(const Tensor&);
using BinaryFunction = Tensor (*)(const Tensor&, const Tensor&);
using Shapes = std::vector<std::pair<Shape, Shape>>;

const std::vector<Shape> kShapes = {{}, {1}, {0, 3}, {7}, {3, 5}, {2, 1, 17}, {2, 3, 4, 5}, {1031}};

void unary(List& list, const char* name, UnaryFunction f, const Scalar1& reference, Arg::Kind kind,
           double lo = -2, double hi = 2, Cast cast = Cast::keep) {
  for (const Shape& s : kShapes) {
    list.push_back({.op = name,
                    .variant = detail::concat(s),
                    .args = {{s, kind, lo, hi, 0, true}},
                    .run = [f](const Args& x) { return f(x[0]); },
                    .reference = [reference](const Arrays& x) { return map(x[0], reference); },
                    .cast = cast,
                    .ulps = 16});
  }
}

const Shapes kPairs = {{{}, {}},  {{3, 5}, {3, 5}}, {{3, 5}, {5}}, {{4, 1, 3}, {2, 1}},
                       {{7}, {}}, {{1}, {2, 3}},    {{0, 4}, {4}}, {{33, 31}, {33, 1}}};

void binary(List& list, const char* name, BinaryFunction f, const Scalar2& reference,
            Arg::Kind kind, double lo = -2, double hi = 2, bool differentiable = true,
            Cast cast = Cast::widest) {
  for (const auto& [a, b] : kPairs) {
    list.push_back(
        {.op = name,
         .variant = detail::concat(a, "x", b),
         .args = {{a, kind, lo, hi, 0, differentiable}, {b, kind, lo, hi, 0, differentiable}},
         .run = [f](const Args& x) { return f(x[0], x[1]); },
         .reference = [reference](const Arrays& x) { return zip(x[0], x[1], reference); },
         .cast = cast,
         .length = 64,
         .differentiable = differentiable,
         .ulps = 16});
  }
}

constexpr double kSqrtHalf = 0.70710678118654752440, kPi = 3.14159265358979323846;
double gelu_exact(double x) { return 0.5 * x * (1 + std::erf(x * kSqrtHalf)); }
double gelu_by_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x)));
}

const auto kReal = Arg::Kind::real;
const auto kApart = Arg::Kind::apart;

// ---- elementwise
// -----------------------------------------------------------------------------------

template <>
void add_cases<OpId::neg>(List& list) {
  unary(
      list, "neg", neg, [](double x) { return -x; }, kReal);
}
template <>
void add_cases<OpId::abs>(List& list) {
  unary(
      list, "abs", abs, [](double x) { return std::fabs(x); }, kApart);
}
template <>
void add_cases<OpId::exp>(List& list) {
  unary(
      list, "exp", exp, [](double x) { return std::exp(x); }, kReal, -3, 3, Cast::full);
}
template <>
void add_cases<OpId::log>(List& list) {
  unary(
      list, "log", log, [](double x) { return std::log(x); }, kReal, 0.2, 4, Cast::full);
}
template <>
void add_cases<OpId::sqrt>(List& list) {
  unary(
      list, "sqrt", sqrt, [](double x) { return std::sqrt(x); }, kReal, 0.2, 4);
}
template <>
void add_cases<OpId::relu>(List& list) {
  unary(
      list, "relu", relu, [](double x) { return std::max(x, 0.0); }, kApart);
}
template <>
void add_cases<OpId::gelu>(List& list) {
  unary(list, "gelu", gelu, gelu_exact, kReal, -3, 3);
}
template <>
void add_cases<OpId::gelu_tanh>(List& list) {
  unary(list, "gelu_tanh", gelu_tanh, gelu_by_tanh, kReal, -3, 3);
}
template <>
void add_cases<OpId::silu>(List& list) {
  unary(
      list, "silu", silu, [](double x) { return x / (1 + std::exp(-x)); }, kReal, -3, 3);
}
template <>
void add_cases<OpId::sigmoid>(List& list) {
  unary(
      list, "sigmoid", sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, kReal, -3, 3);
}
template <>
void add_cases<OpId::tanh>(List& list) {
  unary(
      list, "tanh", tanh, [](double x) { return std::tanh(x); }, kReal, -3, 3);
}
template <>
void add_cases<OpId::erf>(List& list) {
  unary(
      list, "erf", erf, [](double x) { return std::erf(x); }, kReal, -3, 3);
}

template <>
void add_cases<OpId::add>(List& list) {
  binary(
      list, "add", add, [](double a, double b) { return a + b; }, kReal);
  list.push_back(
      {.op = "add",
       .variant = "number",
       .args = {Arg::real({3, 5})},
       .run = [](const Args& x) { return 2.5 + x[0]; },
       .reference = [](const Arrays& x) { return map(x[0], [](double v) { return 2.5 + v; }); },
       .cast = Cast::widest});
}
template <>
void add_cases<OpId::sub>(List& list) {
  binary(
      list, "sub", sub, [](double a, double b) { return a - b; }, kReal);
  list.push_back(
      {.op = "sub",
       .variant = "number",
       .args = {Arg::real({3, 5})},
       .run = [](const Args& x) { return 2.5 - x[0]; },
       .reference = [](const Arrays& x) { return map(x[0], [](double v) { return 2.5 - v; }); },
       .cast = Cast::widest});
}
template <>
void add_cases<OpId::mul>(List& list) {
  binary(
      list, "mul", mul, [](double a, double b) { return a * b; }, kReal);
  list.push_back(
      {.op = "mul",
       .variant = "number",
       .args = {Arg::real({3, 5})},
       .run = [](const Args& x) { return x[0] * -0.75; },
       .reference = [](const Arrays& x) { return map(x[0], [](double v) { return v * -0.75; }); },
       .cast = Cast::widest});
}
template <>
void add_cases<OpId::div>(List& list) {
  binary(
      list, "div", div, [](double a, double b) { return a / b; }, kReal, 0.5, 2);
  list.push_back(
      {.op = "div",
       .variant = "number",
       .args = {Arg::real({3, 5}, 0.5, 2)},
       .run = [](const Args& x) { return 3.0 / x[0]; },
       .reference = [](const Arrays& x) { return map(x[0], [](double v) { return 3.0 / v; }); },
       .cast = Cast::widest});
}
template <>
void add_cases<OpId::pow>(List& list) {
  binary(
      list, "pow", pow, [](double a, double b) { return std::pow(a, b); }, kReal, 0.5, 2, true,
      Cast::full);
  list.push_back(
      {.op = "pow",
       .variant = "cube",
       .args = {Arg::apart({3, 5})},
       .run = [](const Args& x) { return pow(x[0], 3.0); },
       .reference = [](const Arrays& x) { return map(x[0], [](double v) { return v * v * v; }); },
       .cast = Cast::full,
       .ulps = 16});
}
template <>
void add_cases<OpId::maximum>(List& list) {
  binary(
      list, "maximum", maximum, [](double a, double b) { return std::max(a, b); }, kApart);
}
template <>
void add_cases<OpId::minimum>(List& list) {
  binary(
      list, "minimum", minimum, [](double a, double b) { return std::min(a, b); }, kApart);
}
template <>
void add_cases<OpId::eq>(List& list) {
  binary(
      list, "eq", eq, [](double a, double b) { return a == b; }, kApart, 0, 0, false);
}
template <>
void add_cases<OpId::ne>(List& list) {
  binary(
      list, "ne", ne, [](double a, double b) { return a != b; }, kApart, 0, 0, false);
}
template <>
void add_cases<OpId::lt>(List& list) {
  binary(
      list, "lt", lt, [](double a, double b) { return a < b; }, kApart, 0, 0, false);
}
template <>
void add_cases<OpId::le>(List& list) {
  binary(
      list, "le", le, [](double a, double b) { return a <= b; }, kApart, 0, 0, false);
}
template <>
void add_cases<OpId::gt>(List& list) {
  binary(
      list, "gt", gt, [](double a, double b) { return a > b; }, kApart, 0, 0, false);
}
template <>
void add_cases<OpId::ge>(List& list) {
  binary(
      list, "ge", ge, [](double a, double b) { return a >= b; }, kApart, 0, 0, false);
}

template <>
void add_cases<OpId::clamp>(List& list) {
  for (const Shape& s : kShapes) {
    list.push_back({.op = "clamp",
                    .variant = detail::concat(s),
                    .args = {Arg::apart(s)},
                    .run = [](const Args& x) { return clamp(x[0], -0.505, 1.005); },
                    .reference =
                        [](const Arrays& x) {
                          return map(x[0], [](double v) { return std::clamp(v, -0.505, 1.005); });
                        }});
  }
  list.push_back(
      {.op = "clamp",
       .variant = "one bound",
       .args = {Arg::apart({3, 5})},
       .run = [](const Args& x) { return clamp(x[0], {}, 0.255); },
       .reference =
           [](const Arrays& x) { return map(x[0], [](double v) { return std::min(v, 0.255); }); }});
}
template <>
void add_cases<OpId::where>(List& list) {
  list.push_back({.op = "where",
                  .variant = "same",
                  .args = {Arg::boolean({3, 5}), Arg::real({3, 5}), Arg::real({3, 5})},
                  .run = [](const Args& x) { return where(x[0], x[1], x[2]); },
                  .reference =
                      [](const Arrays& x) {
                        Array y(x[1].shape);
                        for (std::int64_t i = 0; i < y.numel(); ++i)
                          y[i] = x[0][i] != 0 ? x[1][i] : x[2][i];
                        return y;
                      },
                  .cast = Cast::widest,
                  .exact = true});
  list.push_back({.op = "where",
                  .variant = "broadcast",
                  .args = {Arg::boolean({4, 1}), Arg::real({5}), Arg::real({})},
                  .run = [](const Args& x) { return where(x[0], x[1], x[2]); },
                  .reference =
                      [](const Arrays& x) {
                        Array y({4, 5});
                        for (std::int64_t i = 0; i < 20; ++i)
                          y[i] = x[0][i / 5] != 0 ? x[1][i % 5] : x[2][0];
                        return y;
                      },
                  .cast = Cast::widest,
                  .length = 20});
  list.push_back({.op = "where",
                  .variant = "number",
                  .args = {Arg::boolean({6}), Arg::real({6})},
                  .run = [](const Args& x) { return where(x[0], x[1], -1.5); },
                  .reference =
                      [](const Arrays& x) {
                        Array y(x[1].shape);
                        for (std::int64_t i = 0; i < y.numel(); ++i)
                          y[i] = x[0][i] != 0 ? x[1][i] : -1.5;
                        return y;
                      },
                  .cast = Cast::widest,
                  .exact = true});
}
template <>
void add_cases<OpId::cast>(List& list) {
  list.push_back({.op = "cast",
                  .variant = "to float64",
                  .args = {Arg::real({3, 5})},
                  .run = [](const Args& x) { return cast(x[0], Dtype::f64); },
                  .reference = [](const Arrays& x) { return x[0]; },
                  .exact = true});
}

// ---- reductions
// --------------------------------------------------------------------------------------

struct ReduceShape {
  Shape shape, dims;
  bool keepdim;
};
const std::vector<ReduceShape> kReductions = {
    {{}, {}, false},         {{5}, {}, false},           {{3, 5}, {1}, false},
    {{3, 5}, {0}, true},     {{2, 3, 4}, {0, 2}, false}, {{2, 3, 4}, {-2}, true},
    {{1, 7, 1}, {1}, false}, {{300, 41}, {0}, false},    {{41, 300}, {1}, false},
    {{70000}, {}, false}};

void reduction(List& list, const char* name, Tensor (*f)(const Tensor&, const Shape&, bool),
               Arg::Kind kind, const std::function<double(const std::vector<double>&)>& reference,
               Cast cast) {
  for (const ReduceShape& r : kReductions) {
    if (r.shape.numel() > 20000 && kind == Arg::Kind::apart) continue;
    const Arg arg{r.shape, kind, -2, 2, 0, true};
    std::vector<int> dims;
    Shape out;
    std::int64_t length = 1;
    for (int d = 0; d < r.shape.size(); ++d) {
      bool folded = r.dims.empty();
      for (const std::int64_t e : r.dims) folded |= d == (e < 0 ? e + r.shape.size() : e);
      if (folded) {
        dims.push_back(d);
        length *= r.shape[d];
      }
      if (!folded || r.keepdim) out.push_back(folded ? 1 : r.shape[d]);
    }
    list.push_back(
        {.op = name,
         .variant = detail::concat(r.shape, " over ", r.dims, r.keepdim ? " kept" : ""),
         .args = {arg},
         .run = [f, r](const Args& x) { return f(x[0], r.dims, r.keepdim); },
         .reference = [dims, out, reference](
                          const Arrays& x) { return reshaped(fold(x[0], dims, reference), out); },
         .cast = cast,
         .length = length});
  }
}

double sum_of(const std::vector<double>& v) {
  double s = 0;
  for (const double x : v) s += x;
  return s;
}

template <>
void add_cases<OpId::sum>(List& list) {
  reduction(list, "sum", sum, kReal, sum_of, Cast::full);
}
template <>
void add_cases<OpId::mean>(List& list) {
  reduction(
      list, "mean", mean, kReal,
      [](const auto& v) { return sum_of(v) / static_cast<double>(v.size()); }, Cast::full);
}
template <>
void add_cases<OpId::var>(List& list) {
  const auto f = [](const Tensor& x, const Shape& dims, bool keepdim) {
    return var(x, dims, 0, keepdim);
  };
  reduction(
      list, "var", f, kReal,
      [](const std::vector<double>& v) {
        const double m = sum_of(v) / static_cast<double>(v.size());
        double s = 0;
        for (const double x : v) s += (x - m) * (x - m);
        return s / static_cast<double>(v.size());
      },
      Cast::full);
}
template <>
void add_cases<OpId::max>(List& list) {
  list.push_back({.op = "max",
                  .variant = "all",
                  .args = {Arg::apart({4, 6})},
                  .run = [](const Args& x) { return max(x[0]); },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(fold(x[0], {0, 1},
                                             [](const auto& v) {
                                               return *std::max_element(v.begin(), v.end());
                                             }),
                                        {});
                      },
                  .second_order = false,
                  .exact = true});
  list.push_back({.op = "max",
                  .variant = "along 0",
                  .args = {Arg::apart({4, 6})},
                  .run = [](const Args& x) { return max(x[0], 0).values; },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(fold(x[0], {0},
                                             [](const auto& v) {
                                               return *std::max_element(v.begin(), v.end());
                                             }),
                                        {6});
                      },
                  .exact = true});
  list.push_back({.op = "max",
                  .variant = "along -1 kept",
                  .args = {Arg::apart({2, 3, 5})},
                  .run = [](const Args& x) { return max(x[0], -1, true).values; },
                  .reference =
                      [](const Arrays& x) {
                        return fold(x[0], {2}, [](const auto& v) {
                          return *std::max_element(v.begin(), v.end());
                        });
                      },
                  .exact = true});
}
template <>
void add_cases<OpId::argmax>(List& list) {
  list.push_back({.op = "argmax",
                  .variant = "along 1",
                  .args = {Arg::apart({4, 6})},
                  .run = [](const Args& x) { return argmax(x[0], 1); },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(
                            fold(x[0], {1},
                                 [](const auto& v) {
                                   return static_cast<double>(std::max_element(v.begin(), v.end()) -
                                                              v.begin());
                                 }),
                            {4});
                      },
                  .differentiable = false,
                  .exact = true});
}
template <>
void add_cases<OpId::sum_to>(List& list) {
  list.push_back({.op = "sum_to",
                  .variant = "(4,3,5) to (3,1)",
                  .args = {Arg::real({4, 3, 5})},
                  .run =
                      [](const Args& x) {
                        return sum_to(x[0], {3, 1});
                      },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(fold(x[0], {0, 2}, sum_of), {3, 1});
                      },
                  .length = 20});
}

// ---- products
// ----------------------------------------------------------------------------------------

template <>
void add_cases<OpId::matmul>(List& list) {
  struct P {
    Shape a, b;
  };
  for (const P& p : std::vector<P>{{{1, 1}, {1, 1}},
                                   {{3, 5}, {5, 7}},
                                   {{17, 33}, {33, 9}},
                                   {{2, 0}, {0, 3}},
                                   {{0, 4}, {4, 3}},
                                   {{3, 4, 5}, {3, 5, 2}},
                                   {{64, 96}, {96, 80}}}) {
    list.push_back({.op = "matmul",
                    .variant = detail::concat(p.a, "x", p.b),
                    .args = {Arg::real(p.a, -1, 1), Arg::real(p.b, -1, 1)},
                    .run = [](const Args& x) { return matmul(x[0], x[1]); },
                    .reference = [](const Arrays& x) { return product(x[0], x[1]); },
                    .cast = Cast::low,
                    .length = p.a.back() + p.b.back() + p.a[0]});
  }
  list.push_back({.op = "matmul",
                  .variant = "vector",
                  .args = {Arg::real({5}), Arg::real({5, 3})},
                  .run = [](const Args& x) { return matmul(x[0], x[1]); },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(product(reshaped(x[0], {1, 5}), x[1]), {3});
                      },
                  .cast = Cast::low,
                  .length = 8});
  list.push_back({.op = "matmul",
                  .variant = "broadcast batch",
                  .args = {Arg::real({2, 3, 4}), Arg::real({4, 5})},
                  .run = [](const Args& x) { return matmul(x[0], x[1]); },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(product(reshaped(x[0], {6, 4}), x[1]), {2, 3, 5});
                      },
                  .cast = Cast::low,
                  .length = 12});
  list.push_back(
      {.op = "matmul",
       .variant = "expanded batch",
       .args = {Arg::real({2, 3, 4}), Arg::real({1, 4, 5})},
       .run = [](const Args& x) { return matmul(x[0], x[1]); },
       .reference =
           [](const Arrays& x) {
             return reshaped(product(reshaped(x[0], {6, 4}), reshaped(x[1], {4, 5})), {2, 3, 5});
           },
       .cast = Cast::low,
       .length = 12});
}
template <>
void add_cases<OpId::linear>(List& list) {
  struct A {
    Act act;
    const char* name;
    Scalar1 f;
  };
  const std::vector<A> acts = {
      {Act::none, "none", [](double x) { return x; }},
      {Act::relu, "relu", [](double x) { return std::max(x, 0.0); }},
      {Act::gelu_tanh, "gelu_tanh", gelu_by_tanh},
      {Act::gelu, "gelu", gelu_exact},
      {Act::silu, "silu", [](double x) { return x / (1 + std::exp(-x)); }}};
  for (const A& a : acts) {
    list.push_back({.op = "linear",
                    .variant = detail::concat("act ", a.name),
                    .args = {Arg::real({6, 9}, -1, 1), Arg::real({5, 9}, -1, 1), Arg::real({5})},
                    .run = [a](const Args& x) { return linear(x[0], x[1], x[2], {.act = a.act}); },
                    .reference =
                        [a](const Arrays& x) {
                          return map(zip(product(x[0], x[1], true), x[2],
                                         [](double y, double b) { return y + b; }),
                                     a.f);
                        },
                    .cast = Cast::low,
                    .length = 16,
                    .second_order = a.act == Act::none || a.act == Act::relu,
                    .intermediate_roundings = a.act == Act::none || a.act == Act::relu ? 0.0 : 1.0,
                    .ulps = 16});
  }
  list.push_back({.op = "linear",
                  .variant = "no bias, batched",
                  .args = {Arg::real({2, 3, 32}, -1, 1), Arg::real({16, 32}, -1, 1)},
                  .run = [](const Args& x) { return linear(x[0], x[1]); },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(product(reshaped(x[0], {6, 32}), x[1], true), {2, 3, 16});
                      },
                  .cast = Cast::low,
                  .length = 48});
}

template <>
void add_cases<OpId::mlp>(List& list) {
  struct A {
    Act act;
    const char* name;
    Scalar1 f;
    bool recompute = false;
  };
  const std::vector<A> acts = {
      {Act::relu, "relu", [](double x) { return std::max(x, 0.0); }},
      {Act::gelu_tanh, "gelu_tanh", gelu_by_tanh},
      {Act::gelu_tanh, "gelu_tanh recomputed", gelu_by_tanh, true},
      {Act::silu, "silu", [](double x) { return x / (1 + std::exp(-x)); }}};
  const auto add = [](double y, double b) { return y + b; };
  for (const A& a : acts) {
    list.push_back({.op = "mlp",
                    .variant = detail::concat("act ", a.name),
                    .args = {Arg::real({5, 8}, -1, 1), Arg::real({16, 8}, -1, 1), Arg::real({16}),
                             Arg::real({4, 16}, -1, 1), Arg::real({4})},
                    .run =
                        [a](const Args& x) {
                          return mlp(x[0], x[1], x[2], x[3], x[4],
                                     {.act = a.act, .recompute_activation = a.recompute});
                        },
                    .reference =
                        [a, add](const Arrays& x) {
                          const Array h = map(zip(product(x[0], x[1], true), x[2], add), a.f);
                          return zip(product(h, x[3], true), x[4], add);
                        },
                    .cast = Cast::low,
                    .length = 48,
                    .second_order = false,
                    .intermediate_roundings = 2.0,
                    .ulps = 32});
  }
}

// ---- shape
// -------------------------------------------------------------------------------------------

template <>
void add_cases<OpId::reshape>(List& list) {
  list.push_back({.op = "reshape",
                  .variant = "(2,3,4) to (4,6)",
                  .args = {Arg::real({2, 3, 4})},
                  .run =
                      [](const Args& x) {
                        return reshape(x[0], {4, -1});
                      },
                  .reference =
                      [](const Arrays& x) {
                        return reshaped(x[0], {4, 6});
                      },
                  .exact = true});
}
Array permuted(const Array& x, const std::vector<int>& dims) {
  Shape out;
  for (const int d : dims) out.push_back(x.shape[d]);
  Array y(out);
  std::int64_t i = 0;
  for_each_position(out, [&](const Shape& at) {
    Shape from = at;
    for (int d = 0; d < at.size(); ++d) from[dims[static_cast<std::size_t>(d)]] = at[d];
    y[i++] = x[index_of(x.shape, from)];
  });
  return y;
}
template <>
void add_cases<OpId::permute>(List& list) {
  list.push_back({.op = "permute",
                  .variant = "(2,3,4)",
                  .args = {Arg::real({2, 3, 4})},
                  .run =
                      [](const Args& x) {
                        return permute(x[0], {2, 0, 1});
                      },
                  .reference =
                      [](const Arrays& x) {
                        return permuted(x[0], {2, 0, 1});
                      },
                  .exact = true});
}
template <>
void add_cases<OpId::transpose>(List& list) {
  list.push_back({.op = "transpose",
                  .variant = "(2,3,4)",
                  .args = {Arg::real({2, 3, 4})},
                  .run = [](const Args& x) { return transpose(x[0], 0, -1); },
                  .reference =
                      [](const Arrays& x) {
                        return permuted(x[0], {2, 1, 0});
                      },
                  .exact = true});
}
template <>
void add_cases<OpId::expand>(List& list) {
  list.push_back({.op = "expand",
                  .variant = "(3,1) to (2,3,4)",
                  .args = {Arg::real({3, 1})},
                  .run =
                      [](const Args& x) {
                        return expand(x[0], {2, -1, 4});
                      },
                  .reference =
                      [](const Arrays& x) {
                        return zip(x[0], Array({2, 3, 4}), [](double a, double) { return a; });
                      },
                  .length = 8,
                  .exact = true});
}
template <>
void add_cases<OpId::slice>(List& list) {
  list.push_back({.op = "slice",
                  .variant = "step 2",
                  .args = {Arg::real({4, 7})},
                  .run = [](const Args& x) { return slice(x[0], 1, 1, -1, 2); },
                  .reference =
                      [](const Arrays& x) {
                        Array y({4, 3});
                        for (std::int64_t i = 0; i < 12; ++i)
                          y[i] = x[0][i / 3 * 7 + 1 + 2 * (i % 3)];
                        return y;
                      },
                  .exact = true});
  list.push_back({.op = "slice",
                  .variant = "index expression",
                  .args = {Arg::real({4, 7, 2})},
                  .run =
                      [](const Args& x) {
                        return x[0][{1, Slice(0, 4), ellipsis, new_axis}];
                      },
                  .reference =
                      [](const Arrays& x) {
                        Array y({4, 2, 1});
                        for (std::int64_t i = 0; i < 8; ++i) y[i] = x[0][14 + i];
                        return y;
                      },
                  .exact = true});
}
template <>
void add_cases<OpId::cat>(List& list) {
  list.push_back({.op = "cat",
                  .variant = "dim 1",
                  .args = {Arg::real({2, 3}), Arg::real({2, 1}), Arg::real({2, 0})},
                  .run = [](const Args& x) { return cat(x, 1); },
                  .reference =
                      [](const Arrays& x) {
                        Array y({2, 4});
                        for (std::int64_t i = 0; i < 8; ++i)
                          y[i] = i % 4 < 3 ? x[0][i / 4 * 3 + i % 4] : x[1][i / 4];
                        return y;
                      },
                  .cast = Cast::widest,
                  .exact = true});
}
template <>
void add_cases<OpId::stack>(List& list) {
  list.push_back({.op = "stack",
                  .variant = "dim -1",
                  .args = {Arg::real({2, 3}), Arg::real({2, 3})},
                  .run = [](const Args& x) { return stack(x, -1); },
                  .reference =
                      [](const Arrays& x) {
                        Array y({2, 3, 2});
                        for (std::int64_t i = 0; i < 12; ++i)
                          y[i] = x[static_cast<std::size_t>(i % 2)][i / 2];
                        return y;
                      },
                  .cast = Cast::widest,
                  .exact = true});
}

// ---- indexing
// ----------------------------------------------------------------------------------------

template <>
void add_cases<OpId::index_select>(List& list) {
  list.push_back(
      {.op = "index_select",
       .variant = "dim 1",
       .args = {Arg::real({3, 5, 2}), Arg::index({7}, 5)},
       .run = [](const Args& x) { return index_select(x[0], 1, x[1]); },
       .reference =
           [](const Arrays& x) {
             Array y({3, 7, 2});
             std::int64_t i = 0;
             for_each_position(y.shape, [&](const Shape& at) {
               y[i++] = x[0][(at[0] * 5 + static_cast<std::int64_t>(x[1][at[1]])) * 2 + at[2]];
             });
             return y;
           },
       .length = 7,
       .exact = true});
}
template <>
void add_cases<OpId::gather>(List& list) {
  list.push_back({.op = "gather",
                  .variant = "dim 0",
                  .args = {Arg::real({4, 3}), Arg::index({6, 2}, 4)},
                  .run = [](const Args& x) { return gather(x[0], 0, x[1]); },
                  .reference =
                      [](const Arrays& x) {
                        Array y({6, 2});
                        for (std::int64_t i = 0; i < 12; ++i)
                          y[i] = x[0][static_cast<std::int64_t>(x[1][i]) * 3 + i % 2];
                        return y;
                      },
                  .length = 6,
                  .exact = true});
}
template <>
void add_cases<OpId::scatter_add>(List& list) {
  list.push_back({.op = "scatter_add",
                  .variant = "dim 0",
                  .args = {Arg::real({4, 3}), Arg::index({6, 2}, 4), Arg::real({6, 3})},
                  .run = [](const Args& x) { return scatter_add(x[0], 0, x[1], x[2]); },
                  .reference =
                      [](const Arrays& x) {
                        Array y = x[0];
                        for (std::int64_t i = 0; i < 12; ++i)
                          y[static_cast<std::int64_t>(x[1][i]) * 3 + i % 2] +=
                              x[2][i / 2 * 3 + i % 2];
                        return y;
                      },
                  .cast = Cast::widest,
                  .length = 7});
}
template <>
void add_cases<OpId::embedding>(List& list) {
  list.push_back({.op = "embedding",
                  .variant = "(11,6)",
                  .args = {Arg::real({11, 6}), Arg::index({4, 9}, 11)},
                  .run = [](const Args& x) { return embedding(x[0], x[1]); },
                  .reference =
                      [](const Arrays& x) {
                        Array y({4, 9, 6});
                        for (std::int64_t i = 0; i < y.numel(); ++i)
                          y[i] = x[0][static_cast<std::int64_t>(x[1][i / 6]) * 6 + i % 6];
                        return y;
                      },
                  .length = 36,
                  .second_order = false,
                  .exact = true});
}

// ---- softmax, losses, norms
// ------------------------------------------------------------------------------

Array softmax_rows(const Array& x, bool log) {  // over the last dimension
  Array y(x.shape);
  const std::int64_t c = x.shape.empty() ? 1 : x.shape.back();
  for (std::int64_t r = 0; c > 0 && r < x.numel() / c; ++r) {
    double top = -INFINITY, total = 0;
    for (std::int64_t j = 0; j < c; ++j) top = std::max(top, x[r * c + j]);
    for (std::int64_t j = 0; j < c; ++j) total += std::exp(x[r * c + j] - top);
    for (std::int64_t j = 0; j < c; ++j) {
      const double l = x[r * c + j] - top - std::log(total);
      y[r * c + j] = log ? l : std::exp(l);
    }
  }
  return y;
}
void softmax_cases(List& list, const char* name, Tensor (*f)(const Tensor&, int), bool log) {
  for (const Shape& s : std::vector<Shape>{{}, {1}, {5}, {3, 7}, {4, 1}, {0, 3}, {5, 1000}}) {
    list.push_back({.op = name,
                    .variant = detail::concat(s),
                    .args = {Arg::real(s, -4, 4)},
                    .run = [f](const Args& x) { return f(x[0], -1); },
                    .reference = [log](const Arrays& x) { return softmax_rows(x[0], log); },
                    .length = s.empty() ? 1 : s.back(),
                    .ulps = 16});
  }
  list.push_back({.op = name,
                  .variant = "middle dimension",
                  .args = {Arg::real({2, 5, 3}, -4, 4)},
                  .run = [f](const Args& x) { return f(x[0], 1); },
                  .reference =
                      [log](const Arrays& x) {
                        return permuted(softmax_rows(permuted(x[0], {0, 2, 1}), log), {0, 2, 1});
                      },
                  .length = 5,
                  .ulps = 16});
}
template <>
void add_cases<OpId::softmax>(List& list) {
  softmax_cases(list, "softmax", softmax, false);
}
template <>
void add_cases<OpId::log_softmax>(List& list) {
  softmax_cases(list, "log_softmax", log_softmax, true);
}

template <>
void add_cases<OpId::cross_entropy>(List& list) {
  for (const Reduction r : {Reduction::mean, Reduction::sum, Reduction::none}) {
    for (const float smoothing : {0.0f, 0.1f}) {
      const CrossEntropyOptions options{
          .ignore_index = 2, .label_smoothing = smoothing, .reduction = r};
      list.push_back(
          {.op = "cross_entropy",
           .variant = detail::concat("reduction ", static_cast<int>(r), " smoothing ", smoothing),
           .args = {Arg::real({9, 11}, -3, 3), Arg::index({9}, 11)},
           .run = [options](const Args& x) { return cross_entropy(x[0], x[1], options); },
           .reference =
               [options](const Arrays& x) {
                 const Array lp = softmax_rows(x[0], true);
                 Array rows({9});
                 double total = 0, count = 0;
                 const double s = options.label_smoothing;
                 for (std::int64_t i = 0; i < 9; ++i) {
                   const auto t = static_cast<std::int64_t>(x[1][i]);
                   if (t == options.ignore_index) continue;
                   double uniform = 0;
                   for (std::int64_t j = 0; j < 11; ++j) uniform -= lp[i * 11 + j] / 11;
                   rows[i] = -(1 - s) * lp[i * 11 + t] + s * uniform;
                   total += rows[i];
                   ++count;
                 }
                 if (options.reduction == Reduction::none) return rows;
                 return Array({}, options.reduction == Reduction::mean ? total / count : total);
               },
           .cast = Cast::full,
           .length = 99,
           .second_order = false,
           .ulps = 16});
    }
  }
  list.push_back(
      {.op = "cross_entropy",
       .variant = "(N, C, d)",
       .args = {Arg::real({2, 5, 3}, -3, 3), Arg::index({2, 3}, 5)},
       .run =
           [](const Args& x) { return cross_entropy(x[0], x[1], {.reduction = Reduction::none}); },
       .reference =
           [](const Arrays& x) {
             const Array lp = softmax_rows(permuted(x[0], {0, 2, 1}), true);
             Array y({2, 3});
             for (std::int64_t i = 0; i < 6; ++i)
               y[i] = -lp[i * 5 + static_cast<std::int64_t>(x[1][i])];
             return y;
           },
       .cast = Cast::full,
       .length = 5,
       .second_order = false,
       .ulps = 16});
}
template <>
void add_cases<OpId::linear_cross_entropy>(List& list) {
  for (const Reduction r : {Reduction::mean, Reduction::sum}) {
    for (const std::int64_t chunk : {0, 4}) {
      const LinearCrossEntropyOptions options{
          .ignore_index = 2, .label_smoothing = 0.1f, .reduction = r, .chunk_rows = chunk};
      list.push_back(
          {.op = "linear_cross_entropy",
           .variant = detail::concat("reduction ", static_cast<int>(r), " chunk ", chunk),
           .args = {Arg::real({3, 3, 8}, -1, 1), Arg::real({11, 8}, -1, 1), Arg::index({3, 3}, 11)},
           .run =
               [options](const Args& x) { return linear_cross_entropy(x[0], x[1], x[2], options); },
           .reference =
               [options](const Arrays& x) {
                 const Array lp = softmax_rows(product(reshaped(x[0], {9, 8}), x[1], true), true);
                 double total = 0, count = 0;
                 const double s = options.label_smoothing;
                 for (std::int64_t i = 0; i < 9; ++i) {
                   const auto t = static_cast<std::int64_t>(x[2][i]);
                   if (t == options.ignore_index) continue;
                   double uniform = 0;
                   for (std::int64_t j = 0; j < 11; ++j) uniform -= lp[i * 11 + j] / 11;
                   total += -(1 - s) * lp[i * 11 + t] + s * uniform;
                   ++count;
                 }
                 return Array({}, options.reduction == Reduction::mean ? total / count : total);
               },
           .cast = Cast::full,
           .length = 200,
           .second_order = false,
           .intermediate_roundings = 2.0,
           .ulps = 32});
    }
  }
}
template <>
void add_cases<OpId::mse_loss>(List& list) {
  list.push_back({.op = "mse_loss",
                  .variant = "mean",
                  .args = {Arg::real({4, 5}), Arg::real({4, 5})},
                  .run = [](const Args& x) { return mse_loss(x[0], x[1]); },
                  .reference =
                      [](const Arrays& x) {
                        const Array d =
                            zip(x[0], x[1], [](double a, double b) { return (a - b) * (a - b); });
                        return Array({}, sum_of(d.data) / 20);
                      },
                  .cast = Cast::full,
                  .length = 20,
                  .ulps = 16});
}

Array normalised(const Array& x, std::int64_t c, const Array* w, const Array* b) {
  Array y(x.shape);
  for (std::int64_t r = 0; r < x.numel() / c; ++r) {
    double mean = 0, var = 0;
    for (std::int64_t j = 0; j < c; ++j) mean += x[r * c + j] / static_cast<double>(c);
    for (std::int64_t j = 0; j < c; ++j)
      var += (x[r * c + j] - mean) * (x[r * c + j] - mean) / static_cast<double>(c);
    for (std::int64_t j = 0; j < c; ++j) {
      y[r * c + j] =
          (x[r * c + j] - mean) / std::sqrt(var + 1e-5) * (w ? (*w)[j] : 1) + (b ? (*b)[j] : 0);
    }
  }
  return y;
}
template <>
void add_cases<OpId::layer_norm>(List& list) {
  for (const Shape& s : std::vector<Shape>{{1, 6}, {5, 16}, {7, 33}, {2, 3, 768}}) {
    const Shape c = {s.back()};
    list.push_back(
        {.op = "layer_norm",
         .variant = detail::concat(s),
         .args = {Arg::real(s), Arg::real(c), Arg::real(c)},
         .run = [c](const Args& x) { return layer_norm(x[0], c, x[1], x[2]); },
         .reference = [](const Arrays& x) { return normalised(x[0], x[1].numel(), &x[1], &x[2]); },
         .length = s.back(),
         .second_order = false,
         .ulps = 32});
  }
  list.push_back(
      {.op = "layer_norm",
       .variant = "two dimensions, no weight",
       .args = {Arg::real({3, 4, 5})},
       .run =
           [](const Args& x) {
             return layer_norm(x[0], {4, 5});
           },
       .reference = [](const Arrays& x) { return normalised(x[0], 20, nullptr, nullptr); },
       .length = 20,
       .second_order = false,
       .ulps = 32});
}
template <>
void add_cases<OpId::add_layer_norm>(List& list) {
  list.push_back(
      {.op = "add_layer_norm",
       .variant = "both outputs",
       .args = {Arg::real({5, 24}), Arg::real({5, 24}), Arg::real({24}), Arg::real({24})},
       .run =
           [](const Args& x) {
             const auto [y, s] = add_layer_norm(x[0], x[1], x[2], x[3]);
             return add(y, mul(s, 0.5));
           },
       .reference =
           [](const Arrays& x) {
             const Array s = zip(x[0], x[1], [](double a, double b) { return a + b; });
             return zip(normalised(s, 24, &x[2], &x[3]), s,
                        [](double a, double b) { return a + 0.5 * b; });
           },
       .length = 24,
       .second_order = false,
       .intermediate_roundings = 2,
       .ulps = 64});
}

Array rms_normalised(const Array& x, std::int64_t c, const Array* w) {
  Array y(x.shape);
  for (std::int64_t r = 0; r < x.numel() / c; ++r) {
    double mean_square = 0;
    for (std::int64_t j = 0; j < c; ++j)
      mean_square += x[r * c + j] * x[r * c + j] / static_cast<double>(c);
    for (std::int64_t j = 0; j < c; ++j)
      y[r * c + j] = x[r * c + j] / std::sqrt(mean_square + 1e-5) * (w ? (*w)[j] : 1);
  }
  return y;
}
template <>
void add_cases<OpId::rms_norm>(List& list) {
  for (const Shape& s : std::vector<Shape>{{1, 6}, {0, 8}, {5, 16}, {7, 33}, {2, 3, 768}}) {
    const Shape c = {s.back()};
    list.push_back(
        {.op = "rms_norm",
         .variant = detail::concat(s),
         .args = {Arg::real(s), Arg::real(c)},
         .run = [c](const Args& x) { return rms_norm(x[0], c, x[1]); },
         .reference = [](const Arrays& x) { return rms_normalised(x[0], x[1].numel(), &x[1]); },
         .length = s.back(),
         .second_order = false,
         .ulps = 16});
  }
  list.push_back({.op = "rms_norm",
                  .variant = "two dimensions, no weight",
                  .args = {Arg::real({3, 4, 5})},
                  .run =
                      [](const Args& x) {
                        return rms_norm(x[0], {4, 5});
                      },
                  .reference = [](const Arrays& x) { return rms_normalised(x[0], 20, nullptr); },
                  .length = 20,
                  .second_order = false,
                  .ulps = 16});
}
template <>
void add_cases<OpId::add_rms_norm>(List& list) {
  list.push_back({.op = "add_rms_norm",
                  .variant = "both outputs",
                  .args = {Arg::real({5, 24}), Arg::real({5, 24}), Arg::real({24})},
                  .run =
                      [](const Args& x) {
                        const auto [y, s] = add_rms_norm(x[0], x[1], x[2]);
                        return add(y, mul(s, 0.5));
                      },
                  .reference =
                      [](const Arrays& x) {
                        const Array s = zip(x[0], x[1], [](double a, double b) { return a + b; });
                        return zip(rms_normalised(s, 24, &x[2]), s,
                                   [](double a, double b) { return a + 0.5 * b; });
                      },
                  .length = 24,
                  .second_order = false,
                  .intermediate_roundings = 2,
                  .ulps = 64});
}
template <>
void add_cases<OpId::swiglu>(List& list) {
  for (const Shape& s :
       std::vector<Shape>{{2}, {1, 6}, {0, 4}, {5, 32}, {7, 66}, {2, 3, 130}, {3, 2048}}) {
    list.push_back({.op = "swiglu",
                    .variant = detail::concat(s),
                    .args = {Arg::real(s, -4, 4)},
                    .run = [](const Args& x) { return swiglu(x[0]); },
                    .reference =
                        [](const Arrays& x) {
                          Shape half = x[0].shape;
                          const std::int64_t h = half.back() / 2;
                          half[half.size() - 1] = h;
                          Array y(half);
                          for (std::int64_t i = 0; i < y.numel(); ++i) {
                            const std::int64_t at = i / h * 2 * h + i % h;
                            y[i] = x[0][at] / (1 + std::exp(-x[0][at])) * x[0][at + h];
                          }
                          return y;
                        },
                    .second_order = false,
                    .ulps = 16});
  }
}
template <>
void add_cases<OpId::dropout>(
    List& list) {  // the mask is fixed by the seed; forward is checked in random_test.cpp
  list.push_back({.op = "dropout",
                  .variant = "p = 0",
                  .args = {Arg::real({4, 5})},
                  .run = [](const Args& x) { return dropout(x[0], 0.0); },
                  .reference = [](const Arrays& x) { return x[0]; },
                  .exact = true});
  list.push_back({.op = "dropout",
                  .variant = "p = 1",
                  .args = {Arg::real({4, 5})},
                  .run = [](const Args& x) { return dropout(x[0], 1.0); },
                  .reference = [](const Arrays& x) { return Array(x[0].shape); },
                  .exact = true});
  list.push_back({.op = "dropout",
                  .variant = "mean of p = 1/2",
                  .args = {Arg::real({64, 64}, 1, 1)},
                  .run =
                      [](const Args& x) {
                        manual_seed(3);
                        const Tensor y = dropout(x[0], 0.5);
                        const Tensor zeros_or_twice =
                            mul(y, sub(y, mul(x[0], 2.0)));  // 0 wherever y is 0 or 2x
                        return add(zeros_or_twice, mul(x[0], 0.0));
                      },
                  .reference = [](const Arrays& x) { return Array(x[0].shape); },
                  .differentiable = false,
                  .exact = true});
}

// ---- attention
// -----------------------------------------------------------------------------------------------

struct AttentionShape {
  std::int64_t b, h, g, t, s, d;
  Shape q() const { return {b, h, t, d}; }
  Shape k() const { return {b, g, s, d}; }
};
/// mask: null, or added to the scores (-inf masks), broadcast to (B, H, T, S).
Array attention(const Array& q, const Array& k, const Array& v, const Array* mask, bool causal,
                double scale) {
  const Shape &n = q.shape, &m = k.shape;
  const std::int64_t s_count = m[2], d = n[3], per_group = n[1] / m[1];
  Array y(n);
  for_each_position({n[0], n[1], n[2]}, [&](const Shape& at) {
    const std::int64_t row = ((at[0] * n[1] + at[1]) * n[2] + at[2]) * d;
    const std::int64_t head = (at[0] * m[1] + at[1] / per_group) * s_count * d;
    const std::int64_t visible = causal ? std::min(s_count, at[2] + 1) : s_count;
    std::vector<double> p(static_cast<std::size_t>(visible));
    double top = -INFINITY, sum = 0;
    for (std::int64_t s = 0; s < visible; ++s) {
      double score = 0;
      for (std::int64_t i = 0; i < d; ++i) score += q[row + i] * k[head + s * d + i] * scale;
      if (mask) score += (*mask)[index_of(mask->shape, {at[0], at[1], at[2], s})];
      p[static_cast<std::size_t>(s)] = score;
      top = std::max(top, score);
    }
    if (top == -INFINITY) return;
    for (double& x : p) sum += x = std::exp(x - top);
    for (std::int64_t s = 0; s < visible; ++s)
      for (std::int64_t i = 0; i < d; ++i)
        y[row + i] += p[static_cast<std::size_t>(s)] / sum * v[head + s * d + i];
  });
  return y;
}
void attention_case(List& list, const AttentionShape& s, bool causal, const Shape& mask,
                    bool additive, double scale = 0) {
  std::vector<Arg> args = {Arg::real(s.q()), Arg::real(s.k()), Arg::real(s.k())};
  const bool masked = !mask.empty();
  if (masked) {
    args.push_back(additive ? Arg::real(mask) : Arg::boolean(mask));
    args.back().differentiable = false;
  }
  list.push_back(
      {.op = "scaled_dot_product_attention",
       .variant = detail::concat(s.q(), "x", s.k(), causal ? " causal" : "",
                                 !masked    ? ""
                                 : additive ? " added mask "
                                            : " bool mask ",
                                 mask, " scale ", scale),
       .args = args,
       .run =
           [=](const Args& x) {
             return scaled_dot_product_attention(
                 x[0], x[1], x[2],
                 {.causal = causal, .mask = masked ? x[3] : Tensor(), .scale = scale});
           },
       .reference =
           [=](const Arrays& x) {
             Array added;
             if (masked)
               added = additive ? x[3] : map(x[3], [](double v) { return v != 0 ? 0 : -INFINITY; });
             return attention(x[0], x[1], x[2], masked ? &added : nullptr, causal,
                              scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(s.d)));
           },
       .cast = Cast::low,
       .length = s.d + s.s,
       .second_order = false,
       .intermediate_roundings = 2,
       .ulps = 64});
}
template <>
void add_cases<OpId::scaled_dot_product_attention>(List& list) {
  for (const bool causal : {false, true}) {
    attention_case(list, {2, 2, 2, 7, 7, 8}, causal, {}, false);
    attention_case(list, {1, 4, 2, 5, 9, 16}, causal, {}, false);           // grouped, T < S
    attention_case(list, {1, 2, 1, 70, 33, 10}, causal, {}, false);         // T > S, a padded tile
    attention_case(list, {1, 1, 1, 150, 150, 24}, causal, {}, false, 0.3);  // several key blocks
    attention_case(list, {2, 2, 1, 5, 6, 8}, causal, {5, 6}, false);
    attention_case(list, {2, 2, 1, 5, 6, 8}, causal, {2, 1, 1, 6}, false);
    attention_case(list, {1, 2, 2, 4, 5, 8}, causal, {1, 2, 4, 5}, true);
  }
  attention_case(list, {0, 2, 2, 4, 4, 8}, false, {}, false);
  attention_case(list, {2, 2, 2, 0, 4, 8}, false, {}, false);
  attention_case(list, {1, 2, 2, 3, 0, 8}, false, {}, false);  // no key: 0
}
template <>
void add_cases<OpId::self_attention>(List& list) {
  for (const bool causal : {true, false}) {
    for (const AttentionShape& s : std::vector<AttentionShape>{
             {2, 2, 2, 6, 6, 8}, {1, 4, 2, 9, 9, 8}, {2, 3, 1, 5, 5, 5}, {1, 2, 2, 130, 130, 16}}) {
      const std::int64_t parts = s.h + 2 * s.g;
      list.push_back(
          {.op = "self_attention",
           .variant = detail::concat(s.q(), "x", s.k(), causal ? " causal" : ""),
           .args = {Arg::real({s.b, s.t, parts * s.d})},
           .run =
               [=](const Args& x) {
                 return self_attention(x[0], {.heads = s.h, .kv_heads = s.g, .causal = causal});
               },
           .reference =
               [=](const Arrays& x) {
                 Array q(s.q()), k(s.k()), v(s.k());
                 const auto take = [&](Array& to, std::int64_t first) {
                   std::int64_t i = 0;
                   for_each_position(to.shape, [&](const Shape& at) {
                     to[i++] = x[0][((at[0] * s.t + at[2]) * parts + first + at[1]) * s.d + at[3]];
                   });
                 };
                 take(q, 0);
                 take(k, s.h);
                 take(v, s.h + s.g);
                 const Array y =
                     attention(q, k, v, nullptr, causal, 1 / std::sqrt(static_cast<double>(s.d)));
                 return reshaped(permuted(y, {0, 2, 1, 3}), {s.b, s.t, s.h * s.d});
               },
           .cast = Cast::low,
           .length = s.d + s.s,
           .second_order = false,
           .intermediate_roundings = 2,
           .ulps = 64});
    }
  }
}

struct RotaryCase {
  Shape x;  // (B, T, H, D)
  RotaryOptions options;
  Shape positions;  // of an index argument; none if empty
};
Array rotated(const Array& x, const Array* positions, const RotaryOptions& o) {
  const std::int64_t t = x.shape[1], d = x.shape[3], half = d / 2;
  const std::int64_t heads = o.heads == 0 ? x.shape[2] : o.heads;
  Array y(x.shape);
  std::int64_t i = 0;
  for_each_position(x.shape, [&](const Shape& at) {
    const std::int64_t pair = at[3] % half;
    const double position =
        (positions == nullptr
             ? static_cast<double>(at[1])
             : (*positions)[positions->shape.size() == 1 ? at[1] : at[0] * t + at[1]]) +
        static_cast<double>(o.offset);
    const double angle =
        position * std::pow(o.base, -2.0 * static_cast<double>(pair) / static_cast<double>(d));
    const double other = at[3] < half ? -x[i + half] : x[i - half];
    y[i] = at[2] < heads ? x[i] * std::cos(angle) + other * std::sin(angle) : x[i];
    ++i;
  });
  return y;
}
template <>
void add_cases<OpId::rotary_embedding>(List& list) {
  for (const RotaryCase& r : std::vector<RotaryCase>{{{2, 5, 3, 8}, {}, {}},
                                                     {{1, 7, 2, 10}, {.offset = 11}, {}},
                                                     {{2, 3, 6, 16}, {.heads = 4}, {}},
                                                     {{1, 4, 1, 2}, {.base = 500}, {}},
                                                     {{2, 6, 2, 64}, {}, {6}},
                                                     {{3, 4, 2, 6}, {.offset = -2}, {3, 4}},
                                                     {{2, 0, 2, 8}, {}, {}}}) {
    std::vector<Arg> args = {Arg::real(r.x)};
    if (!r.positions.empty()) args.push_back(Arg::index(r.positions, 40));
    list.push_back({.op = "rotary_embedding",
                    .variant = detail::concat(r.x, " heads ", r.options.heads, " offset ",
                                              r.options.offset, " positions ", r.positions),
                    .args = args,
                    .run =
                        [o = r.options](const Args& x) {
                          RotaryOptions options = o;
                          if (x.size() > 1) options.positions = x[1];
                          return rotary_embedding(x[0], options);
                        },
                    .reference =
                        [o = r.options](const Arrays& x) {
                          return rotated(x[0], x.size() > 1 ? &x[1] : nullptr, o);
                        },
                    .length = 2,
                    .ulps = 96});  // angles of up to 40 radians, each off by up to 1.5 ulp
  }
}

// ---- convolution and pooling
// -------------------------------------------------------------------------------

struct ConvShape {
  Shape x, w;
  Conv2dOptions options;
  bool bias;
};
Array convolved(const Array& x, const Array& w, const Array* b, const Conv2dOptions& o) {
  const std::int64_t cg = w.shape[1], r = w.shape[2], s = w.shape[3], og = w.shape[0] / o.groups;
  Shape out{x.shape[0], w.shape[0]};
  for (int i = 0; i < 2; ++i)
    out.push_back((x.shape[2 + i] + 2 * o.padding[i] - o.dilation[i] * (w.shape[2 + i] - 1) - 1) /
                      o.stride[i] +
                  1);
  Array y(out);
  std::int64_t at = 0;
  for_each_position(out, [&](const Shape& p) {
    double sum = b ? (*b)[p[1]] : 0;
    for (std::int64_t c = 0; c < cg; ++c) {
      for (std::int64_t i = 0; i < r; ++i) {
        for (std::int64_t j = 0; j < s; ++j) {
          const std::int64_t h = p[2] * o.stride[0] - o.padding[0] + i * o.dilation[0],
                             v = p[3] * o.stride[1] - o.padding[1] + j * o.dilation[1];
          if (h < 0 || v < 0 || h >= x.shape[2] || v >= x.shape[3]) continue;
          const std::int64_t channel = p[1] / og * cg + c;
          sum += x[((p[0] * x.shape[1] + channel) * x.shape[2] + h) * x.shape[3] + v] *
                 w[((p[1] * cg + c) * r + i) * s + j];
        }
      }
    }
    y[at++] = o.act == Act::relu ? std::max(sum, 0.0) : sum;
  });
  return y;
}
/// x (N, C, ..) with the mean and variance of (group, or sample and group) subtracted and divided
/// out, times w plus b per channel. groups 0: over the batch.
Array channels_normalised(const Array& x, std::int64_t groups, const Array* w, const Array* b) {
  const std::int64_t n = x.shape[0], c = x.shape[1], s = x.numel() / (n * c);
  const auto set_of = [&](std::int64_t row) {  // row: sample and channel
    return groups == 0 ? row % c : row / c * groups + row % c / (c / groups);
  };
  std::vector<double> mean(static_cast<std::size_t>(groups == 0 ? c : n * groups)), var(mean);
  const double count = static_cast<double>(x.numel()) / static_cast<double>(mean.size());
  const auto for_each = [&](auto&& f) {
    for (std::int64_t i = 0; i < x.numel(); ++i) f(i, static_cast<std::size_t>(set_of(i / s)));
  };
  for_each([&](std::int64_t i, std::size_t set) { mean[set] += x[i] / count; });
  for_each([&](std::int64_t i, std::size_t set) {
    var[set] += (x[i] - mean[set]) * (x[i] - mean[set]) / count;
  });
  Array y(x.shape);
  for_each([&](std::int64_t i, std::size_t set) {
    const std::int64_t channel = i / s % c;
    y[i] = (x[i] - mean[set]) / std::sqrt(var[set] + 1e-5) * (w ? (*w)[channel] : 1) +
           (b ? (*b)[channel] : 0);
  });
  return y;
}
Array rectified(Array x) {
  for (double& v : x.data) v = std::max(v, 0.0);
  return x;
}
template <>
void add_cases<OpId::batch_norm>(List& list) {
  const auto add_case = [&](std::string variant, std::vector<Arg> args, auto run, auto reference) {
    list.push_back({.op = "batch_norm",
                    .variant = std::move(variant),
                    .args = std::move(args),
                    .run = run,
                    .reference = reference,
                    .length = 64,
                    .second_order = false,
                    .ulps = 32});
  };
  for (const Shape& s : std::vector<Shape>{{8, 5}, {4, 3, 5}, {2, 3, 4, 4}, {3, 17, 1, 2}}) {
    const Shape c = {s[1]};
    add_case(
        detail::concat("training ", s), {Arg::real(s), Arg::real(c), Arg::real(c)},
        [](const Args& x) { return batch_norm(x[0], x[1], x[2], {}, {}); },
        [](const Arrays& x) { return channels_normalised(x[0], 0, &x[1], &x[2]); });
  }
  const Shape s = {2, 3, 4, 5}, c = {3};
  add_case(
      "training, residual and relu", {Arg::real(s), Arg::real(c), Arg::real(c), Arg::real(s)},
      [](const Args& x) {
        return batch_norm(x[0], x[1], x[2], {}, {}, {.relu = true, .residual = x[3]});
      },
      [](const Arrays& x) {
        return rectified(zip(channels_normalised(x[0], 0, &x[1], &x[2]), x[3],
                             [](double a, double b) { return a + b; }));
      });
  add_case(
      "channels-last, residual", {Arg::real(s), Arg::real(c), Arg::real(c), Arg::real(s)},
      [](const Args& x) {
        return batch_norm(to_channels_last(x[0]), x[1], x[2], {}, {}, {.residual = x[3]});
      },
      [](const Arrays& x) {
        return zip(channels_normalised(x[0], 0, &x[1], &x[2]), x[3],
                   [](double a, double b) { return a + b; });
      });
  Arg mean = Arg::real(c), var = Arg::real(c, 0.5, 2);
  mean.differentiable = var.differentiable = false;
  for (const bool last : {false, true})
    add_case(
        last ? "evaluation, channels-last" : "evaluation",
        {Arg::real(s), Arg::real(c), Arg::real(c), mean, var, Arg::real(s)},
        [last](const Args& x) {
          return batch_norm(last ? to_channels_last(x[0]) : x[0], x[1], x[2], x[3], x[4],
                            {.training = false, .relu = true, .residual = x[5]});
        },
        [](const Arrays& x) {
          Array y = x[5];
          for (std::int64_t i = 0; i < y.numel(); ++i) {
            const std::int64_t k = i / 20 % 3;
            y[i] += (x[0][i] - x[3][k]) / std::sqrt(x[4][k] + 1e-5) * x[1][k] + x[2][k];
          }
          return rectified(y);
        });
}
template <>
void add_cases<OpId::group_norm>(List& list) {
  const std::vector<std::pair<Shape, std::int64_t>> shapes = {
      {{2, 6, 4, 3}, 3}, {{3, 4}, 2}, {{1, 5, 7}, 1}, {{2, 33, 2, 2}, 33}};
  for (const auto& [s, groups] : shapes) {
    for (const bool last : {false, true}) {
      if (last && s.size() != 4) continue;
      const Shape c = {s[1]};
      list.push_back({.op = "group_norm",
                      .variant = detail::concat(s, " groups ", groups, last ? " last" : ""),
                      .args = {Arg::real(s), Arg::real(c), Arg::real(c)},
                      .run =
                          [groups = groups, last](const Args& x) {
                            return group_norm(last ? to_channels_last(x[0]) : x[0], groups, x[1],
                                              x[2]);
                          },
                      .reference =
                          [groups = groups](const Arrays& x) {
                            return channels_normalised(x[0], groups, &x[1], &x[2]);
                          },
                      .length = 64,
                      .second_order = false,
                      .ulps = 32});
    }
  }
}
template <>
void add_cases<OpId::conv2d>(List& list) {
  const std::vector<ConvShape> shapes = {
      {{2, 3, 8, 8}, {4, 3, 3, 3}, {.padding = {1, 1}}, true},
      {{1, 1, 5, 5}, {1, 1, 1, 1}, {}, false},
      {{2, 4, 9, 7}, {6, 2, 3, 2}, {.stride = {2, 1}, .padding = {1, 0}, .groups = 2}, true},
      {{1, 2, 9, 9}, {3, 2, 3, 3}, {.dilation = {2, 2}, .act = Act::relu}, true},
      {{3, 8, 6, 6}, {8, 1, 3, 3}, {.padding = {1, 1}, .groups = 8}, true},
      {{2, 16, 14, 14}, {32, 16, 3, 3}, {.padding = {1, 1}, .act = Act::relu}, true},
  };
  for (const ConvShape& s : shapes) {
    std::vector<Arg> args = {Arg::real(s.x, -1, 1), Arg::real(s.w, -1, 1)};
    if (s.bias) args.push_back(Arg::real({s.w[0]}));
    list.push_back(
        {.op = "conv2d",
         .variant = detail::concat(s.x, "*", s.w, " stride ", s.options.stride, " groups ",
                                   s.options.groups),
         .args = args,
         .run =
             [s](const Args& x) { return conv2d(x[0], x[1], s.bias ? x[2] : Tensor(), s.options); },
         .reference =
             [s](const Arrays& x) {
               return convolved(x[0], x[1], s.bias ? &x[2] : nullptr, s.options);
             },
         .cast = Cast::low,
         .length = s.w.numel() / s.w[0] + s.x[0] * s.x[2] * s.x[3],
         .second_order = false,
         .ulps = 16});
  }
}
Array pooled(const Array& x, const Pool2dOptions& o, bool largest) {
  const Shape stride = o.stride.empty() ? o.kernel : o.stride;
  Shape out{x.shape[0], x.shape[1]};
  for (int i = 0; i < 2; ++i)
    out.push_back((x.shape[2 + i] + 2 * o.padding[i] - o.kernel[i]) / stride[i] + 1);
  Array y(out);
  std::int64_t at = 0;
  for_each_position(out, [&](const Shape& p) {
    double best = -INFINITY, sum = 0, count = 0;
    for (std::int64_t i = 0; i < o.kernel[0]; ++i) {
      for (std::int64_t j = 0; j < o.kernel[1]; ++j) {
        const std::int64_t h = p[2] * stride[0] - o.padding[0] + i,
                           v = p[3] * stride[1] - o.padding[1] + j;
        if (h < 0 || v < 0 || h >= x.shape[2] || v >= x.shape[3]) continue;
        const double value = x[((p[0] * x.shape[1] + p[1]) * x.shape[2] + h) * x.shape[3] + v];
        best = std::max(best, value);
        sum += value;
        ++count;
      }
    }
    y[at++] = largest ? best
                      : sum / (o.count_include_pad ? static_cast<double>(o.kernel[0] * o.kernel[1])
                                                   : count);
  });
  return y;
}
void pool_cases(List& list, const char* name, Tensor (*f)(const Tensor&, const Pool2dOptions&),
                bool largest) {
  const std::vector<std::pair<Shape, Pool2dOptions>> shapes = {
      {{2, 3, 6, 6}, {}},
      {{1, 2, 7, 9},
       {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}, .count_include_pad = false}},
      {{1, 2, 8, 5}, {.kernel = {3, 2}, .stride = {1, 2}, .padding = {1, 1}}},
  };
  for (const auto& [s, o] : shapes) {
    list.push_back(
        {.op = name,
         .variant = detail::concat(s, " kernel ", o.kernel),
         .args = {Arg::apart(s)},
         .run = [f, o = o](const Args& x) { return f(x[0], o); },
         .reference = [o = o, largest](const Arrays& x) { return pooled(x[0], o, largest); },
         .length = 9,
         .second_order = false,
         .exact = largest});
  }
}
Array adaptive_pooled(const Array& x, const Shape& size, bool largest) {
  Array y({x.shape[0], x.shape[1], size[0], size[1]});
  std::int64_t at = 0;
  for_each_position(y.shape, [&](const Shape& p) {
    const auto begin = [&](int d) { return p[d] * x.shape[d] / size[d - 2]; };
    const auto end = [&](int d) {
      return static_cast<std::int64_t>(std::ceil(static_cast<double>((p[d] + 1) * x.shape[d]) /
                                                 static_cast<double>(size[d - 2])));
    };
    double best = -INFINITY, sum = 0, count = 0;
    for (std::int64_t h = begin(2); h < end(2); ++h)
      for (std::int64_t v = begin(3); v < end(3); ++v, ++count) {
        const double value = x[((p[0] * x.shape[1] + p[1]) * x.shape[2] + h) * x.shape[3] + v];
        best = std::max(best, value);
        sum += value;
      }
    y[at++] = largest ? best : sum / count;
  });
  return y;
}
void adaptive_pool_cases(List& list, const char* name, Tensor (*f)(const Tensor&, const Shape&),
                         bool largest) {
  const std::vector<std::pair<Shape, Shape>> shapes = {
      {{2, 3, 7, 7}, {1, 1}}, {{1, 2, 7, 9}, {3, 4}}, {{1, 2, 3, 2}, {5, 3}}};
  for (const auto& [s, size] : shapes) {
    list.push_back(
        {.op = name,
         .variant = detail::concat(s, " to ", size),
         .args = {Arg::apart(s)},
         .run = [f, size = size](const Args& x) { return f(x[0], size); },
         .reference = [size = size,
                       largest](const Arrays& x) { return adaptive_pooled(x[0], size, largest); },
         .length = 49,
         .second_order = false,
         .exact = largest});
  }
}
template <>
void add_cases<OpId::adaptive_max_pool2d>(List& list) {
  adaptive_pool_cases(list, "adaptive_max_pool2d", adaptive_max_pool2d, true);
}
template <>
void add_cases<OpId::adaptive_avg_pool2d>(List& list) {
  adaptive_pool_cases(list, "adaptive_avg_pool2d", adaptive_avg_pool2d, false);
}
template <>
void add_cases<OpId::max_pool2d>(List& list) {
  pool_cases(list, "max_pool2d", max_pool2d, true);
}
template <>
void add_cases<OpId::avg_pool2d>(List& list) {
  pool_cases(list, "avg_pool2d", avg_pool2d, false);
}

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> all = [] {
    List list;
#define MT_OP(function) add_cases<OpId::function>(list);
#include "ops/ops.def"
    return list;
  }();
  return all;
}

}  // namespace mixtape::testing
