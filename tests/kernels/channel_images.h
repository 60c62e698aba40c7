// What the tests of batch and group normalisation share: (N, C, S) problems in both layouts, and
// the sizes that tolerances are made of.
#pragma once

#include <cmath>
#include <vector>

#include "tests/kernels/device_array.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {

using Values = std::vector<double>;
inline constexpr double kEps = 1e-5;

struct ChannelCase {
  std::int64_t n, c, s;
  Shape sizes() const { return {n, c, s}; }
  Shape strides(bool last) const { return last ? Shape{c * s, 1, c} : Shape{c * s, s, 1}; }
  std::int64_t numel() const { return n * c * s; }
  std::size_t channel_of(std::size_t i) const {
    return static_cast<std::size_t>(static_cast<std::int64_t>(i) / s % c);
  }
  double values() const { return static_cast<double>(n * s); }  // of one channel
};

/// One sample, one channel, odd channel counts, no samples, planes that vectors do and do not fit,
/// and enough values for several chunks and blocks.
inline const ChannelCase kChannelCases[] = {{1, 1, 7},     {2, 1, 1},    {1, 65, 9},   {5, 65, 1},
                                            {3, 4, 49},    {0, 3, 4},    {2, 8, 16},   {8, 64, 32},
                                            {2, 3, 5000},  {9, 264, 12}, {300, 33, 3}, {3, 8, 1568},
                                            {1500, 16, 2}, {2, 2048, 4}};

/// Roundings of a sum of `terms` terms in the kernels' partial sums: no run of plain float
/// additions is longer.
inline double sum_roundings(double terms) { return std::min(terms, 512.0) + 24; }

struct ImageBuffer {
  Buffer buffer;
  ImageBuffer(Device d, Dtype dtype, const ChannelCase& k, bool last)
      : buffer(d, dtype, k.sizes(), k.strides(last)) {}
  ImageBuffer(Device d, Dtype dtype, const ChannelCase& k, bool last, const Values& values)
      : buffer(d, dtype, k.sizes(), k.strides(last), values) {}
  View view() const { return buffer.view(); }
  Values get() { return buffer.get(); }
  void check_guards() { buffer.check_guards(); }
};

}  // namespace mixtape::testing
