// Random inputs, rounding and comparison for kernel tests: inputs are what the storage type holds,
// references are computed from them in float64, and tolerances are multiples of the storage type's
// unit roundoff.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "engine/dtype.h"
#include "tests/kernels/buffer.h"

namespace mixtape::testing {

/// Calls f(device) for each device of the machine.
template <class F>
inline void on_each_device(F&& f) {
  for (Device d : test_devices()) {
    SCOPED_TRACE(::testing::Message() << "on " << d);
    f(d);
  }
}

inline constexpr Dtype kFloatingDtypes[] = {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16};
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// `x` rounded to nearest even in `dtype` (through float for the 16-bit types, as kernels do).
inline double rounded(Dtype dtype, double x) {
  switch (dtype) {
    case Dtype::f16: return static_cast<float>(Half(static_cast<float>(x)));
    case Dtype::bf16: return static_cast<float>(BFloat16(static_cast<float>(x)));
    case Dtype::f32: return static_cast<float>(x);
    default: return x;
  }
}
inline std::vector<double> rounded(Dtype dtype, std::vector<double> values) {
  for (double& v : values) v = rounded(dtype, v);
  return values;
}

/// n values of N(mean, deviation^2), already rounded to `dtype`.
inline std::vector<double> normals(Dtype dtype, std::int64_t n, unsigned seed, double deviation = 1,
                                   double mean = 0) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> draw(mean, deviation);
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& v : values) v = rounded(dtype, draw(generator));
  return values;
}

/// Unit roundoff of the arithmetic that works on `dtype`.
inline double compute_roundoff(Dtype dtype) { return unit_roundoff(compute_dtype(dtype)); }

/// Each got[i] within atol[i] of want[i]; NaN matches NaN, infinities match exactly.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& want,
                         const std::vector<double>& atol) {
  ASSERT_EQ(got.size(), want.size());
  ASSERT_EQ(atol.size(), want.size());
  int shown = 0;
  for (std::size_t i = 0; i < got.size() && shown < 5; ++i) {
    const bool same = (std::isnan(got[i]) && std::isnan(want[i])) || got[i] == want[i] ||
                      std::abs(got[i] - want[i]) <= atol[i];
    if (same) continue;
    ++shown;
    ADD_FAILURE() << "element " << i << ": got " << got[i] << ", want " << want[i] << ", off by "
                  << std::abs(got[i] - want[i]) << " of " << atol[i];
  }
}
inline void expect_close(const std::vector<double>& got, const std::vector<double>& want,
                         double atol, double rtol) {
  std::vector<double> bound(want.size());
  for (std::size_t i = 0; i < want.size(); ++i)
    bound[i] = atol + (std::isfinite(want[i]) ? rtol * std::abs(want[i]) : 0);
  expect_close(got, want, bound);
}

/// Bit-for-bit equal runs: as expect_close with no tolerance, but -0 differs from 0.
inline void expect_same(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool same = (std::isnan(got[i]) && std::isnan(want[i])) ||
                      (got[i] == want[i] && std::signbit(got[i]) == std::signbit(want[i]));
    ASSERT_TRUE(same) << "element " << i << ": " << got[i] << " and " << want[i];
  }
}

}  // namespace mixtape::testing
