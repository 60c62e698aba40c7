// Variance on the CPU. Each dense run gets its mean and its sum of squares about that mean while it
// is in L1; runs are merged in double by the formula of Chan, Golub and LeVeque ("Updating formulae
// and a pairwise algorithm for computing sample variances", 1979). So x is read from memory once,
// and nothing cancels however large the mean.
#include <array>
#include <limits>

#include "kernels/cpu/load_store.h"
#include "kernels/cpu/reduce_loop.h"
#include "kernels/reduce.h"

namespace mixtape::kernels::cpu {

namespace {

struct Moments {
  double n, mean, m2;  // m2: sum of squared differences from mean

  void merge(const Moments& b) {
    if (b.n == 0) return;
    const double total = n + b.n, delta = b.mean - mean;
    mean += delta * (b.n / total);
    m2 += b.m2 + delta * delta * (n * b.n / total);
    n = total;
  }
  /// Of n elements with sum of (x - shift) and of its squares.
  static Moments about(double n, double shift, double sum, double squares) {
    const double m2 = squares - sum * sum / n;
    return {n, shift + sum / n, m2 < 0 ? 0 : m2};
  }
};
static_assert(sizeof(Moments) <= kMaxAccBytes);

constexpr std::int64_t kLanes = 16;

template <class C>
struct MomentReducer {
  static void init(void* acc, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) static_cast<Moments*>(acc)[i] = {0, 0, 0};
  }

  static void run(const void* data, std::int64_t n, void* acc) {
    if (n == 0) return;
    const C* x = static_cast<const C*>(data);
    const std::int64_t whole = n / kLanes * kLanes;
    std::array<double, kLanes> total{};
    for (std::int64_t i = 0; i < whole; i += kLanes)
      for (std::int64_t k = 0; k < kLanes; ++k)
        total[static_cast<std::size_t>(k)] += static_cast<double>(x[i + k]);
    for (std::int64_t i = whole; i < n; ++i) total[0] += static_cast<double>(x[i]);
    double sum = 0;
    for (double t : total) sum += t;
    const C shift = static_cast<C>(sum / static_cast<double>(n));
    // Differences fit in C: their rounding is relative to the deviation, not to the mean.
    std::array<C, kLanes> first{}, second{};
    for (std::int64_t i = 0; i < whole; i += kLanes)
      for (std::size_t k = 0; k < kLanes; ++k) {
        const C d = x[i + static_cast<std::int64_t>(k)] - shift;
        first[k] += d;
        second[k] += d * d;
      }
    for (std::int64_t i = whole; i < n; ++i) {
      const C d = x[i] - shift;
      first[0] += d;
      second[0] += d * d;
    }
    double sum_d = 0, sum_d2 = 0;
    for (std::size_t k = 0; k < kLanes; ++k) {
      sum_d += static_cast<double>(first[k]);
      sum_d2 += static_cast<double>(second[k]);
    }
    static_cast<Moments*>(acc)->merge(
        Moments::about(static_cast<double>(n), static_cast<double>(shift), sum_d, sum_d2));
  }

  static void columns(const void* data, std::int64_t row_stride, std::int64_t rows,
                      std::int64_t columns, void* acc) {
    const C* x = static_cast<const C*>(data);
    Moments* to = static_cast<Moments*>(acc);
    std::int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes)
      column_group<kLanes>(x + j, row_stride, rows, to + j);
    for (; j < columns; ++j) column_group<1>(x + j, row_stride, rows, to + j);
  }

  template <std::int64_t kWidth>
  static void column_group(const C* x, std::int64_t row_stride, std::int64_t rows, Moments* to) {
    const double n = static_cast<double>(rows);
    std::array<double, kWidth> sum{};
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::size_t k = 0; k < kWidth; ++k)
        sum[k] += static_cast<double>(x[r * row_stride + static_cast<std::int64_t>(k)]);
    std::array<C, kWidth> shift, first{}, second{};
    for (std::size_t k = 0; k < kWidth; ++k) shift[k] = static_cast<C>(sum[k] / n);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::size_t k = 0; k < kWidth; ++k) {
        const C d = x[r * row_stride + static_cast<std::int64_t>(k)] - shift[k];
        first[k] += d;
        second[k] += d * d;
      }
    for (std::size_t k = 0; k < kWidth; ++k)
      to[k].merge(Moments::about(n, static_cast<double>(shift[k]), static_cast<double>(first[k]),
                                 static_cast<double>(second[k])));
  }

  static void combine(void* acc, const void* other, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i)
      static_cast<Moments*>(acc)[i].merge(static_cast<const Moments*>(other)[i]);
  }

  static Reduction reduction() {
    return {dtype_of<C>, sizeof(Moments), init, run, columns, combine};
  }
};

}  // namespace

void var(const Stream&, View out, View mean, View x, double correction, Workspace) {
  const bool wide = x.dtype == Dtype::f64 || out.dtype == Dtype::f64;
  const Reduction reduction =
      wide ? MomentReducer<double>::reduction() : MomentReducer<float>::reduction();
  const StoreFunction store_var = store_function(Dtype::f64, out.dtype);
  const StoreFunction store_mean = mean ? store_function(Dtype::f64, mean.dtype) : nullptr;
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  reduce_loop("var", reduction, x, out, mean,
              [&](const void* acc, std::int64_t at, std::int64_t mean_at) {
                const Moments& m = *static_cast<const Moments*>(acc);
                const double divisor = m.n - correction;
                const double variance = divisor > 0 ? m.m2 / divisor : kNaN;
                store_var(&variance, element(out.data, out.dtype, at), 1, 1);
                if (!store_mean) return;
                const double average = m.n > 0 ? m.mean : kNaN;
                store_mean(&average, element(mean.data, mean.dtype, mean_at), 1, 1);
              });
}

}  // namespace mixtape::kernels::cpu
