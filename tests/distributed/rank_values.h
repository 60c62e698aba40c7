// Values that each rank can make for every other rank, so that it knows what a collective must
// give.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "distributed/process_group.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {

inline constexpr Dtype kAllDtypes[] = {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16,
                                       Dtype::i64, Dtype::i32, Dtype::u8,  Dtype::b8};

/// n values of rank r, as `dtype` holds them: normals, small integers, or 0 and 1.
inline std::vector<double> rank_values(Dtype dtype, std::int64_t n, int r, unsigned seed = 0) {
  std::mt19937 generator(seed * 7919 + static_cast<unsigned>(r) * 104729 + 17);
  std::normal_distribution<double> normal(0, 2);
  std::uniform_int_distribution<int> integer(is_floating(dtype) || dtype == Dtype::u8 ? 0 : -40,
                                             40);
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& v : values) {
    if (is_floating(dtype))
      v = rounded(dtype, normal(generator));
    else
      v = dtype == Dtype::b8 ? integer(generator) > 10 : integer(generator);
  }
  return values;
}

inline Tensor tensor_of(const std::vector<double>& values, Dtype dtype, const Shape& shape,
                        Device device) {
  Tensor t = Tensor::empty(shape, Dtype::f64, Device::cpu());
  std::copy(values.begin(), values.end(), t.data<double>().begin());
  return t.to(device, dtype).clone();
}
inline Tensor tensor_of(const std::vector<double>& values, Dtype dtype, Device device) {
  return tensor_of(values, dtype, {static_cast<std::int64_t>(values.size())}, device);
}

/// The reduction of one element's values over the ranks, in float64.
inline double reduced(distributed::ReduceOp op, Dtype dtype, const std::vector<double>& values) {
  using distributed::ReduceOp;
  double sum = 0;
  for (const double v : values) sum += v;
  switch (op) {
    case ReduceOp::sum: return dtype == Dtype::b8 ? sum > 0 : sum;
    case ReduceOp::avg: return sum / static_cast<double>(values.size());
    case ReduceOp::min: return *std::min_element(values.begin(), values.end());
    default: return *std::max_element(values.begin(), values.end());
  }
}

/// The reduction of all elements, and for each the bound on its error: additions and the storage of
/// the result round once each, an average's division once more.
struct Reduction {
  std::vector<double> value, tolerance;
};
inline Reduction reduce_values(distributed::ReduceOp op, Dtype dtype,
                               const std::vector<std::vector<double>>& ranks) {
  Reduction r;
  for (std::size_t i = 0; i < ranks[0].size(); ++i) {
    std::vector<double> values;
    double magnitude = 0;
    for (const auto& rank : ranks) {
      values.push_back(rank[i]);
      magnitude += std::abs(rank[i]);
    }
    const bool exact =
        !is_floating(dtype) || op == distributed::ReduceOp::min || op == distributed::ReduceOp::max;
    const double roundings = static_cast<double>(ranks.size()) + 1;
    r.value.push_back(reduced(op, dtype, values));
    r.tolerance.push_back(exact ? 0 : roundings * unit_roundoff(dtype) * magnitude);
  }
  return r;
}

}  // namespace mixtape::testing
