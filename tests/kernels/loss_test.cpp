// Cross-entropy against float64: smoothing, ignored rows, reductions, bad labels.
#include "kernels/loss.h"

#include <string>

#include "engine/device_error.h"
#include "engine/thread_pool.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Case {
  std::int64_t n, v;
  float smoothing;
  bool with_ignored;
};
const Case kCases[] = {
    {0, 5, 0, false},       {1, 1, 0, false},     {3, 2, 0.1f, false},   {17, 10, 0, true},
    {128, 10, 0.1f, true},  {5, 33, 0, true},     {3, 4097, 0.2f, true}, {2, 50257, 0, false},
    {2, 50257, 0.1f, true}, {5, 512, 0.1f, true}, {3, 1024, 0, true},    {4, 2048, 0.1f, true},
    {6, 8, 0, true},        {3, 768, 0.1f, true}, {3, 1600, 0, false},   {3, 4096, 0, true},
    {3, 8192, 0.1f, false}, {2, 32768, 0, true},  {3, 50304, 0, true},   {3, 50304, 0.1f, false}};
constexpr std::int64_t kIgnore = -100;

struct Problem {
  Values logits, target;
  explicit Problem(const Case& c, Dtype dtype) : logits(normals(dtype, c.n * c.v, 1, 2)) {
    std::mt19937 generator(7);
    for (std::int64_t i = 0; i < c.n; ++i) {
      const bool ignored = c.with_ignored && i % 3 == 1;
      target.push_back(ignored ? static_cast<double>(kIgnore)
                               : static_cast<double>(generator() % static_cast<unsigned>(c.v)));
    }
  }
};

struct Reference {
  Values row_loss, lse, dlogits;  // dlogits for gradient 1 of each row
  double count = 0, sum = 0;
  Reference(const Problem& p, const Case& c) : dlogits(p.logits.size()) {
    const double s = c.smoothing;
    for (std::int64_t i = 0; i < c.n; ++i) {
      const double* x = p.logits.data() + i * c.v;
      double max = -kInfinity, total = 0, mean = 0;
      for (std::int64_t j = 0; j < c.v; ++j) max = std::max(max, x[j]);
      for (std::int64_t j = 0; j < c.v; ++j) total += std::exp(x[j] - max);
      for (std::int64_t j = 0; j < c.v; ++j) mean += x[j] / static_cast<double>(c.v);
      lse.push_back(max + std::log(total));
      const double t = p.target[static_cast<std::size_t>(i)];
      if (t == kIgnore) {
        row_loss.push_back(0);
        continue;
      }
      ++count;
      const auto k = static_cast<std::int64_t>(t);
      row_loss.push_back((1 - s) * (lse.back() - x[k]) + s * (lse.back() - mean));
      sum += row_loss.back();
      for (std::int64_t j = 0; j < c.v; ++j)
        dlogits[static_cast<std::size_t>(i * c.v + j)] =
            std::exp(x[j] - lse.back()) - s / static_cast<double>(c.v) - (j == k ? 1 - s : 0);
    }
  }
};

/// Roundings of log-sum-exp and the smoothing mean over v classes in at least 32 partial sums.
double roundings(std::int64_t v) { return static_cast<double>(v) / 32 + 40; }

Dtype statistics_dtype(Dtype dtype) { return compute_dtype(dtype); }

void run_forward(Device d, Dtype dtype, const Case& c) {
  const Problem p(c, dtype);
  const Reference want(p, c);
  const Dtype out = statistics_dtype(dtype);
  Buffer logits(d, dtype, {c.n, c.v}, p.logits), target(d, Dtype::i64, {c.n}, p.target);
  for (const bool mean : {false, true}) {
    Buffer row_loss(d, out, {c.n}), lse(d, out, {c.n}), count(d, Dtype::f32, {1}),
        loss(d, out, {1});
    CrossEntropyForward args;
    args.row_loss = row_loss.view();
    args.lse = lse.view();
    args.count = count.view();
    args.loss = loss.view();
    args.logits = logits.view();
    args.target = target.view();
    args.label_smoothing = c.smoothing;
    args.mean = mean;
    cross_entropy_forward(Stream::current(d), args);
    const double u = compute_roundoff(dtype) * roundings(c.v);  // of values up to about 20
    expect_close(row_loss.get(), want.row_loss, 20 * u, u);
    expect_close(lse.get(), want.lse, 20 * u, u);
    EXPECT_EQ(count.get()[0], want.count);
    const double total = mean ? want.sum / want.count : want.sum;
    const double rows = static_cast<double>(c.n);
    expect_close(loss.get(), {total}, (mean ? 1 : rows + 1) * 20 * u, u + rows / 32 * u);
    for (std::size_t i = 0; i < p.target.size(); ++i)
      if (p.target[i] == kIgnore) {
        EXPECT_EQ(row_loss.get()[i], 0);
      }
    for (Buffer* b : {&row_loss, &lse, &count, &loss}) b->check_guards();
  }
}

TEST(CrossEntropy, ForwardMatchesFloat64) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Case& c : kCases) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << c.n << "x" << c.v);
        run_forward(d, dtype, c);
      }
    }
  });
}

enum class Reduction { none, sum, mean };

void run_backward(Device d, Dtype dtype, const Case& c, Reduction reduction, bool in_place) {
  const Problem p(c, dtype);
  const Reference want(p, c);
  const Dtype stats = statistics_dtype(dtype);
  Buffer logits(d, dtype, {c.n, c.v}, p.logits), target(d, Dtype::i64, {c.n}, p.target);
  Buffer lse(d, stats, {c.n}, want.lse), dlogits(d, dtype, {c.n, c.v});
  Buffer count(d, Dtype::f32, {1}, Values{want.count});
  const bool per_row = reduction == Reduction::none;
  const Values g = per_row ? normals(stats, c.n, 4, 100) : Values{rounded(stats, 1024.5)};
  Buffer dy(d, stats, {static_cast<std::int64_t>(g.size())}, g);
  CrossEntropyBackward args;
  args.dlogits = in_place ? logits.view() : dlogits.view();
  args.dy = dy.view();
  if (reduction == Reduction::mean) args.count = count.view();
  args.lse = lse.view();
  args.logits = logits.view();
  args.target = target.view();
  args.label_smoothing = c.smoothing;
  cross_entropy_backward(Stream::current(d), args);
  Values expected(p.logits.size()), bound(p.logits.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::size_t row = i / static_cast<std::size_t>(c.v);
    const double scale =
        (per_row ? g[row] : g[0]) / (reduction == Reduction::mean ? want.count : 1);
    const bool ignored = p.target[row] == kIgnore;
    expected[i] = ignored ? 0 : want.dlogits[i] * scale;
    // exp(x - lse): the saved lse and the difference are rounded at a size of up to 20, and what is
    // subtracted is at most 1.
    bound[i] = ignored ? 0
                       : std::abs(scale) * 64 * compute_roundoff(dtype) +
                             std::abs(expected[i]) * unit_roundoff(dtype) +
                             (dtype == Dtype::f16 ? 0x1p-25 : 0);
  }
  Buffer& out = in_place ? logits : dlogits;
  expect_close(out.get(), expected, bound);
  out.check_guards();
}

TEST(CrossEntropy, BackwardMatchesFloat64) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Case& c : kCases) {
        for (Reduction r : {Reduction::none, Reduction::sum, Reduction::mean}) {
          if (c.n == 0 && r != Reduction::sum) continue;
          SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << c.n << "x" << c.v
                                            << " reduction " << static_cast<int>(r));
          run_backward(d, dtype, c, r, false);
          run_backward(d, dtype, c, r, true);
        }
      }
    }
  });
}

CrossEntropyForward forward_args(Buffer& row_loss, Buffer& lse, Buffer& logits, Buffer& target) {
  CrossEntropyForward args;
  args.row_loss = row_loss.view();
  args.lse = lse.view();
  args.logits = logits.view();
  args.target = target.view();
  return args;
}

TEST(CrossEntropy, BadLabelIsAnErrorAndWritesNothingOutOfBounds) {  // case 26
  on_each_device([](Device d) {
    for (double bad : {-4.0, 5.0, 1e15}) {
      Buffer logits(d, Dtype::f32, {3, 5}, normals(Dtype::f32, 15, 1));
      Buffer target(d, Dtype::i64, {3}, Values{0, bad, -1});
      Buffer row_loss(d, Dtype::f32, {3}), lse(d, Dtype::f32, {3}), dlogits(d, Dtype::f32, {3, 5});
      Buffer dy(d, Dtype::f32, {3}, Values{1, 1, 1});
      CrossEntropyForward args = forward_args(row_loss, lse, logits, target);
      args.ignore_index = -1;
      const Stream stream = Stream::current(d);
      try {
        cross_entropy_forward(stream, args);
        stream.synchronize();
        FAIL() << "label " << bad << " was accepted";
      } catch (const Error& e) {
        const std::string text = e.what();
        EXPECT_NE(text.find("cross_entropy"), std::string::npos) << text;
        EXPECT_NE(text.find(std::to_string(static_cast<std::int64_t>(bad))), std::string::npos)
            << text;
        if (d.is_cpu()) {
          EXPECT_NE(text.find("expected a class in [0, 5) or ignore_index -1, got "),
                    std::string::npos)
              << text;
        }
      }
      row_loss.check_guards();
      lse.check_guards();
    }
  });
}

TEST(CrossEntropy, IgnoredRowsAreExactlyZeroEvenWithBadLogits) {
  on_each_device([](Device d) {
    Buffer logits(d, Dtype::f32, {2, 3}, Values{kNaN, kInfinity, 1, 1, 2, 3});
    Buffer target(d, Dtype::i64, {2}, Values{-100, 2});
    Buffer row_loss(d, Dtype::f32, {2}), lse(d, Dtype::f32, {2}), dlogits(d, Dtype::f32, {2, 3});
    CrossEntropyForward args = forward_args(row_loss, lse, logits, target);
    cross_entropy_forward(Stream::current(d), args);
    EXPECT_EQ(row_loss.get()[0], 0);
    EXPECT_NEAR(row_loss.get()[1], 0.40760596444438, 8 * 0x1p-24);
    Buffer dy(d, Dtype::f32, {1}, Values{kInfinity});
    CrossEntropyBackward back;
    back.dlogits = dlogits.view();
    back.dy = dy.view();
    back.lse = lse.view();
    back.logits = logits.view();
    back.target = target.view();
    cross_entropy_backward(Stream::current(d), back);
    for (std::size_t j = 0; j < 3; ++j) EXPECT_EQ(dlogits.get()[j], 0);
  });
}

TEST(CrossEntropy, MeanOverNoRowsIsNan) {
  on_each_device([](Device d) {
    Buffer logits(d, Dtype::f32, {2, 3}, Values(6, 1.0)),
        target(d, Dtype::i64, {2}, Values{-100, -100});
    Buffer row_loss(d, Dtype::f32, {2}), lse(d, Dtype::f32, {2}), loss(d, Dtype::f32, {1}),
        count(d, Dtype::f32, {1});
    CrossEntropyForward args = forward_args(row_loss, lse, logits, target);
    args.loss = loss.view();
    args.count = count.view();
    args.mean = true;
    cross_entropy_forward(Stream::current(d), args);
    EXPECT_TRUE(std::isnan(loss.get()[0]));
    EXPECT_EQ(count.get()[0], 0);
  });
}

TEST(CrossEntropy, HalfLogitsAndScaledGradientStayFinite) {  // case 55
  on_each_device([](Device d) {
    Buffer logits(d, Dtype::f16, {1, 3}, Values{10, -10, 9.5}),
        target(d, Dtype::i64, {1}, Values{1});
    Buffer row_loss(d, Dtype::f32, {1}), lse(d, Dtype::f32, {1}), loss(d, Dtype::f32, {1});
    CrossEntropyForward args = forward_args(row_loss, lse, logits, target);
    args.loss = loss.view();
    cross_entropy_forward(Stream::current(d), args);
    EXPECT_NEAR(loss.get()[0], 20.4740769842, 20 * 8 * 0x1p-24);
    EXPECT_TRUE(std::isfinite(loss.get()[0] * 65536));
  });
}

TEST(CrossEntropy, RunsAndThreadCountsAreBitEqual) {
  const int threads = num_threads();
  on_each_device([](Device d) {
    const Case c{67, 501, 0.1f, true};
    const Problem p(c, Dtype::f32);
    Values first, first_rows;
    for (int n : {1, 2, 3, 3}) {
      set_num_threads(n);
      Buffer logits(d, Dtype::f32, {c.n, c.v}, p.logits), target(d, Dtype::i64, {c.n}, p.target);
      Buffer row_loss(d, Dtype::f32, {c.n}), lse(d, Dtype::f32, {c.n}), loss(d, Dtype::f32, {1});
      CrossEntropyForward args = forward_args(row_loss, lse, logits, target);
      args.loss = loss.view();
      cross_entropy_forward(Stream::current(d), args);
      if (first.empty()) {
        first = loss.get();
        first_rows = row_loss.get();
      }
      expect_same(loss.get(), first);
      expect_same(row_loss.get(), first_rows);
    }
  });
  set_num_threads(threads);
}

}  // namespace
}  // namespace mixtape::testing
