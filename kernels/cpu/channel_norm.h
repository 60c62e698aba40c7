// What batch and group normalisation share on the CPU: moments that can be merged, and rows
// worked on with either one channel's numbers (planar) or a number for each column (channels-last).
#pragma once

#include <array>
#include <cmath>

#include "kernels/channels.h"
#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"
#include "kernels/kernel.h"

namespace mixtape::kernels::cpu {

/// Count, mean and sum of squares about the mean of some values; parts are merged as Chan, Golub
/// and LeVeque (1979) do, so that nothing cancels.
struct Moments {
  double count = 0, mean = 0, squares = 0;

  void merge(const Moments& more) {
    if (more.count == 0) return;
    const double total = count + more.count, delta = more.mean - mean;
    mean += delta * (more.count / total);
    squares += more.squares + delta * delta * (count * more.count / total);
    count = total;
  }
  double variance() const { return squares / count; }
};

/// Of a run: deviations from its own rounded mean are exact where it matters.
template <class C>
Moments run_moments(const C* x, std::int64_t n) {
  using P = RowPacket<C>;
  Moments all;
  for (std::int64_t begin = 0; begin < n; begin += kSumBlock) {
    const std::int64_t count = std::min(n - begin, kSumBlock);
    const C* const from = x + begin;
    const double d = static_cast<double>(count);
    const C mean =
        static_cast<C>(row_sums<C, 1>(count,
                                      [&](std::int64_t i, int valid) {
                                        return std::array{P::load(from + i, valid, C(0))};
                                      })[0] /
                       d);
    const auto shift = P::splat(mean);
    const auto [sum, squares] = row_sums<C, 2>(count, [&](std::int64_t i, int valid) {
      const auto e = P::load(from + i, valid, mean) - shift;
      return std::array{e, e * e};
    });
    all.merge({d, static_cast<double>(mean) + sum / d, squares - sum * (sum / d)});
  }
  return all;
}

inline double rstd_of(double variance, double eps) {  // NaN stays NaN
  return 1 / std::sqrt((variance < 0 ? 0 : variance) + eps);
}

/// One element of a floating vector, as double.
inline double read_one(const View& v, std::int64_t i) {
  double value = 0;
  load_elements(v.dtype, element_address(v.data, v.dtype, i), &value, 1);
  return value;
}
inline void write_one(const View& v, std::int64_t i, double value) {
  store_elements(v.dtype, element_address(v.data, v.dtype, i), &value, 1);
}
inline double read_one_or(const View& v, std::int64_t i, double otherwise) {
  return v ? read_one(v, i) : otherwise;
}

/// A number of the channel at hand: the same for a whole planar row, column i's for channels-last.
template <class C, bool kColumns>
class ChannelNumber {
 public:
  using P = RowPacket<C>;
  using V = typename P::V;
  explicit ChannelNumber(const C* p) : p_(p), value_(P::splat(kColumns ? C(0) : *p)) {}
  V at(std::int64_t i, int valid) const {
    if constexpr (kColumns)
      return P::load(p_ + i, valid, C(0));
    else
      return value_;
  }

 private:
  const C* p_;
  V value_;
};

}  // namespace mixtape::kernels::cpu
