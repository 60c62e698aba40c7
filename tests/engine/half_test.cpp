// 16-bit conversions, exhaustively (CASES 39). The reference is the definition of the formats in
// double arithmetic; rounding is checked on both sides of, and at, every midpoint between
// neighbours.
#include "engine/half.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace mixtape {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct HalfFormat {
  static constexpr int kExponentBits = 5, kMantissaBits = 10;
  static float widen(std::uint16_t b) { return Half::from_bits(b); }
  static std::uint16_t round(float x) { return Half(x).bits; }
};
// The portable conversions, whether or not this machine converts in hardware.
struct PortableHalfFormat : HalfFormat {
  static float widen(std::uint16_t b) { return detail::float_from_half_bits(b); }
  static std::uint16_t round(float x) { return detail::half_bits_from_float(x); }
};
struct BFloat16Format {
  static constexpr int kExponentBits = 8, kMantissaBits = 7;
  static float widen(std::uint16_t b) { return BFloat16::from_bits(b); }
  static std::uint16_t round(float x) { return BFloat16(x).bits; }
};

template <class Format>
class Bits16 : public ::testing::Test {
 protected:
  static constexpr int kBias = (1 << (Format::kExponentBits - 1)) - 1;
  static constexpr std::uint16_t kInfinity = ((1 << Format::kExponentBits) - 1)
                                             << Format::kMantissaBits;
  static constexpr std::uint16_t kQuiet = 1 << (Format::kMantissaBits - 1);

  static bool is_nan(std::uint16_t b) { return (b & 0x7FFF) > kInfinity; }
  // The value of a finite pattern, by the format's definition.
  static double value(std::uint16_t b) {
    const int exponent = (b & 0x7FFF) >> Format::kMantissaBits;
    const int mantissa = b & ((1 << Format::kMantissaBits) - 1);
    const double m = exponent == 0 ? mantissa : mantissa + (1 << Format::kMantissaBits);
    const double v = std::ldexp(m, std::max(exponent, 1) - kBias - Format::kMantissaBits);
    return b & 0x8000 ? -v : v;
  }
};

using Formats = ::testing::Types<HalfFormat, PortableHalfFormat, BFloat16Format>;
TYPED_TEST_SUITE(Bits16, Formats);

TYPED_TEST(Bits16, WidensEveryPatternExactly) {
  for (unsigned p = 0; p < 65536; ++p) {
    const auto b = static_cast<std::uint16_t>(p);
    const float x = TypeParam::widen(b);
    if (this->is_nan(b)) {
      ASSERT_TRUE(std::isnan(x)) << std::hex << p;
    } else if ((b & 0x7FFF) == this->kInfinity) {
      ASSERT_EQ(x, b & 0x8000 ? -kInf : kInf);
    } else {
      ASSERT_EQ(static_cast<double>(x), this->value(b)) << std::hex << p;
    }
    ASSERT_EQ(std::signbit(x), (b & 0x8000) != 0) << std::hex << p;
  }
}

TYPED_TEST(Bits16, EveryPatternSurvivesTheRoundTrip) {
  for (unsigned p = 0; p < 65536; ++p) {
    const auto b = static_cast<std::uint16_t>(p);
    // A NaN keeps its sign and payload and becomes quiet.
    const std::uint16_t expected = this->is_nan(b) ? b | this->kQuiet : b;
    ASSERT_EQ(TypeParam::round(TypeParam::widen(b)), expected) << std::hex << p;
  }
}

TYPED_TEST(Bits16, RoundsToNearestEvenAtEveryMidpoint) {
  // `above` runs to the pattern of infinity, whose neighbour's midpoint is where overflow begins.
  for (unsigned p = 0; p < this->kInfinity; ++p) {
    const auto below = static_cast<std::uint16_t>(p), above = static_cast<std::uint16_t>(p + 1);
    const double low = this->value(below);
    const double high = above == this->kInfinity
                            ? std::ldexp(1.0, (1 << (TypeParam::kExponentBits - 1)))
                            : this->value(above);
    const auto middle = static_cast<float>((low + high) / 2);
    if (static_cast<double>(middle) !=
        (low + high) / 2) {  // not a float: bfloat16's subnormals only
      FAIL() << "the midpoint after " << p << " is not representable";
    }
    const std::uint16_t even = p % 2 == 0 ? below : above;
    ASSERT_EQ(TypeParam::round(middle), even) << std::hex << p;
    ASSERT_EQ(TypeParam::round(std::nextafter(middle, -kInf)), below) << std::hex << p;
    ASSERT_EQ(TypeParam::round(std::nextafter(middle, kInf)), above) << std::hex << p;
    ASSERT_EQ(TypeParam::round(-middle), even | 0x8000) << std::hex << p;
  }
}

TYPED_TEST(Bits16, EveryNanStaysANan) {
  // All signalling and quiet payloads that differ in the bits that are cut off, and all single
  // bits.
  for (int bit = 0; bit < 23; ++bit) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(sign | 0x7F800000u | (1u << bit));
      const std::uint16_t b = TypeParam::round(x);
      EXPECT_TRUE(this->is_nan(b)) << "bit " << bit;
      EXPECT_EQ((b & 0x8000) != 0, sign != 0);
    }
  }
  EXPECT_EQ(TypeParam::round(kInf), this->kInfinity);
  EXPECT_EQ(TypeParam::round(-kInf), this->kInfinity | 0x8000);
}

TEST(Half, KnownValues) {
  EXPECT_EQ(float(Half(std::ldexp(1.0f + 0x1p-23f, -25))),
            0x1p-24f);                     // just over half the smallest
  EXPECT_EQ(float(Half(0x1p-25f)), 0.0f);  // a tie, to even
  EXPECT_EQ(float(Half(65504.0f)), 65504.0f);
  EXPECT_EQ(float(Half(65519.996f)), 65504.0f);
  EXPECT_EQ(float(Half(65520.0f)), kInf);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(float(Half(-0.0f))), 0x80000000u);
}

TEST(BFloat16, KnownValues) {
  EXPECT_EQ(float(BFloat16(0.2691408770292272f)), 0.26953125f);  // truncation gives 0.267578125
  EXPECT_TRUE(std::isnan(float(BFloat16(std::bit_cast<float>(0x7F800001u)))));
  EXPECT_EQ(float(BFloat16(std::numeric_limits<float>::max())), kInf);
  EXPECT_EQ(float(BFloat16(std::numeric_limits<float>::denorm_min())), 0.0f);
}

TEST(Half, PortableAndBuiltInConversionsAgree) {
  std::mt19937 random(1);
  for (int i = 0; i < 4'000'000; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    ASSERT_EQ(Half(x).bits, detail::half_bits_from_float(x))
        << std::hex << std::bit_cast<std::uint32_t>(x);
  }
}

}  // namespace
}  // namespace mixtape
