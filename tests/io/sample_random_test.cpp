// Reproducible randomness: golden values that every platform must give, and uniformity.
#include "io/sample_random.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::throws_error;

// Computed by another implementation of Philox and of the shuffle, in Python.
TEST(SampleRandom, OrderIsGolden) {
  EXPECT_EQ(shuffled_order(10, 1, 0), (std::vector<std::int64_t>{0, 6, 8, 4, 9, 2, 7, 1, 5, 3}));
  EXPECT_EQ(shuffled_order(10, 1, 1), (std::vector<std::int64_t>{8, 9, 7, 1, 4, 3, 0, 6, 2, 5}));
  EXPECT_EQ(shuffled_order(10, 2, 0), (std::vector<std::int64_t>{8, 9, 2, 7, 0, 5, 1, 3, 4, 6}));
  EXPECT_EQ(shuffled_order(0, 1, 0).size(), 0u);
  EXPECT_EQ(shuffled_order(1, 1, 0), std::vector<std::int64_t>{0});
}

TEST(SampleRandom, OrderIsAPermutation) {
  std::vector<std::int64_t> order = shuffled_order(60000, 7, 3);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < order.size(); ++i) ASSERT_EQ(order[i], static_cast<std::int64_t>(i));
}

// Each of the 24 orders of 4 comes up about equally often: chi-square with 23 degrees of freedom
// passes 49.7 with probability 0.001; the draw is fixed.
TEST(SampleRandom, EveryOrderIsEquallyLikely) {
  std::map<std::vector<std::int64_t>, int> counts;
  constexpr int kDraws = 24000;
  for (int e = 0; e < kDraws; ++e) ++counts[shuffled_order(4, 11, e)];
  ASSERT_EQ(counts.size(), 24u);
  double chi = 0;
  for (const auto& [order, n] : counts) chi += (n - 1000.0) * (n - 1000.0) / 1000.0;
  EXPECT_LT(chi, 49.7);
}

TEST(SampleRandom, Case84StreamsDifferBySeedEpochAndIndex) {
  std::set<std::uint64_t> seen;
  int drawn = 0;
  for (const std::uint64_t seed : {0u, 1u, 2u})
    for (const std::int64_t epoch : {0, 1, 2})
      for (const std::int64_t index : {0, 1, 2, 1000, 1 << 30}) {
        SampleRandom random = RandomStreams(seed, epoch).sample(index);
        for (int k = 0; k < 8; ++k, ++drawn) seen.insert(random.bits64());
        SampleRandom again = RandomStreams(seed, epoch).sample(index);
        SampleRandom once = RandomStreams(seed, epoch).sample(index);
        EXPECT_EQ(again.bits64(), once.bits64());
      }
  EXPECT_EQ(static_cast<int>(seen.size()), drawn);
}

TEST(SampleRandom, BelowIsUnbiasedAndInRange) {
  SampleRandom random = RandomStreams(3, 0).sample(0);
  int low = 0;
  constexpr int kDraws = 30000;
  // Of 3 * 2^62, the lower third comes from half of all words if the rest is not rejected.
  for (int i = 0; i < kDraws; ++i) low += random.below(3ull << 62) < (1ull << 62);
  EXPECT_NEAR(low, kDraws / 3.0, 5 * std::sqrt(kDraws * 2 / 9.0));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(random.below(1), 0u);
  for (int i = 0; i < 1000; ++i) ASSERT_LT(random.below(7), 7u);
  EXPECT_TRUE(throws_error([&] { random.below(0); }, {"at least 1, got 0"}));
}

TEST(SampleRandom, MomentsOfUniformAndNormal) {
  SampleRandom random = RandomStreams(5, 0).sample(0);
  constexpr int kDraws = 40000;
  double u = 0, n = 0, nn = 0;
  for (int i = 0; i < kDraws; ++i) {
    const float x = random.uniform(2.0f, 4.0f), z = random.normal();
    ASSERT_TRUE(x >= 2.0f && x <= 4.0f && std::isfinite(z));
    u += x, n += z, nn += double{z} * z;
  }
  const double sigma = 1 / std::sqrt(double{kDraws});  // of a mean of unit variance
  EXPECT_NEAR(u / kDraws, 3.0, 5 * sigma * std::sqrt(1 / 3.0));
  EXPECT_NEAR(n / kDraws, 0.0, 5 * sigma);
  EXPECT_NEAR(nn / kDraws, 1.0, 5 * sigma * std::sqrt(2.0));
}

}  // namespace
}  // namespace mixtape::io
