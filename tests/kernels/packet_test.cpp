// The CPU packet's functions against libm in double, over a sample of all float bit patterns.
#include "kernels/cpu/packet.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace mixtape::testing {
namespace {

using kernels::cpu::Packet;
constexpr int kLanes = Packet::kLanes;

/// Distance of `got` from `exact` in units in the last place of the float nearest to it.
double ulps(float got, double exact) {
  const float nearest = static_cast<float>(exact);
  if (std::isnan(nearest)) return std::isnan(got) ? 0 : std::numeric_limits<double>::infinity();
  if (got == nearest) return std::signbit(got) == std::signbit(nearest) ? 0 : 1e9;
  // Overflow: the largest float stands for values up to half a unit beyond it.
  const double value = std::isinf(got) ? std::copysign(0x1p128, got) : static_cast<double>(got);
  int exponent;
  std::frexp(std::isinf(nearest) ? 0x1p127 : static_cast<double>(nearest), &exponent);
  return std::fabs(value - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

template <class F, class Reference>
void expect_within(double bound, F&& f, Reference&& reference) {
  constexpr std::uint64_t kStep = 2003;  // prime: no exponent or mantissa bit is left out
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += kStep * kLanes) {
    float in[kLanes], out[kLanes];
    for (int i = 0; i < kLanes; ++i)
      in[i] = std::bit_cast<float>(
          static_cast<std::uint32_t>(bits + kStep * static_cast<std::uint64_t>(i)));
    f(Packet::load(in)).store(out);
    for (int i = 0; i < kLanes; ++i)
      ASSERT_LE(ulps(out[i], reference(static_cast<double>(in[i]))), bound)
          << std::hexfloat << in[i] << " gives " << out[i];
  }
}

TEST(Packet, ExpLogTanhAndErfAreWithinTwoUlpOfTheExactValue) {
  expect_within(
      2, [](Packet x) { return math::exp(x); }, [](double x) { return std::exp(x); });
  expect_within(
      2, [](Packet x) { return math::log(x); }, [](double x) { return std::log(x); });
  expect_within(
      2, [](Packet x) { return math::tanh(x); }, [](double x) { return std::tanh(x); });
  expect_within(
      2, [](Packet x) { return math::erf(x); }, [](double x) { return std::erf(x); });
}

TEST(Packet, SqrtAndAbsAreExact) {
  expect_within(
      0.5, [](Packet x) { return math::sqrt(x); }, [](double x) { return std::sqrt(x); });
  expect_within(
      0, [](Packet x) { return math::abs(x); }, [](double x) { return std::fabs(x); });
}

TEST(Packet, FunctionsAtTheirEdges) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> edges = {
      0.0f,    -0.0f, inf,      -inf,        nan,        0x1p-149f, -0x1p-149f, 0x1p-126f, 88.722f,
      88.723f, 89.5f, -87.336f, -103.97f,    -103.98f,   -1e30f,    0.625f,     0.92f,     3.9f,
      4.1f,    -9.1f, 1.0f,     0.99999994f, 1.0000001f, 3.4e38f,   -3.4e38f};
  for (float x : edges) {
    const auto check = [&](const char* name, auto f, double exact, double bound) {
      float out[kLanes];
      f(Packet::splat(x)).store(out);
      for (float y : out) EXPECT_LE(ulps(y, exact), bound) << name << " of " << x << " gives " << y;
    };
    const double v = static_cast<double>(x);
    check(
        "exp", [](Packet p) { return math::exp(p); }, std::exp(v), 2);
    check(
        "log", [](Packet p) { return math::log(p); }, std::log(v), 2);
    check(
        "tanh", [](Packet p) { return math::tanh(p); }, std::tanh(v), 2);
    check(
        "erf", [](Packet p) { return math::erf(p); }, std::erf(v), 2);
    check(
        "sqrt", [](Packet p) { return math::sqrt(p); }, std::sqrt(v), 0.5);
  }
}

}  // namespace
}  // namespace mixtape::testing
