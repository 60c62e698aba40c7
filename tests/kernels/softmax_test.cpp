// Softmax and log-softmax against float64, for every storage type; masked rows.
#include "kernels/softmax.h"

#include "engine/thread_pool.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Rows {
  std::int64_t n, c;
};
// The last line are the widths at which the CUDA kernels change how a row is divided.
const Rows kRows[] = {{0, 5},     {3, 0},     {1, 1},     {4, 1},     {3, 2},     {5, 7},
                      {2, 16},    {7, 33},    {33, 100},  {2, 4097},  {2, 50257}, {129, 64},
                      {5, 256},   {3, 512},   {3, 1000},  {3, 1024},  {2, 1028},  {2, 8192},
                      {6, 8},     {3, 768},   {3, 1600},  {2, 4096},  {3, 4100},  {3, 32768},
                      {2, 32771}, {3, 20000}, {3, 40001}, {2, 65536}, {2, 150001}};

Values reference_forward(bool log, const Values& x, const Rows& r) {
  Values y(x.size());
  for (std::int64_t i = 0; i < r.n; ++i) {
    const double* in = x.data() + i * r.c;
    double* out = y.data() + i * r.c;
    double max = -kInfinity, sum = 0;
    for (std::int64_t j = 0; j < r.c; ++j)
      max = std::isnan(in[j]) || std::isnan(max) ? kNaN : std::max(max, in[j]);
    const bool masked = max == -kInfinity;
    for (std::int64_t j = 0; j < r.c; ++j) sum += masked ? 0 : std::exp(in[j] - max);
    for (std::int64_t j = 0; j < r.c; ++j)
      out[j] = masked ? (log ? -kInfinity : 0)
                      : (log ? in[j] - max - std::log(sum) : std::exp(in[j] - max) / sum);
  }
  return y;
}

/// dx and, for the tolerance, the size of what cancels in it.
struct Backward {
  Values dx, scale;
};
Backward reference_backward(bool log, const Values& dy, const Values& y, const Rows& r) {
  Backward b{Values(y.size()), Values(y.size())};
  for (std::int64_t i = 0; i < r.n; ++i) {
    const double *g = dy.data() + i * r.c, *p = y.data() + i * r.c;
    double sum = 0, size = 0, total = 0, max = -kInfinity;
    for (std::int64_t j = 0; j < r.c; ++j) {
      const double term = log ? g[j] : g[j] * p[j];
      sum += term;
      size += std::abs(term);
      total += p[j];
      max = std::max(max, p[j]);
    }
    if (log ? max == -kInfinity : total == 0) continue;
    for (std::int64_t j = 0; j < r.c; ++j) {
      const auto k = static_cast<std::size_t>(i * r.c + j);
      const double weight = log ? std::exp(p[j]) : p[j];
      b.dx[k] = log ? g[j] - weight * sum : weight * (g[j] - sum);
      b.scale[k] = log ? std::abs(g[j]) + weight * size : weight * (std::abs(g[j]) + size);
    }
  }
  return b;
}

/// Roundings of a sum of c terms in at least 32 partial sums, with room for exp and log.
double sum_roundings(std::int64_t c) { return static_cast<double>(c) / 32 + 24; }

TEST(Softmax, ForwardMatchesFloat64) {
  on_each_device([](Device d) {
    for (const bool log : {false, true}) {
      for (Dtype dtype : kFloatingDtypes) {
        for (const Rows& r : kRows) {
          SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << r.n << "x" << r.c);
          const Values x = normals(dtype, r.n * r.c, 1, 3);
          Buffer in(d, dtype, {r.n, r.c}, x), out(d, dtype, {r.n, r.c});
          softmax_forward(Stream::current(d), log, out.view(), in.view());
          const Values want = reference_forward(log, x, r);
          const double u = compute_roundoff(dtype), store = 2 * unit_roundoff(dtype);
          // exp(x - max) inherits the rounding of x - max, of size up to 30 here. Probabilities
          // below the smallest normal half lose absolute, not relative, precision.
          const double relative = (sum_roundings(r.c) + 30) * u + store;
          const double floor = dtype == Dtype::f16 ? 0x1p-25 : 0;
          expect_close(out.get(), want, log ? 30 * sum_roundings(r.c) * u : floor, relative);
          out.check_guards();
        }
      }
    }
  });
}

TEST(Softmax, BackwardMatchesFloat64) {
  on_each_device([](Device d) {
    for (const bool log : {false, true}) {
      for (Dtype dtype : kFloatingDtypes) {
        for (const Rows& r : kRows) {
          SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << r.n << "x" << r.c);
          const Values x = normals(dtype, r.n * r.c, 1, 3);
          const Values y = rounded(dtype, reference_forward(log, x, r));
          const Values dy = normals(dtype, r.n * r.c, 2);
          Buffer g(d, dtype, {r.n, r.c}, dy), saved(d, dtype, {r.n, r.c}, y);
          Buffer dx(d, dtype, {r.n, r.c});
          softmax_backward(Stream::current(d), log, dx.view(), g.view(), saved.view());
          const Backward want = reference_backward(log, dy, y, r);
          Values bound(y.size());
          for (std::size_t i = 0; i < bound.size(); ++i)
            bound[i] = want.scale[i] * (sum_roundings(r.c) + 30) * compute_roundoff(dtype) +
                       std::abs(want.dx[i]) * unit_roundoff(dtype) +
                       (dtype == Dtype::f16 ? 0x1p-25 : 0x1p-149);
          expect_close(dx.get(), want.dx, bound);
          dx.check_guards();
        }
      }
    }
  });
}

TEST(Softmax, MixedStorageTypesAndRowStrides) {
  on_each_device([](Device d) {
    const Rows r{6, 37};
    const Values x = normals(Dtype::bf16, r.n * r.c, 1);
    Buffer in(d, Dtype::bf16, {r.n, r.c}, Shape{50, 1}, x),
        out(d, Dtype::f32, {r.n, r.c}, Shape{41, 1});
    softmax_forward(Stream::current(d), false, out.view(), in.view());
    expect_close(out.get(), reference_forward(false, x, r), 0, (sum_roundings(r.c) + 8) * 0x1p-24);
    out.check_guards();
    const Values y = out.get(), dy = normals(Dtype::f32, r.n * r.c, 2);
    Buffer g(d, Dtype::f32, {r.n, r.c}, dy), dx(d, Dtype::f16, {r.n, r.c}, Shape{40, 1});
    softmax_backward(Stream::current(d), false, dx.view(), g.view(), out.view());
    const Backward want = reference_backward(false, dy, y, r);
    Values bound(y.size());
    for (std::size_t i = 0; i < bound.size(); ++i)
      bound[i] = want.scale[i] * 60 * 0x1p-24 + std::abs(want.dx[i]) * 0x1p-11 + 0x1p-25;
    expect_close(dx.get(), want.dx, bound);
    dx.check_guards();
  });
}

TEST(Softmax, MaskedRowsAreZeroAndSendNoGradient) {  // case 24
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const bool log : {false, true}) {
        for (std::int64_t c : {1, 3, 50, 4100}) {
          const auto n = static_cast<std::size_t>(c);
          Values x(3 * n, -kInfinity);
          for (std::size_t j = 0; j < n; ++j) x[n + j] = 0.5;  // the row between is ordinary
          Buffer in(d, dtype, {3, c}, x), out(d, dtype, {3, c}), dx(d, dtype, {3, c});
          softmax_forward(Stream::current(d), log, out.view(), in.view());
          Values y = out.get();
          for (std::size_t j = 0; j < n; ++j) {
            ASSERT_EQ(y[j], log ? -kInfinity : 0);
            ASSERT_EQ(y[2 * n + j], log ? -kInfinity : 0);
            ASSERT_TRUE(std::isfinite(y[n + j]));
          }
          Values dy(3 * n, 1.0);
          dy[0] = kInfinity;  // what reaches a masked row must not matter
          dy[2 * n] = kNaN;
          Buffer g(d, dtype, {3, c}, dy);
          softmax_backward(Stream::current(d), log, dx.view(), g.view(), out.view());
          const Values got = dx.get();
          for (std::size_t j = 0; j < n; ++j) {
            ASSERT_EQ(got[j], 0);
            ASSERT_EQ(got[2 * n + j], 0);
            ASSERT_TRUE(std::isfinite(got[n + j]));
          }
        }
      }
    }
  });
}

TEST(Softmax, PartlyMaskedRowsGiveExactZerosThere) {
  on_each_device([](Device d) {
    const Values x = {1, -kInfinity, 2, -kInfinity};
    Buffer in(d, Dtype::f32, {1, 4}, x), out(d, Dtype::f32, {1, 4});
    softmax_forward(Stream::current(d), false, out.view(), in.view());
    expect_close(out.get(), {0.2689414213699951, 0, 0.7310585786300049, 0}, 0, 4 * 0x1p-24);
    EXPECT_EQ(out.get()[1], 0);
  });
}

TEST(Softmax, NanStaysInItsRow) {
  on_each_device([](Device d) {
    const Values x = {-kInfinity, kNaN, -kInfinity, 1, 2, 3};
    for (const bool log : {false, true}) {
      Buffer in(d, Dtype::f32, {2, 3}, x), out(d, Dtype::f32, {2, 3});
      softmax_forward(Stream::current(d), log, out.view(), in.view());
      const Values y = out.get();
      for (std::size_t j = 0; j < 3; ++j) {
        EXPECT_TRUE(std::isnan(y[j]));
        EXPECT_TRUE(std::isfinite(y[3 + j]));
      }
    }
  });
}

TEST(Softmax, LargeLogitsDoNotOverflow) {
  on_each_device([](Device d) {
    const Values x = {60000, 59999, -60000};
    Buffer in(d, Dtype::f32, {1, 3}, x), out(d, Dtype::f32, {1, 3});
    softmax_forward(Stream::current(d), false, out.view(), in.view());
    expect_close(out.get(), {0.7310585786300049, 0.2689414213699951, 0}, 0, 4 * 0x1p-24);
  });
}

TEST(Softmax, RunsAndThreadCountsAreBitEqual) {
  const int threads = num_threads();
  on_each_device([&](Device d) {
    const Rows r{57, 1003};
    const Values x = normals(Dtype::f32, r.n * r.c, 1), dy = normals(Dtype::f32, r.n * r.c, 2);
    for (const bool log : {false, true}) {
      Values first, first_dx;
      for (int n : {1, 2, 3, 3}) {
        set_num_threads(n);
        Buffer in(d, Dtype::f32, {r.n, r.c}, x), out(d, Dtype::f32, {r.n, r.c});
        Buffer g(d, Dtype::f32, {r.n, r.c}, dy), dx(d, Dtype::f32, {r.n, r.c});
        softmax_forward(Stream::current(d), log, out.view(), in.view());
        softmax_backward(Stream::current(d), log, dx.view(), g.view(), out.view());
        if (first.empty()) {
          first = out.get();
          first_dx = dx.get();
        }
        expect_same(out.get(), first);
        expect_same(dx.get(), first_dx);
      }
    }
  });
  set_num_threads(threads);
}

}  // namespace
}  // namespace mixtape::testing
