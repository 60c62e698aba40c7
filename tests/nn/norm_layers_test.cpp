// BatchNorm, GroupNorm and AdaptiveAvgPool2d as layers: names of what they keep, training and
// evaluation, and a state that another module takes over.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "nn/layers.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

double largest_difference(const Tensor& a, const Tensor& b) {
  return abs(sub(a, b)).max().item<double>();
}
std::vector<std::string> names_of(const std::vector<nn::NamedTensor>& tensors) {
  std::vector<std::string> names;
  for (const nn::NamedTensor& t : tensors) names.push_back(t.name);
  return names;
}

TEST(BatchNormLayer, KeepsItsStateUnderPyTorchsNames) {
  nn::BatchNorm2d norm(4);
  EXPECT_EQ(names_of(norm.state_dict()),
            (std::vector<std::string>{"weight", "bias", "running_mean", "running_var",
                                      "num_batches_tracked"}));
  EXPECT_EQ(norm.parameters().size(), 2u);
  EXPECT_EQ(norm.num_batches_tracked.dtype(), Dtype::i64);
  EXPECT_EQ(nn::BatchNorm1d(4, {.affine = false, .track_running_stats = false}).state_dict().size(),
            0u);
  expect_error([] { nn::BatchNorm2d(0); }, "at least one channel");
}

TEST(BatchNormLayer, TrainsOnTheBatchAndEvaluatesOnWhatItSaw) {
  for (const Device device : test_devices()) {
    manual_seed(1);
    nn::BatchNorm2d norm(3, {.momentum = std::nullopt});
    norm.to(device);
    const Tensor x = add(mul(randn({8, 3, 5, 5}, {.device = device}), 2), 1);
    const Tensor y = norm(x);
    EXPECT_LT(abs(mean(y, {0, 2, 3})).max().item<double>(), 1e-5);
    EXPECT_EQ(norm.num_batches_tracked.item<std::int64_t>(), 1);
    norm.eval();
    // One batch was seen, so that its statistics are the running ones, but for the divisor of the
    // variance: 199 in place of 200.
    EXPECT_LT(largest_difference(norm(x), mul(y, std::sqrt(199.0 / 200))), 1e-4);
    EXPECT_EQ(norm.num_batches_tracked.item<std::int64_t>(), 1);
    nn::BatchNorm2d other(3);
    other.to(device);
    other.load_state_dict(norm.state_dict());
    other.eval();
    EXPECT_EQ(largest_difference(other(x), norm(x)), 0);
  }
}

TEST(BatchNormLayer, FusesReluAndResidual) {
  for (const Device device : test_devices()) {
    nn::BatchNorm2d plain(4), fused(4, {.relu = true});
    plain.to(device);
    fused.to(device);
    const Tensor x = randn({2, 4, 3, 3}, {.device = device}),
                 r = randn({2, 4, 3, 3}, {.device = device});
    EXPECT_LT(largest_difference(fused(x), relu(plain(x))), 1e-6);
    EXPECT_LT(largest_difference(fused(x, r), relu(plain(x) + r)), 1e-6);
  }
}

TEST(GroupNormLayer, NormalisesEachGroup) {
  for (const Device device : test_devices()) {
    nn::GroupNorm norm(2, 6);
    norm.to(device);
    const Tensor y = norm(add(randn({3, 6, 4, 4}, {.device = device}), 5)).reshape({3, 2, 48});
    EXPECT_LT(abs(mean(y, {2})).max().item<double>(), 1e-5);
    EXPECT_LT(abs(sub(var(y, {2}, 0), 1)).max().item<double>(), 1e-3);
    EXPECT_EQ(names_of(norm.state_dict()), (std::vector<std::string>{"weight", "bias"}));
  }
  expect_error([] { nn::GroupNorm(4, 6); }, "divisible by groups");
}

TEST(AdaptiveAvgPool2dLayer, AveragesToItsSize) {
  nn::AdaptiveAvgPool2d pool;
  const Tensor x = randn({2, 3, 5, 7});
  EXPECT_LT(largest_difference(pool(x).flatten(1), mean(x, {2, 3})), 1e-6);
  EXPECT_EQ(pool.describe(), "AdaptiveAvgPool2d((1, 1))");
}

}  // namespace
}  // namespace mixtape::testing
