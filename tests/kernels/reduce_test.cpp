// Reductions against references in long double: every subset of dimensions, strides, dtype and op;
// long sums, NaN and empty cases; variance about a large mean; argmax's first index.
#include "kernels/reduce.h"

#include <algorithm>
#include <functional>

#include "tests/kernels/layouts.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Input {
  const char* name;
  Shape sizes, strides;
};
std::vector<Input> inputs() {
  return {
      {"number", {}, {}},
      {"one", {1}, {1}},
      {"vector", {1000}, {1}},
      {"long_vector", {70'001}, {1}},
      {"step_vector", {700}, {3}},
      {"matrix", {37, 300}, {300, 1}},
      {"narrow", {1500, 10}, {10, 1}},
      {"wide", {5, 2600}, {2600, 1}},
      {"sliced", {37, 60}, {100, 1}},
      {"transposed", {60, 37}, {1, 60}},
      {"images", {3, 5, 7, 9}, {315, 63, 9, 1}},
      {"permuted", {5, 3, 9, 7}, {63, 315, 1, 9}},
      {"short_rows", {40, 6, 3}, {18, 3, 1}},
      {"expanded", {20, 30, 4}, {4, 0, 1}},
      {"expanded_inner", {20, 30}, {1, 0}},
      {"ones", {1, 50, 1, 4}, {7, 4, 9, 1}},
  };
}

/// Sizes of the result when the dimensions in `mask` are reduced.
Shape kept_sizes(const Shape& sizes, unsigned mask) {
  Shape out = sizes;
  for (int d = 0; d < out.size(); ++d)
    if (mask >> d & 1u) out[d] = 1;
  return out;
}

/// The elements that go into each output, in row-major order.
std::vector<Values> groups(const Values& x, const Shape& sizes, unsigned mask) {
  const Shape kept = kept_sizes(sizes, mask), strides = contiguous_strides(kept);
  std::vector<Values> all(static_cast<std::size_t>(kept.numel()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i), at = 0;
    for (int d = sizes.size() - 1; d >= 0; --d) {
      if (!(mask >> d & 1u)) at += rest % sizes[d] * strides[d];
      rest /= sizes[d];
    }
    all[static_cast<std::size_t>(at)].push_back(x[i]);
  }
  return all;
}

double exact_sum(const Values& v) {
  long double s = 0;
  for (double x : v) s += x;
  return static_cast<double>(s);
}
double size_sum(const Values& v) {
  double s = 0;
  for (double x : v) s += std::fabs(x);
  return s;
}
/// Rounding errors of a blocked sum of n terms, in units of u * sum |x|.
double sum_roundings(std::size_t n) {
  return std::min(static_cast<double>(n), 64 + std::log2(static_cast<double>(n + 1)));
}
double maximum_of(const Values& v) {
  double m = v.at(0);
  for (double x : v) m = std::isnan(m) || std::isnan(x) ? kNaN : std::max(m, x);
  return m;
}
double minimum_of(const Values& v) {
  double m = v.at(0);
  for (double x : v) m = std::isnan(m) || std::isnan(x) ? kNaN : std::min(m, x);
  return m;
}

struct Scratch {
  Device device;
  Block block;
  Workspace workspace;
  Scratch(const View& out, const View& x) : device(x.device) {
    const std::size_t bytes = reduce_workspace_bytes(out, x);
    block = allocator_of(device).allocate(bytes, Stream::current(device));
    workspace = {block.data, bytes};
  }
  ~Scratch() { allocator_of(device).release(block); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

class Reduce : public ::testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Stream stream() const { return Stream::current(device()); }
  Values run(ReduceOp op, Buffer& out, const Buffer& x) {
    const Scratch scratch(out.view(), x.view());
    reduce(stream(), op, out.view(), x.view(), scratch.workspace);
    out.check_guards();
    return out.get();
  }
  Values run_var(Buffer& out, Buffer* mean, const Buffer& x, double correction) {
    const Scratch scratch(out.view(), x.view());
    var(stream(), out.view(), mean ? mean->view() : View{}, x.view(), correction,
        scratch.workspace);
    out.check_guards();
    if (mean) mean->check_guards();
    return out.get();
  }
  template <class F>
  void for_each_case(F&& f) {
    for (const Input& in : inputs())
      for (unsigned mask = 0; mask < 1u << in.sizes.size(); ++mask) {
        SCOPED_TRACE(std::string(in.name) + " mask " + std::to_string(mask));
        f(in, mask);
        if (HasFailure()) return;
      }
  }
};

TEST_P(Reduce, SumsAndMeansOverEverySubsetOfDimensions) {
  for (Dtype dtype : kFloatingDtypes) {
    for_each_case([&](const Input& in, unsigned mask) {
      const Dtype out_dtype = mask % 2 == 0 ? dtype : compute_dtype(dtype);
      Buffer x(device(), dtype, in.sizes, in.strides, normals(dtype, in.sizes.numel(), 31, 2, 0.5));
      const std::vector<Values> parts = groups(x.get(), in.sizes, mask);
      Values sums, means, sum_bound, mean_bound;
      for (const Values& v : parts) {
        const double n = static_cast<double>(v.size());
        sums.push_back(exact_sum(v));
        means.push_back(sums.back() / n);
        const double error = (sum_roundings(v.size()) + 2) * compute_roundoff(dtype) * size_sum(v);
        sum_bound.push_back(unit_roundoff(out_dtype) * std::fabs(sums.back()) + error);
        mean_bound.push_back(unit_roundoff(out_dtype) * std::fabs(means.back()) + error / n +
                             0x1p-24 * unit_roundoff(out_dtype));
      }
      Buffer out(device(), out_dtype, kept_sizes(in.sizes, mask));
      expect_close(run(ReduceOp::sum, out, x), sums, sum_bound);
      expect_close(run(ReduceOp::mean, out, x), means, mean_bound);
    });
  }
}

TEST_P(Reduce, MaxAndMinAreExactAndPropagateNaN) {
  for (Dtype dtype : {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16, Dtype::i64, Dtype::u8}) {
    for (bool with_nan : {false, true}) {
      if (with_nan && !is_floating(dtype)) continue;
      for_each_case([&](const Input& in, unsigned mask) {
        Values v = normals(is_floating(dtype) ? dtype : Dtype::f32, in.sizes.numel(), 32, 40);
        for (std::size_t i = 0; i < v.size(); ++i) {
          if (!is_floating(dtype)) v[i] = std::trunc(std::fabs(v[i]));
          if (with_nan && i % 997 == 5) v[i] = kNaN;
        }
        Buffer x(device(), dtype, in.sizes, in.strides, v);
        Values largest, smallest;
        for (const Values& g : groups(x.get(), in.sizes, mask)) {
          largest.push_back(maximum_of(g));
          smallest.push_back(minimum_of(g));
        }
        Buffer out(device(), dtype, kept_sizes(in.sizes, mask));
        expect_same(run(ReduceOp::max, out, x), largest);
        expect_same(run(ReduceOp::min, out, x), smallest);
      });
    }
  }
}

TEST_P(Reduce, AnyAndAll) {
  for (Dtype dtype : {Dtype::b8, Dtype::u8, Dtype::i64, Dtype::f32, Dtype::f64, Dtype::f16}) {
    for (double density : {0.001, 0.999}) {
      for_each_case([&](const Input& in, unsigned mask) {
        std::mt19937 generator(7);
        Values v(static_cast<std::size_t>(in.sizes.numel()));
        for (double& x : v) x = std::bernoulli_distribution(density)(generator);
        Buffer x(device(), dtype, in.sizes, in.strides, v);
        Values any, all;
        for (const Values& g : groups(x.get(), in.sizes, mask)) {
          any.push_back(maximum_of(g) != 0);
          all.push_back(minimum_of(g) != 0);
        }
        Buffer out(device(), Dtype::b8, kept_sizes(in.sizes, mask));
        expect_same(run(ReduceOp::any, out, x), any);
        expect_same(run(ReduceOp::all, out, x), all);
      });
    }
  }
}

TEST_P(Reduce, AnyCountsNaNAndTinyNumbers) {
  Buffer x(device(), Dtype::f64, {4, 1}, Values{0, 1e-300, kNaN, -0.0}),
      out(device(), Dtype::b8, {4, 1});
  Buffer each(device(), Dtype::b8, {1, 1});
  expect_same(run(ReduceOp::any, out, x), {0, 1, 1, 0});
  expect_same(run(ReduceOp::any, each, x), {1});
  expect_same(run(ReduceOp::all, each, x), {0});
}

TEST_P(Reduce, IntegerSumsAreExact) {
  const double big = 4503599627370497.0;  // 2^52 + 1
  Buffer x(device(), Dtype::i64, {2, 3}, Values{big, 1, 2, -big, 5, 6});
  Buffer rows(device(), Dtype::i64, {2, 1}), columns(device(), Dtype::i64, {1, 3});
  expect_same(run(ReduceOp::sum, rows, x), {big + 3, -big + 11});
  expect_same(run(ReduceOp::sum, columns, x), {0, 6, 8});
  const std::int64_t n = 100'000;
  Buffer bytes(device(), Dtype::u8, {n}, Values(n, 255.0)),
      truth(device(), Dtype::b8, {n}, Values(n, 1.0));
  Buffer total(device(), Dtype::i64, {1}), average(device(), Dtype::f32, {1});
  expect_same(run(ReduceOp::sum, total, bytes), {255.0 * n});
  expect_same(run(ReduceOp::sum, total, truth), {1.0 * n});
  expect_same(run(ReduceOp::mean, average, bytes), {255});
}

// CASES 18: an accumulator in the storage type overflows or stalls.
TEST_P(Reduce, SixteenBitSumsDoNotOverflowOrStall) {
  Buffer x(device(), Dtype::f16, {8},
           Values{32000, 32000, 32000, 32000, -32000, -32000, -32000, -32000});
  Buffer out(device(), Dtype::f16, {1});
  expect_same(run(ReduceOp::sum, out, x), {0});
  for (const Shape& sizes : {Shape{20000, 1}, Shape{1, 20000}}) {
    Buffer ones(device(), Dtype::f16, sizes, Values(20000, 1.0)), sum(device(), Dtype::f16, {1, 1});
    expect_same(run(ReduceOp::sum, sum, ones), {20000});
  }
  Buffer columns(device(), Dtype::f16, {5000, 3}, Values(15000, 1.0)),
      sums(device(), Dtype::f16, {1, 3});
  expect_same(run(ReduceOp::sum, sums, columns), {5000, 5000, 5000});
  Buffer ones(device(), Dtype::bf16, {70000}, Values(70000, 1.0)), sum(device(), Dtype::bf16, {1});
  expect_same(run(ReduceOp::sum, sum, ones), {70144});
  expect_same(run(ReduceOp::mean, sum, ones), {1});
}

TEST_P(Reduce, TenMillionTermsStayAccurate) {
  const std::int64_t n = 10'000'000;
  Buffer x(device(), Dtype::f32, {n}, Values(n, 0.1)), out(device(), Dtype::f32, {1});
  const double exact = static_cast<double>(0.1f) * n;
  EXPECT_NEAR(run(ReduceOp::sum, out, x)[0], exact, (1 + sum_roundings(n)) * 0x1p-24 * exact);
  View matrix = x.view();
  matrix.sizes = {n / 4, 4};
  matrix.strides = {4, 1};
  Buffer columns(device(), Dtype::f32, {1, 4});
  const Scratch scratch(columns.view(), matrix);
  reduce(stream(), ReduceOp::sum, columns.view(), matrix, scratch.workspace);
  for (double s : columns.get())
    EXPECT_NEAR(s, exact / 4, (1 + sum_roundings(n / 4)) * 0x1p-24 * exact / 4);
}

TEST_P(Reduce, EmptyReductions) {
  Buffer x(device(), Dtype::f32, {3, 0}), out(device(), Dtype::f32, {3, 1}),
      flags(device(), Dtype::b8, {3, 1});
  expect_same(run(ReduceOp::sum, out, x), {0, 0, 0});
  expect_same(run(ReduceOp::mean, out, x), {kNaN, kNaN, kNaN});
  expect_same(run_var(out, nullptr, x, 1), {kNaN, kNaN, kNaN});
  expect_same(run(ReduceOp::any, flags, x), {0, 0, 0});
  expect_same(run(ReduceOp::all, flags, x), {1, 1, 1});
  Buffer none(device(), Dtype::f32, {1, 0});
  EXPECT_TRUE(run(ReduceOp::sum, none, x).empty());
  EXPECT_TRUE(run(ReduceOp::max, none, x).empty());
}

TEST_P(Reduce, InfinitiesAndNaNReachTheSum) {
  Values v(3000, 1.0);
  Buffer x(device(), Dtype::f32, {3000}), out(device(), Dtype::f32, {1});
  v[2500] = kInfinity;
  x.set(v);
  expect_same(run(ReduceOp::sum, out, x), {kInfinity});
  v[7] = -kInfinity;
  x.set(v);
  expect_same(run(ReduceOp::sum, out, x), {kNaN});
  expect_same(run(ReduceOp::max, out, x), {kInfinity});
  expect_same(run(ReduceOp::min, out, x), {-kInfinity});
}

TEST_P(Reduce, WritesStridedOutputs) {
  Buffer x(device(), Dtype::f32, {4, 3, 50}, normals(Dtype::f32, 600, 33));
  Buffer dense(device(), Dtype::f32, {4, 3, 1}),
      strided(device(), Dtype::f32, {4, 3, 1}, Shape{2, 9, 1});
  expect_same(run(ReduceOp::sum, strided, x), run(ReduceOp::sum, dense, x));
  Buffer dense_columns(device(), Dtype::f32, {4, 1, 50});
  Buffer strided_columns(device(), Dtype::f32, {4, 1, 50}, Shape{1, 1, 4});
  expect_same(run(ReduceOp::sum, strided_columns, x), run(ReduceOp::sum, dense_columns, x));
}

TEST_P(Reduce, VarianceOverEverySubsetOfDimensions) {
  for (Dtype dtype : kFloatingDtypes) {
    for (double mean : {0.0, 1000.0}) {
      for_each_case([&](const Input& in, unsigned mask) {
        Buffer x(device(), dtype, in.sizes, in.strides,
                 normals(dtype, in.sizes.numel(), 34, 2, mean));
        const Dtype out_dtype = compute_dtype(dtype);
        const double u = unit_roundoff(out_dtype);
        for (double correction : {0.0, 1.0}) {
          Values want, want_mean, bound, mean_bound;
          for (const Values& v : groups(x.get(), in.sizes, mask)) {
            const long double n = static_cast<long double>(v.size());
            long double average = 0, squares = 0;
            for (double e : v) average += e / n;
            for (double e : v) squares += (e - average) * (e - average);
            const double variance =
                n > correction ? static_cast<double>(squares / (n - correction)) : kNaN;
            const double rounded_mean = u * std::fabs(static_cast<double>(average));
            want.push_back(variance);
            want_mean.push_back(static_cast<double>(average));
            const double roundings = sum_roundings(v.size()) + 8;
            bound.push_back(roundings * u * variance + 4 * rounded_mean * std::sqrt(variance) +
                            16 * rounded_mean * rounded_mean);
            mean_bound.push_back((roundings + 1) * u * size_sum(v) / static_cast<double>(n));
          }
          Buffer out(device(), out_dtype, kept_sizes(in.sizes, mask));
          Buffer means(device(), out_dtype, kept_sizes(in.sizes, mask));
          expect_close(run_var(out, &means, x, correction), want, bound);
          expect_close(means.get(), want_mean, mean_bound);
        }
      });
    }
  }
}

// CASES 20: E[x^2] - E[x]^2 gives 0.375 in float.
TEST_P(Reduce, VarianceAboutALargeMean) {
  Values row(16);
  for (int i = 0; i < 16; ++i) row[static_cast<std::size_t>(i)] = 1000 + i * 1e-3;
  Buffer x(device(), Dtype::f32, {16}, row), out(device(), Dtype::f32, {1});
  const Values stored = x.get();
  double average = exact_sum(stored) / 16, variance = 0;
  for (double v : stored) variance += (v - average) * (v - average) / 16;
  EXPECT_NEAR(run_var(out, nullptr, x, 0)[0], variance, 1e-3 * variance);
  // A constant has variance exactly 0 (CASES 32 takes its root).
  for (std::int64_t n : {3, 64, 5000}) {
    Buffer same(device(), Dtype::f32, {n}, Values(static_cast<std::size_t>(n), 0.1));
    expect_same(run_var(out, nullptr, same, 1), {0});
  }
  Buffer one(device(), Dtype::f32, {1}, Values{5});
  expect_same(run_var(out, nullptr, one, 1), {kNaN});
  expect_same(run_var(out, nullptr, one, 0), {0});
}

TEST_P(Reduce, ArgReduceFindsTheFirstBestAlongEveryDimension) {
  for (Dtype dtype :
       {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16, Dtype::i64, Dtype::i32, Dtype::u8}) {
    for (bool with_nan : {false, true}) {
      if (with_nan && !is_floating(dtype)) continue;
      for (const Input& in : inputs()) {
        for (int dim = 0; dim < in.sizes.size(); ++dim) {
          for (bool largest : {true, false}) {
            SCOPED_TRACE(std::string(in.name) + " dim " + std::to_string(dim) + " " +
                         std::string(name_of(dtype)));
            Values v = normals(Dtype::f32, in.sizes.numel(), 35, 3);
            for (std::size_t i = 0; i < v.size(); ++i) {
              v[i] = std::trunc(v[i]);  // many ties
              if (dtype == Dtype::u8) v[i] = std::fabs(v[i]);
              if (with_nan && i % 701 > 698) v[i] = kNaN;
            }
            Buffer x(device(), dtype, in.sizes, in.strides, v);
            const Shape kept = kept_sizes(in.sizes, 1u << dim);
            Buffer values(device(), dtype, kept), indices(device(), Dtype::i64, kept);
            arg_reduce(stream(), largest, values.view(), indices.view(), x.view(), dim);
            Values want, want_index;
            for (const Values& g : groups(x.get(), in.sizes, 1u << dim)) {
              const double best = largest ? maximum_of(g) : minimum_of(g);
              const auto at = std::find_if(g.begin(), g.end(), [&](double e) {
                return e == best || (std::isnan(e) && std::isnan(best));
              });
              want.push_back(*at);
              want_index.push_back(static_cast<double>(at - g.begin()));
            }
            expect_same(indices.get(), want_index);
            Values got = values.get();
            for (double& e : got) e += 0.0;  // either zero of a tie
            for (double& e : want) e += 0.0;
            expect_same(got, want);
            values.check_guards();
            indices.check_guards();
            indices.set(Values(want.size(), -1.0));
            arg_reduce(stream(), largest, View{}, indices.view(), x.view(), dim);
            expect_same(indices.get(), want_index);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(Reduce, ArgReduceOfALongRow) {
  const std::int64_t n = 1'000'003;
  Values v = normals(Dtype::f32, n, 36);
  v[654'321] = v[999'999] = 100;
  Buffer x(device(), Dtype::f32, {n}, v), indices(device(), Dtype::i64, {1});
  arg_reduce(stream(), true, View{}, indices.view(), x.view(), 0);
  expect_same(indices.get(), {654'321});
  Buffer flat(device(), Dtype::i64, {n}, Values(n, 7.0));
  arg_reduce(stream(), false, View{}, indices.view(), flat.view(), 0);
  expect_same(indices.get(), {0});
}

TEST_P(Reduce, RunsAndThreadCountsAreBitEqual) {
  Buffer x(device(), Dtype::f32, {700, 900}, normals(Dtype::f32, 630'000, 37));
  Values first;
  for_thread_counts([&](int) {
    Values all;
    for (const Shape& kept : {Shape{1, 1}, Shape{700, 1}, Shape{1, 900}}) {
      Buffer out(device(), Dtype::f32, kept);
      for (const Values& v :
           {run(ReduceOp::sum, out, x), run(ReduceOp::mean, out, x), run_var(out, nullptr, x, 1)})
        all.insert(all.end(), v.begin(), v.end());
    }
    if (first.empty()) first = all;
    expect_same(all, first);
  });
}

TEST_P(Reduce, WrongCallsThrow) {
  Buffer x(device(), Dtype::f32, {2, 0}), out(device(), Dtype::f32, {2, 1}),
      wrong(device(), Dtype::f32, {3, 1});
  Buffer indices(device(), Dtype::i64, {2, 1});
  EXPECT_THROW(reduce(stream(), ReduceOp::max, out.view(), x.view(), {}), Error);
  EXPECT_THROW(reduce(stream(), ReduceOp::sum, wrong.view(), x.view(), {}), Error);
  EXPECT_THROW(arg_reduce(stream(), true, View{}, indices.view(), x.view(), 1), Error);
}

INSTANTIATE_TEST_SUITE_P(Devices, Reduce, ::testing::ValuesIn(test_devices()),
                         [](const auto& info) { return device_name(info.param); });

}  // namespace
}  // namespace mixtape::testing
