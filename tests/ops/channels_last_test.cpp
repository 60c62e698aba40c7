// Channels-last by strides: what keeps it (casts, elementwise ops, convolution, pooling, batch and
// group normalisation, gradients), and that values are those of the contiguous layout.
#include "engine/channels_last.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/autocast.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "engine/recompute.h"
#include "ops/ops.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

double largest_difference(const Tensor& a, const Tensor& b) {
  return abs(sub(a.contiguous(), b.contiguous())).max().item<double>();
}

TEST(ChannelsLast, ConvertsOnceAndPassesTheGradient) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3, 4, 5}, {.device = device}).set_requires_grad();
    const Tensor y = to_channels_last(x);
    EXPECT_TRUE(is_channels_last(y));
    EXPECT_FALSE(is_channels_last(x));
    EXPECT_TRUE(to_channels_last(y).same(y));
    EXPECT_EQ(largest_difference(x.detach(), y.detach()), 0);
    mul(y, y).sum().backward();
    EXPECT_LT(largest_difference(x.grad(), mul(x.detach(), 2)), 1e-6);
  }
  expect_error([] { to_channels_last(zeros({2, 3})); }, "(N, C, H, W)");
}

TEST(ChannelsLast, OpsOnImagesKeepIt) {
  for (const Device device : test_devices()) {
    const TensorOptions on{.device = device};
    const Tensor x = to_channels_last(randn({2, 4, 8, 6}, on)), w = randn({4, 4, 3, 3}, on),
                 c = ones({4}, on), condition = gt(x, Scalar(0));
    const std::pair<const char*, Tensor> results[] = {
        {"relu", relu(x)},
        {"add", x + x},
        {"number", 2 * x},
        {"bias", x + c.reshape({4, 1, 1})},
        {"compare", condition},
        {"where", where(condition, x, Scalar(0))},
        {"clamp", clamp(x, 0, 1)},
        {"cast", cast(x, Dtype::bf16)},
        {"conv2d", conv2d(x, w, {}, {.padding = {1, 1}})},
        {"max_pool2d", max_pool2d(x)},
        {"avg_pool2d", avg_pool2d(x)},
        {"adaptive_avg_pool2d", adaptive_avg_pool2d(x, {3, 2})},
        {"adaptive_max_pool2d", adaptive_max_pool2d(x, {3, 2})},
        {"batch_norm", batch_norm(x, c, c, {}, {})},
        {"group_norm", group_norm(x, 2, c, c)}};
    for (const auto& [name, y] : results) EXPECT_TRUE(is_channels_last(y)) << name << " " << device;
  }
}

/// A residual block that adds one gradient to another: its result and the gradients of its leaves.
struct Block {
  Tensor x, w, gamma, beta, loss, block_input;
  Block(Device device, bool last, bool amp) {
    manual_seed(3);
    const TensorOptions on{.device = device};
    x = randn({3, 8, 6, 6}, on).set_requires_grad();
    w = mul(randn({8, 8, 3, 3}, on), 0.2).detach().set_requires_grad();
    gamma = rand({8}, on).set_requires_grad();
    beta = rand({8}, on).set_requires_grad();
    const Autocast autocast(Dtype::bf16, amp);
    block_input = relu(last ? to_channels_last(x) : x);
    block_input.retain_grad();
    const Tensor h = conv2d(block_input, w, {}, {.padding = {1, 1}});
    const Tensor y = batch_norm(h, gamma, beta, {}, {},
                                {.relu = true, .residual = cast(block_input, h.dtype())});
    loss = adaptive_avg_pool2d(mul(y, y), {1, 1}).sum();
    loss.backward();
  }
};

TEST(ChannelsLast, AResidualBlockHasTheContiguousGradients) {
  for (const Device device : test_devices()) {
    const Block planar(device, false, false), last(device, true, false);
    EXPECT_TRUE(is_channels_last(last.block_input.grad()));
    // Sums of up to 3 * 36 * 72 terms in another order.
    const double tolerance = 1e-4;
    EXPECT_LT(largest_difference(planar.loss.detach(), last.loss.detach()), tolerance);
    EXPECT_LT(largest_difference(planar.x.grad(), last.x.grad()), tolerance);
    EXPECT_LT(largest_difference(planar.w.grad(), last.w.grad()), tolerance);
    EXPECT_LT(largest_difference(planar.gamma.grad(), last.gamma.grad()), tolerance);
    EXPECT_LT(largest_difference(planar.beta.grad(), last.beta.grad()), tolerance);
    EXPECT_TRUE(is_channels_last(Block(device, true, true).block_input.grad()));
  }
}

TEST(BatchNormOp, MovesRunningStatisticsAndTheirVersions) {
  for (const Device device : test_devices()) {
    const TensorOptions on{.device = device};
    const Tensor x = tensor({1.0f, 3.0f}, on).reshape({2, 1});
    Tensor mean = zeros({1}, on), var = ones({1}, on),
           batches = zeros({}, {.dtype = Dtype::i64, .device = device});
    const std::uint32_t before = mean.version();
    const Tensor y = batch_norm(x, {}, {}, mean, var, {.batches_tracked = batches});
    EXPECT_NEAR(y.to_vector<float>()[1], 1, 1e-4);
    EXPECT_NEAR(mean.item<float>(), 0.2, 1e-6);
    EXPECT_NEAR(var.item<float>(), 1.1, 1e-6);
    EXPECT_EQ(batches.item<std::int64_t>(), 1);
    EXPECT_GT(mean.version(), before);
    batch_norm(x, {}, {}, mean, var, {.momentum = std::nullopt, .batches_tracked = batches});
    EXPECT_NEAR(mean.item<float>(), 1.1, 1e-6);  // the mean of 0.2 and 2
    const Tensor evaluated = batch_norm(x, {}, {}, mean, var, {.training = false, .eps = 0});
    EXPECT_NEAR(evaluated.to_vector<float>()[1], 1.9 / std::sqrt(var.item<float>()), 1e-5);
    EXPECT_EQ(batches.item<std::int64_t>(), 2);
  }
}

TEST(BatchNormOp, RecomputationMovesThemOnce) {
  const Tensor x = randn({4, 2}).set_requires_grad();
  Tensor mean = zeros({2}), var = ones({2});
  const std::vector<Tensor> y = apply_recomputed(
      [&](Inputs in) {
        return std::vector<Tensor>{mul(batch_norm(in[0], {}, {}, mean, var), in[0])};
      },
      {&x, 1});
  const std::vector<float> after_forward = mean.to_vector<float>();
  y[0].sum().backward();
  EXPECT_EQ(mean.to_vector<float>(), after_forward);
  EXPECT_NE(after_forward[0], 0);
}

TEST(BatchNormOp, BadInputIsAnError) {
  const Tensor x = zeros({2, 3, 4}), one = zeros({1, 3, 1}), c = ones({3});
  expect_error([&] { batch_norm(one, {}, {}, {}, {}); }, "more than one value per channel");
  EXPECT_EQ(batch_norm(one, {}, {}, c, c, {.training = false}).shape(), (Shape{1, 3, 1}));
  expect_error([&] { batch_norm(x, {}, {}, {}, {}, {.training = false}); }, "running_mean");
  expect_error([&] { batch_norm(x, ones({4}), {}, {}, {}); }, "weight (3)");
  expect_error([&] { batch_norm(x, {}, {}, c, {}); }, "both running_mean and running_var");
  expect_error([&] { batch_norm(x, {}, {}, c, c, {.momentum = 2}); }, "momentum in [0, 1]");
  expect_error([&] { batch_norm(x, {}, {}, c, c, {.momentum = std::nullopt}); }, "batches_tracked");
  expect_error([&] { batch_norm(x, {}, {}, {}, {}, {.residual = zeros({2, 3})}); }, "residual");
  expect_error([&] { batch_norm(zeros({3}), {}, {}, {}, {}); }, "(N, C, ..)");
  expect_error([&] { group_norm(x, 2); }, "divisible by 2");
  expect_error([&] { adaptive_avg_pool2d(zeros({1, 1, 2, 2}), {0, 1}); }, "size");
}

TEST(BatchNormOp, EmptyBatchesGiveZeroGradientsAndMoveNothing) {
  for (const Device device : test_devices()) {
    const TensorOptions on{.device = device};
    const Tensor x = zeros({0, 3, 2, 2}, on).set_requires_grad();
    Tensor w = ones({3}, on).set_requires_grad(), mean = ones({3}, on), var = ones({3}, on);
    batch_norm(x, w, {}, mean, var).sum().backward();
    EXPECT_EQ(w.grad().to_vector<float>(), (std::vector<float>{0, 0, 0}));
    EXPECT_EQ(mean.to_vector<float>(), (std::vector<float>{1, 1, 1}));
  }
}

}  // namespace
}  // namespace mixtape::testing
