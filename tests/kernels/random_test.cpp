// Philox against Random123's published vectors; draws against the scalar formulas, bit for bit;
// their ranges, moments and independence; dropout's mask.
#include "kernels/random.h"

#include <algorithm>

#include "kernels/random_math.h"
#include "tests/kernels/layouts.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

// philox4x32-10 of Random123's kat_vectors. The published all-ones counter has upper words that a
// draw leaves at zero, so the full cipher is written out here and compared with both.
Philox4 reference_philox(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                         std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const auto high = [](std::uint64_t p) { return static_cast<std::uint32_t>(p >> 32); };
    c0 = high(p1) ^ c1 ^ k0;
    c2 = high(p0) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
void expect_words(const Philox4& got, std::initializer_list<std::uint32_t> want) {
  int i = 0;
  for (std::uint32_t w : want) EXPECT_EQ(got.v[i++], w);
}

TEST(Philox, MatchesThePublishedVectors) {
  const std::uint32_t ones = 0xFFFFFFFFu;
  expect_words(reference_philox(0, 0, 0, 0, 0, 0),
               {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect_words(reference_philox(ones, ones, ones, ones, ones, ones),
               {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect_words(
      reference_philox(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0),
      {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  expect_words(philox({0, 0}, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const PhiloxState state{0x299f31d0a4093822u, 0x85a308d3243f6a80u};
  for (std::uint32_t b : {0u, 8u, 1000u}) {
    const Philox4 want =
        reference_philox(0x243f6a80u + b, 0x85a308d3, 0, 0, 0xa4093822, 0x299f31d0);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(philox(state, b).v[i], want.v[i]);
  }
}

class Random : public ::testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Stream stream() const { return Stream::current(device()); }
  Values uniforms(Dtype dtype, std::int64_t n, PhiloxState state, double lo, double hi) {
    Buffer out(device(), dtype, {n});
    uniform(stream(), out.view(), state, lo, hi);
    out.check_guards();
    return out.get();
  }
  Values standard_normals(Dtype dtype, std::int64_t n, PhiloxState state, double mean = 0,
                          double std = 1) {
    Buffer out(device(), dtype, {n});
    normal(stream(), out.view(), state, mean, std);
    out.check_guards();
    return out.get();
  }
};

std::uint32_t word(PhiloxState s, std::int64_t i) {
  return philox(s, static_cast<std::uint64_t>(i) / 4).v[i % 4];
}

// Offsets around 2^32 carry into the counter's second word.
const PhiloxState kStates[] = {
    {0, 0}, {42, 7}, {0xDEADBEEF12345678u, 0xFFFFFFF0u}, {1, ~std::uint64_t{0} - 100}};

TEST_P(Random, UniformsAreThoseOfTheFormulaBitForBit) {
  for (const PhiloxState& state : kStates) {
    for (std::int64_t n : {0, 1, 3, 64, 1025, 40'000}) {
      const Values got = uniforms(Dtype::f32, n, state, 0, 1);
      Values want;
      for (std::int64_t i = 0; i < n; ++i)
        want.push_back(philox_uniform(state, static_cast<std::uint64_t>(i)));
      expect_same(got, want);
    }
  }
}

TEST_P(Random, UniformsStayBelowTheUpperBoundInEveryDtype) {
  const std::int64_t n = 200'000;
  for (Dtype dtype : kFloatingDtypes) {
    for (auto [lo, hi] :
         {std::pair{0.0, 1.0}, {-3.0, 3.0}, {1.0, 1.001}, {-2.0, -1.0}, {0.1, 0.7}}) {
      const Values v = uniforms(dtype, n, {3, 0}, lo, hi);
      const auto [least, most] = std::minmax_element(v.begin(), v.end());
      EXPECT_GE(*least, rounded(dtype, lo)) << name_of(dtype);
      EXPECT_LT(*most, hi) << name_of(dtype);
    }
  }
  expect_same(uniforms(Dtype::f32, 5, {3, 0}, 2, 2), Values(5, 2.0));
}

TEST_P(Random, NormalsFollowBoxMullerWithinFourUlp) {
  const std::int64_t n = 50'000;
  for (const PhiloxState& state : kStates) {
    const Values got = standard_normals(Dtype::f32, n, state);
    for (std::int64_t i = 0; i < n; i += 2) {
      const double u1 = 1 - static_cast<double>(uniform_from_bits(word(state, i)));
      const double u2 = static_cast<double>(uniform_from_bits(word(state, i + 1)));
      const double r = std::sqrt(-2 * std::log(u1)), theta = 2 * M_PI * u2;
      const double want[2] = {r * std::cos(theta), r * std::sin(theta)};
      for (int k = 0; k < 2; ++k) {
        const double value = got[static_cast<std::size_t>(i + k)];
        ASSERT_NEAR(value, want[k], 8 * 0x1p-24 * std::fabs(want[k]) + 0x1p-50 * r) << i + k;
      }
    }
  }
}

// The same bits on every device: the formula as compiled into this test is the judge.
TEST_P(Random, NormalsAreThoseOfTheSharedFormulaBitForBit) {
  for (std::int64_t n : {1, 2, 5, 1023, 9'999}) {
    const PhiloxState state{77, 5};
    const Values got = standard_normals(Dtype::f32, n, state, 2.5, 0.25);
    Values want;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto z = random_math::normal_pair(word(state, i & ~1LL), word(state, i | 1));
      want.push_back(random_math::fused(0.25f, i % 2 ? z.second : z.first, 2.5f));
    }
    expect_same(got, want);
  }
}

TEST_P(Random, MomentsAndIndependence) {
  const std::int64_t n = 1'000'000;
  const double count = static_cast<double>(n);
  for (bool is_normal : {false, true}) {
    const Values v = is_normal ? standard_normals(Dtype::f32, n, {11, 0}, 1, 2)
                               : uniforms(Dtype::f32, n, {11, 0}, 0, 1);
    double mean = 0, variance = 0, lag = 0, cube = 0;
    for (double x : v) mean += x / count;
    for (std::size_t i = 0; i < v.size(); ++i) {
      const double d = v[i] - mean;
      variance += d * d / count;
      cube += d * d * d / count;
      if (i > 0) lag += d * (v[i - 1] - mean) / count;
    }
    // Five standard errors.
    const double sigma = is_normal ? 2 : std::sqrt(1 / 12.0);
    const double error = 5 / std::sqrt(count);
    EXPECT_NEAR(mean, is_normal ? 1 : 0.5, error * sigma);
    EXPECT_NEAR(variance, sigma * sigma, error * sigma * sigma * std::sqrt(2.0));
    EXPECT_NEAR(lag, 0, error * sigma * sigma);
    EXPECT_NEAR(cube, 0, error * sigma * sigma * sigma * std::sqrt(15.0));
  }
}

TEST_P(Random, EveryDtypeRoundsTheSameDraw) {
  const PhiloxState state{5, 9};
  const Values f32 = standard_normals(Dtype::f32, 3000, state);
  for (Dtype dtype : kFloatingDtypes)
    expect_same(standard_normals(dtype, 3000, state), rounded(dtype, f32));
}

TEST_P(Random, ADrawContinuesWhereTheOffsetSays) {
  const Values whole = uniforms(Dtype::f32, 4000, {8, 100}, 0, 1);
  const Values tail = uniforms(Dtype::f32, 2000, {8, 100 + philox_blocks(2000)}, 0, 1);
  expect_same(tail, Values(whole.begin() + 2000, whole.end()));
  EXPECT_NE(uniforms(Dtype::f32, 100, {8, 0}, 0, 1), uniforms(Dtype::f32, 100, {9, 0}, 0, 1));
}

TEST_P(Random, RandintCoversItsRangeEvenly) {
  const std::int64_t n = 60'000;
  Buffer out(device(), Dtype::i64, {n});
  randint(stream(), out.view(), {4, 0}, -3, 3);
  std::vector<int> counts(6);
  for (double v : out.get()) {
    ASSERT_TRUE(v >= -3 && v < 3 && v == std::floor(v)) << v;
    ++counts[static_cast<std::size_t>(v + 3)];
  }
  for (int c : counts) EXPECT_NEAR(c, n / 6, 5 * std::sqrt(n / 6.0));
  const std::int64_t far = std::int64_t{1} << 40, range = std::int64_t{1} << 32;
  randint(stream(), out.view(), {4, 0}, far, far + range);
  const Values v = out.get();
  for (std::int64_t i = 0; i < 100; ++i)
    EXPECT_EQ(v[static_cast<std::size_t>(i)], static_cast<double>(far + word({4, 0}, i)));
  out.check_guards();
  for (Dtype dtype : {Dtype::f32, Dtype::u8, Dtype::i32, Dtype::bf16}) {
    Buffer small(device(), dtype, {100});
    randint(stream(), small.view(), {4, 0}, 10, 20);
    for (double x : small.get()) EXPECT_TRUE(x >= 10 && x < 20 && x == std::floor(x));
  }
}

TEST_P(Random, RandintRefusesEmptyAndWideRanges) {
  Buffer out(device(), Dtype::i64, {3});
  EXPECT_THROW(randint(stream(), out.view(), {}, 5, 5), Error);
  EXPECT_THROW(randint(stream(), out.view(), {}, 0, (std::int64_t{1} << 32) + 1), Error);
}

/// Whether dropout keeps element i, from the words of the draw alone.
bool kept(PhiloxState s, std::int64_t i, double p) {
  const std::uint32_t lane = philox(s, static_cast<std::uint64_t>(i) / 8).v[i % 8 / 2];
  return static_cast<double>(i % 2 ? lane >> 16 : lane & 0xFFFF) >= std::round(p * 65536);
}

// CASES 38: the mask depends on the state alone, also where x is 0; p = 1 gives zeros.
TEST_P(Random, DropoutKeepsByTheBitsOfEachElement) {
  for (Dtype dtype : kFloatingDtypes) {
    for (std::int64_t n : {1, 7, 8, 9, 255, 5001, 8192}) {
      Values x = normals(dtype, n, 41);
      for (std::size_t i = 0; i < x.size(); i += 3) x[i] = 0;
      Buffer in(device(), dtype, {n}, x), out(device(), dtype, {n});
      for (double p : {0.0, 0.1, 0.5, 0.9}) {
        const PhiloxState state{13, 21};
        dropout(stream(), out.view(), in.view(), p, state);
        const Values given = in.get(), got = out.get();
        Values want, bound;
        for (std::int64_t i = 0; i < n; ++i) {
          want.push_back(kept(state, i, p) ? given[static_cast<std::size_t>(i)] / (1 - p) : 0);
          bound.push_back((unit_roundoff(dtype) + 2 * compute_roundoff(dtype)) *
                          std::fabs(want.back()));
        }
        expect_close(got, want, bound);
        out.check_guards();
        // In place, and again for the gradient: the same mask.
        Buffer ones(device(), dtype, {n}, Values(static_cast<std::size_t>(n), 1.0));
        dropout(stream(), ones.view(), ones.view(), p, state);
        const Values mask = ones.get();
        for (std::int64_t i = 0; i < n; ++i)
          ASSERT_EQ(mask[static_cast<std::size_t>(i)] != 0, kept(state, i, p)) << i;
      }
      in.set(Values(static_cast<std::size_t>(n), kNaN));
      dropout(stream(), out.view(), in.view(), 1.0, {13, 21});
      expect_same(out.get(), Values(static_cast<std::size_t>(n), 0.0));
    }
  }
}

// Views that 16-byte accesses cannot serve, and an output of another dtype, have the same mask.
TEST_P(Random, DropoutMasksDoNotDependOnAlignmentOrDtype) {
  const std::int64_t n = 1000;
  const PhiloxState state{99, 0xFFFFFFF0u};  // carries into the counter's second word
  for (Dtype dtype : kFloatingDtypes) {
    Buffer in(device(), dtype, {n + 1}, Values(static_cast<std::size_t>(n + 1), 1.0)),
        out(device(), dtype, {n + 1}, Values(static_cast<std::size_t>(n + 1), 7.0)),
        other(device(), Dtype::f32, {n});
    View x = in.view(), y = out.view();
    for (View* v : {&x, &y}) {
      v->data = static_cast<char*>(v->data) + size_of(dtype);
      v->sizes = {n};
    }
    dropout(stream(), y, x, 0.3, state);
    dropout(stream(), other.view(), x, 0.3, state);
    const Values shifted = out.get(), converted = other.get();
    EXPECT_EQ(shifted[0], 7.0);
    for (std::int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(shifted[static_cast<std::size_t>(i) + 1] != 0, kept(state, i, 0.3)) << i;
      ASSERT_EQ(converted[static_cast<std::size_t>(i)] != 0, kept(state, i, 0.3)) << i;
    }
    out.check_guards();
    other.check_guards();
  }
}

// The fraction kept, and that both halves of a word and neighbouring elements are independent.
TEST_P(Random, DropoutKeepsTheRightShareIndependently) {
  const std::int64_t n = 1'000'000;
  Buffer ones(device(), Dtype::f32, {n}, Values(static_cast<std::size_t>(n), 1.0)),
      out(device(), Dtype::f32, {n});
  for (double p : {0.1, 0.5, 0.75}) {
    dropout(stream(), out.view(), ones.view(), p, {17, 3});
    const Values v = out.get();
    double share[2] = {0, 0}, both = 0;
    for (std::size_t i = 0; i < v.size(); ++i) {
      share[i % 2] += v[i] != 0 ? 2.0 / static_cast<double>(n) : 0;
      both += i > 0 && v[i] != 0 && v[i - 1] != 0 ? 1.0 / static_cast<double>(n - 1) : 0;
    }
    const double keep = 1 - p;  // to 2^-17, a tenth of the standard errors below
    for (double s : share) EXPECT_NEAR(s, keep, 5 * std::sqrt(keep * p * 2 / 1e6));
    // Pairs that share an element are correlated: at most three times the variance of independent
    // ones.
    EXPECT_NEAR(both, keep * keep, 5 * std::sqrt(3 * keep * keep * (1 - keep * keep) / 1e6));
  }
}

TEST_P(Random, DropoutThresholdIsExactAtItsEnds) {
  using random_math::dropout_keeps, random_math::dropout_threshold;
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 32768u);
  EXPECT_EQ(dropout_threshold(1), 65536u);
  EXPECT_EQ(dropout_threshold(0.1), 6554u);  // 6553.6
  EXPECT_TRUE(dropout_keeps(0, dropout_threshold(0)));
  EXPECT_FALSE(dropout_keeps(0xFFFF, dropout_threshold(1)));
}

TEST_P(Random, ThreadCountsAreBitEqual) {
  Values first;
  for_thread_counts([&](int) {
    Values all = standard_normals(Dtype::f32, 200'003, {6, 6});
    const Values u = uniforms(Dtype::bf16, 200'003, {6, 6}, -1, 1);
    all.insert(all.end(), u.begin(), u.end());
    if (first.empty()) first = all;
    expect_same(all, first);
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, Random, ::testing::ValuesIn(test_devices()),
                         [](const auto& info) { return device_name(info.param); });

}  // namespace
}  // namespace mixtape::testing
