// copy, fill and arange: every pair of dtypes, every layout including transposes larger than a
// tile, and the bit patterns on which hand-written 16-bit conversions go wrong.
#include <algorithm>
#include <bit>

#include "kernels/elementwise.h"
#include "tests/kernels/layouts.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

constexpr Dtype kAllDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f64,
                                Dtype::i64, Dtype::i32, Dtype::u8,   Dtype::b8};

/// x to `significand` bits, ties to even, with subnormals below 2^lowest; independent of half.h.
double round_to(double x, int significand, int lowest, double largest) {
  if (x == 0 || !std::isfinite(x)) return x;
  int e;
  std::frexp(x, &e);
  const int unit = std::max(e - significand, lowest - significand + 1);
  const double r = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
  return std::fabs(r) > largest ? std::copysign(kInfinity, x) : r;
}
double to_f16(double x) { return round_to(x, 11, -14, 65504); }
double to_bf16(double x) { return round_to(x, 8, -126, 0x1.fep127); }

/// What the contract says x becomes.
double converted(Dtype from, Dtype to, double x) {
  switch (to) {
    case Dtype::f64: return x;
    case Dtype::f32: return static_cast<float>(x);
    case Dtype::f16: return to_f16(static_cast<float>(x));
    case Dtype::bf16: return to_bf16(static_cast<float>(x));
    case Dtype::b8: return x != 0;
    default: return is_floating(from) ? std::trunc(x) + 0.0 : x;  // no -0
  }
}

/// Values that `dtype` holds and every other dtype has room for.
Values values_for(Dtype dtype, std::int64_t n, bool non_negative) {
  Values v = normals(Dtype::f32, n, 21, 30);
  for (double& x : v) {
    x = std::clamp(x, -120.0, 120.0);
    if (non_negative) x = std::fabs(x);
    if (!is_floating(dtype)) x = std::trunc(x);
    if (dtype == Dtype::b8) x = x > 20;
    x = rounded(dtype, x);
  }
  return v;
}

class Copy : public ::testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Stream stream() const { return Stream::current(device()); }
  void expect_copy(Dtype from, Dtype to, const Layout& l) {
    SCOPED_TRACE(std::string(l.name) + " " + std::string(name_of(from)) + " to " +
                 std::string(name_of(to)));
    const bool non_negative = to == Dtype::u8 || from == Dtype::u8;
    Buffer x(device(), from, l.a_sizes, l.a_strides,
             values_for(from, l.a_sizes.numel(), non_negative));
    Buffer out(device(), to, l.sizes, l.out_strides);
    copy(stream(), out.view(), x.view());
    Values want = broadcast(x.get(), l.a_sizes, l.sizes);
    for (double& v : want) v = converted(from, to, v);
    expect_same(out.get(), want);
    out.check_guards();
  }
};

TEST_P(Copy, EveryPairOfDtypesOnEveryLayout) {
  for (Dtype from : kAllDtypes)
    for (Dtype to : kAllDtypes)
      for (const Layout& l : layouts()) {
        expect_copy(from, to, l);
        if (HasFailure()) return;
      }
}

TEST_P(Copy, Transposes) {
  const Layout cases[] = {
      {"matrix", {130, 200}, {200, 1}, {130, 200}, {1, 130}, {}, {}},
      {"padded_matrix", {130, 67}, {80, 1}, {130, 67}, {1, 140}, {}, {}},
      {"out_transposed", {130, 67}, {1, 133}, {130, 67}, {67, 1}, {}, {}},
      {"batched", {3, 70, 9}, {630, 9, 1}, {3, 70, 9}, {630, 1, 70}, {}, {}},
      {"nchw_to_nhwc", {2, 6, 7, 40}, {1680, 280, 40, 1}, {2, 6, 7, 40}, {1680, 7, 1, 42}, {}, {}},
      {"heads", {2, 3, 17, 8}, {408, 136, 8, 1}, {2, 3, 17, 8}, {408, 8, 24, 1}, {}, {}},
      {"reversed", {9, 10, 11}, {110, 11, 1}, {9, 10, 11}, {1, 9, 90}, {}, {}},
      {"narrow", {300, 3}, {3, 1}, {300, 3}, {1, 300}, {}, {}},
  };
  for (const Layout& l : cases)
    for (Dtype dtype : kAllDtypes)
      for (Dtype to : {dtype, Dtype::f32, Dtype::bf16}) {
        expect_copy(dtype, to, l);
        if (HasFailure()) return;
      }
}

TEST_P(Copy, LargeCopiesSplitAmongThreads) {
  for_thread_counts([&](int) {
    expect_copy(Dtype::f32, Dtype::f32, dense_layout("dense", {700'001}));
    expect_copy(Dtype::f32, Dtype::bf16, dense_layout("dense", {200'001}));
    expect_copy(Dtype::u8, Dtype::f32, dense_layout("dense", {200'001}));
    const Layout transposed{"transposed", {600, 500}, {500, 1}, {600, 500}, {1, 600}, {}, {}};
    expect_copy(Dtype::f32, Dtype::f32, transposed);
    expect_copy(Dtype::f16, Dtype::f32, transposed);
  });
}

// Every 16-bit pattern survives the way to float (and to double) and back, by bits; NaN stays NaN.
TEST_P(Copy, SixteenBitTypesRoundTripExhaustively) {
  constexpr std::int64_t n = 65536;
  std::vector<std::uint16_t> bits(n), back(n);
  for (std::int64_t i = 0; i < n; ++i)
    bits[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(i);
  for (Dtype dtype : {Dtype::f16, Dtype::bf16}) {
    for (Dtype wide_dtype : {Dtype::f32, Dtype::f64}) {
      Buffer x(device(), dtype, {n}), wide(device(), wide_dtype, {n}), y(device(), dtype, {n});
      copy_bytes(x.view().data, device(), bits.data(), Device::cpu(), 2 * n, stream());
      copy(stream(), wide.view(), x.view());
      copy(stream(), y.view(), wide.view());
      copy_bytes(back.data(), Device::cpu(), y.view().data, device(), 2 * n, stream());
      stream().synchronize();
      const Values values = wide.get();
      for (std::size_t i = 0; i < bits.size(); ++i) {
        const bool half = dtype == Dtype::f16;
        const unsigned exponent = half ? 0x7C00 : 0x7F80;
        const bool nan = (bits[i] & 0x7FFF) > exponent;
        ASSERT_EQ(std::isnan(values[i]), nan) << i;
        if (nan)
          ASSERT_GT(back[i] & 0x7FFF, exponent) << i;
        else
          ASSERT_EQ(back[i], bits[i]) << i;
      }
    }
  }
}

// CASES 39: subnormals, ties, truncation, a NaN whose upper bits alone would be infinity.
TEST_P(Copy, FloatTo16BitRoundsToNearestEven) {
  const float nan = std::bit_cast<float>(0x7F800001u);
  const Values x = {0x1p-25 * (1 + 0x1p-23),
                    0x1p-25,
                    3 * 0x1p-25,
                    0.2691408770292272f,
                    nan,
                    65519.99,
                    65520,
                    -65520,
                    1 + 0x1p-11,
                    1 + 3 * 0x1p-11,
                    0x1.ffp127,
                    0x1.fep127,
                    -0.0,
                    0x1.ffcp-15,
                    0x1.ffep-15,
                    1e-45,
                    kInfinity,
                    1 + 0x1p-8,
                    1 + 3 * 0x1p-8};
  const auto n = static_cast<std::int64_t>(x.size());
  Buffer in(device(), Dtype::f32, {n}, x), half(device(), Dtype::f16, {n}),
      brain(device(), Dtype::bf16, {n});
  copy(stream(), half.view(), in.view());
  copy(stream(), brain.view(), in.view());
  const Values h = half.get(), b = brain.get();
  EXPECT_EQ(h[0], 0x1p-24);
  EXPECT_EQ(h[1], 0);
  EXPECT_EQ(b[3], 0.26953125);
  EXPECT_TRUE(std::isnan(h[4]) && std::isnan(b[4]));
  const Values stored = in.get();
  for (std::size_t i = 0; i < stored.size(); ++i) {
    if (std::isnan(stored[i])) continue;
    EXPECT_EQ(h[i], to_f16(stored[i])) << stored[i];
    EXPECT_EQ(b[i], to_bf16(stored[i])) << stored[i];
    EXPECT_EQ(std::signbit(h[i]), std::signbit(stored[i]));
  }
}

TEST_P(Copy, RandomFloatsRoundToNearestEven) {
  constexpr std::int64_t n = 100'000;
  std::mt19937 generator(5);
  std::vector<float> x(n);
  for (float& v : x) {  // any finite bits
    do v = std::bit_cast<float>(static_cast<std::uint32_t>(generator()));
    while (!std::isfinite(v));
  }
  Buffer in(device(), Dtype::f32, {n}, Values(x.begin(), x.end()));
  for (Dtype dtype : {Dtype::f16, Dtype::bf16}) {
    Buffer out(device(), dtype, {n});
    copy(stream(), out.view(), in.view());
    Values want;
    for (float v : x) want.push_back(dtype == Dtype::f16 ? to_f16(v) : to_bf16(v));
    expect_same(out.get(), want);
  }
}

TEST_P(Copy, FloatToIntegerTruncates) {
  const Values x = {-1.9, -0.5, 0.99, 2.5, 254.99, 0};
  Buffer in(device(), Dtype::f32, {6}, x);
  Buffer i64(device(), Dtype::i64, {6}), i32(device(), Dtype::i32, {6}),
      b8(device(), Dtype::b8, {6});
  copy(stream(), i64.view(), in.view());
  copy(stream(), i32.view(), in.view());
  copy(stream(), b8.view(), in.view());
  expect_same(i64.get(), {-1, 0, 0, 2, 254, 0});
  expect_same(i32.get(), {-1, 0, 0, 2, 254, 0});
  expect_same(b8.get(), {1, 1, 1, 1, 1, 0});
}

TEST_P(Copy, IntegersAreExactBeyondFloat) {
  const double odd = 9007199254740991.0;  // 2^53 - 1
  Buffer in(device(), Dtype::i64, {2}, Values{odd, -odd}), out(device(), Dtype::f64, {2});
  Buffer same(device(), Dtype::i64, {2});
  copy(stream(), out.view(), in.view());
  expect_same(out.get(), {odd, -odd});
  copy(stream(), same.view(), out.view());
  expect_same(same.get(), {odd, -odd});
  Buffer near(device(), Dtype::i32, {1}, Values{16777217}), narrow(device(), Dtype::f32, {1});
  copy(stream(), narrow.view(), near.view());
  expect_same(narrow.get(), {16777216});
}

TEST_P(Copy, FillsEveryLayoutAndDtype) {
  for (Dtype dtype : kAllDtypes) {
    for (const Layout& l : layouts()) {
      SCOPED_TRACE(std::string(l.name) + " " + std::string(name_of(dtype)));
      Buffer out(device(), dtype, l.sizes, l.out_strides);
      const auto n = static_cast<std::size_t>(l.sizes.numel());
      fill(stream(), out.view(), Scalar(3.7));
      expect_same(out.get(), Values(n, converted(Dtype::f64, dtype, 3.7)));
      fill(stream(), out.view(), Scalar(0));
      expect_same(out.get(), Values(n, 0.0));
      fill(stream(), out.view(), Scalar(true));
      expect_same(out.get(), Values(n, 1.0));
      out.check_guards();
    }
  }
  Buffer large(device(), Dtype::i64, {300'001});
  fill(stream(), large.view(), Scalar((std::int64_t{1} << 53) - 1));
  expect_same(large.get(), Values(300'001, 9007199254740991.0));
}

TEST_P(Copy, FillLeavesGapsAlone) {
  Buffer all(device(), Dtype::f32, {4, 6}, Values(24, 1.0));
  View part = all.view();
  part.sizes = {4, 3};
  fill(stream(), part, Scalar(2));
  Values want;
  for (int i = 0; i < 24; ++i) want.push_back(i % 6 < 3 ? 2 : 1);
  expect_same(all.get(), want);
}

TEST_P(Copy, Aranges) {
  const std::int64_t n = 40'001;
  for (Dtype dtype : {Dtype::f32, Dtype::f64, Dtype::bf16}) {
    Buffer out(device(), dtype, {n});
    arange(stream(), out.view(), Scalar(1.5), Scalar(0.25));
    Values want;
    for (std::int64_t i = 0; i < n; ++i) want.push_back(1.5 + 0.25 * static_cast<double>(i));
    expect_same(out.get(), rounded(dtype, want));
    out.check_guards();
  }
  Buffer integers(device(), Dtype::i64, {4}), empty(device(), Dtype::f32, {0});
  arange(stream(), integers.view(), Scalar(5), Scalar(-3));
  expect_same(integers.get(), {5, 2, -1, -4});
  const std::int64_t big = (std::int64_t{1} << 52) + 1;
  arange(stream(), integers.view(), Scalar(big), Scalar(2));
  const double first = static_cast<double>(big);
  expect_same(integers.get(), {first, first + 2, first + 4, first + 6});
  arange(stream(), empty.view(), Scalar(0), Scalar(1));
  empty.check_guards();
}

INSTANTIATE_TEST_SUITE_P(Devices, Copy, ::testing::ValuesIn(test_devices()),
                         [](const auto& info) { return device_name(info.param); });

}  // namespace
}  // namespace mixtape::testing
