// Buckets as ranges of the flat gradients: what is in which, and that nothing moves.
#include "distributed/gradient_buckets.h"

#include <gtest/gtest.h>
#include <mixtape.h>

#include "distributed/bucket_tuner.h"
#include "engine/node.h"
#include "tests/support/expect_error.h"

namespace mixtape::distributed {
namespace {

Tensor parameter(const std::string& name, std::int64_t n, Dtype dtype = Dtype::f32) {
  Tensor t = zeros({n}, {.dtype = dtype, .requires_grad = true});
  t.set_name(name);
  return t;
}

std::vector<std::string> names_of(const GradientBucket& bucket) {
  std::vector<std::string> names;
  for (const Tensor& p : bucket.parameters) names.push_back(p.name());
  return names;
}

using Names = std::vector<std::string>;

TEST(GradientBuckets, FillUpInReverseOrderOfRegistration) {
  // 1 KiB each: the first bucket holds two, the others three.
  std::vector<Tensor> parameters;
  for (const char* name : {"a", "b", "c", "d", "e", "f"})
    parameters.push_back(parameter(name, 256));
  attach_flat_gradients(parameters);
  const auto buckets = make_gradient_buckets(parameters, {.first = 2048, .rest = 3072});
  ASSERT_EQ(buckets.size(), 3u);
  EXPECT_EQ(names_of(buckets[0]), (Names{"f", "e"}));
  EXPECT_EQ(names_of(buckets[1]), (Names{"d", "c", "b"}));
  EXPECT_EQ(names_of(buckets[2]), (Names{"a"}));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(buckets[static_cast<std::size_t>(i)].index, i);
  EXPECT_EQ(buckets[1].bytes(), 3072);
  EXPECT_EQ(buckets[0].gradients.name(), "gradients of f to e");
}

TEST(GradientBuckets, ALargerParameterIsAloneAndTinySizesGiveOneBucketEach) {
  std::vector<Tensor> parameters = {parameter("a", 10), parameter("large", 5000),
                                    parameter("b", 10), parameter("c", 10)};
  attach_flat_gradients(parameters);
  auto buckets = make_gradient_buckets(parameters, {.first = 1024, .rest = 1024});
  ASSERT_EQ(buckets.size(), 3u);
  EXPECT_EQ(names_of(buckets[0]), (Names{"c", "b"}));
  EXPECT_EQ(names_of(buckets[1]), (Names{"large"}));
  EXPECT_EQ(buckets[1].gradients.numel(), 5000);
  EXPECT_EQ(make_gradient_buckets(parameters, {.first = 1, .rest = 1}).size(), 4u);
}

TEST(GradientBuckets, OtherBoundariesAreTheSameMemory) {
  std::vector<Tensor> parameters;
  for (int i = 0; i < 7; ++i) parameters.push_back(parameter("p" + std::to_string(i), 100 + i));
  attach_flat_gradients(parameters);
  for (Tensor& p : parameters) p.set_grad(full(p.shape(), static_cast<double>(p.numel())));
  for (const std::int64_t bytes : {1, 500, 1000, 100000}) {
    std::size_t covered = 0;
    for (const GradientBucket& b :
         make_gradient_buckets(parameters, {.first = bytes, .rest = bytes})) {
      for (const Tensor& p : b.parameters) {
        ++covered;
        const auto* begin = static_cast<const char*>(b.gradients.raw_data());
        const auto* gradient = static_cast<const char*>(p.grad().raw_data());
        EXPECT_GE(gradient, begin);
        EXPECT_LE(gradient + p.numel() * 4, begin + b.bytes());
      }
    }
    EXPECT_EQ(covered, parameters.size());
  }
  for (const Tensor& p : parameters)
    EXPECT_EQ(p.grad().to_vector<double>(), std::vector<double>(static_cast<std::size_t>(p.numel()),
                                                                static_cast<double>(p.numel())));
}

TEST(GradientBuckets, EachFlatBufferHasItsOwnInTheOrderTheyAreReady) {
  std::vector<Tensor> parameters = {parameter("a", 8), parameter("b", 8, Dtype::f64),
                                    parameter("c", 8, Dtype::bf16), parameter("d", 8)};
  attach_flat_gradients(parameters);
  const auto buckets = make_gradient_buckets(parameters, {});
  ASSERT_EQ(buckets.size(), 2u);  // float32 holds bfloat16's gradients too
  EXPECT_EQ(names_of(buckets[0]), (Names{"b"}));
  EXPECT_EQ(names_of(buckets[1]), (Names{"d", "c", "a"}));  // complete after b
  EXPECT_EQ(buckets[0].gradients.dtype(), Dtype::f64);
}

TEST(GradientBuckets, FollowTheMemoryThatOptimizersChose) {
  std::vector<Tensor> parameters = {parameter("w0", 64), parameter("b0", 64), parameter("w1", 64),
                                    parameter("b1", 64)};
  attach_flat_gradients({parameters[0], parameters[2]});
  attach_flat_gradients({parameters[3], parameters[1]});  // in another order than registered
  const auto buckets = make_gradient_buckets(parameters, {});
  ASSERT_EQ(buckets.size(), 2u);
  std::size_t covered = 0;
  for (const GradientBucket& b : buckets) covered += b.parameters.size();
  EXPECT_EQ(covered, 4u);
}

TEST(GradientBuckets, PaddingBetweenGradientsIsCleared) {
  std::vector<Tensor> parameters = {parameter("a", 3), parameter("b", 5)};
  attach_flat_gradients(parameters);
  const auto buckets = make_gradient_buckets(parameters, {});
  ASSERT_EQ(buckets.size(), 1u);
  Tensor whole = buckets[0].gradients;
  ASSERT_EQ(whole.numel(), 64 + 3);
  whole.fill_(7);
  clear_padding(buckets);
  const std::vector<float> values = whole.to_vector<float>();
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_EQ(values[i], i < 5 || i >= 64 ? 7.0f : 0.0f) << i;
}

TEST(GradientBuckets, BadSizesAndMissingGradientsAreErrors) {
  std::vector<Tensor> parameters = {parameter("a", 3)};
  testing::expect_error([&] { make_gradient_buckets(parameters, {}); }, "with flat gradients");
  attach_flat_gradients(parameters);
  testing::expect_error([&] { make_gradient_buckets(parameters, {.first = 0}); },
                        "at least 1 byte, got 0");
}

TEST(BucketTuner, TriesWhatDiffersAndTakesTheBestMedian) {
  constexpr std::int64_t kMiB = 1 << 20;
  std::vector<Tensor> parameters;
  for (int i = 0; i < 12; ++i) parameters.push_back(parameter(std::to_string(i), kMiB / 4));
  attach_flat_gradients(parameters);  // 12 MiB
  const BucketSizes standard;
  const std::vector<BucketSizes> sizes = BucketTuner::candidates(parameters, standard);
  ASSERT_EQ(sizes.size(), 3u);  // 100 MiB is no other than 25
  EXPECT_EQ(sizes[0], standard);
  EXPECT_EQ(sizes[1].rest, 2 * kMiB);
  EXPECT_EQ(sizes[2].rest, 8 * kMiB);
  BucketTuner tuner(sizes);
  const double seconds[3][7] = {{9, 9, 3, 3, 3, 3, 3},
                                {9, 9, 1, 2, 99, 1, 99},  // warm-up and outliers do not count
                                {0, 0, 4, 4, 0, 4, 0}};
  for (std::size_t c = 0; c < 3; ++c) {
    EXPECT_EQ(tuner.current(), sizes[c]);
    for (int pass = 0; pass < 7; ++pass) EXPECT_EQ(tuner.note(seconds[c][pass]), pass == 6);
    EXPECT_EQ(tuner.done(), c == 2);
  }
  EXPECT_EQ(tuner.results(), (std::vector<double>{3, 2, 4}));
  EXPECT_EQ(BucketTuner::choose(tuner.results()), 1u);
  EXPECT_EQ(BucketTuner::choose({1.0, 0.96, 2.0}), 0u);
  EXPECT_EQ(tuner.report({0.003, 0.002, 0.004}, 1),
            "25.0 MiB 3.00 ms, 2.0 MiB 2.00 ms (chosen), 8.0 MiB 4.00 ms");
}

}  // namespace
}  // namespace mixtape::distributed
