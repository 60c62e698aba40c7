// SelfAttention: the packed projection's order, causality, dropout in training only, errors.
#include "nn/attention.h"

#include <gtest/gtest.h>

#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

double largest_difference(const Tensor& a, const Tensor& b) {
  return abs(sub(a, b)).max().item<double>();
}

TEST(SelfAttention, IsProjectionAttentionProjection) {
  for (const Device device : test_devices()) {
    for (const std::int64_t kv_heads : {4, 2}) {
      manual_seed(1);
      nn::SelfAttention module(32, {.heads = 4, .kv_heads = kv_heads});
      module.to(device);
      const Tensor x = randn({2, 7, 32}, {.device = device});
      const Tensor y = module(x), qkv = module.c_attn(x);
      EXPECT_EQ(qkv.shape(), (Shape{2, 7, (4 + 2 * kv_heads) * 8}));
      const auto heads = [&](std::int64_t first, std::int64_t count) {
        return qkv.slice(2, first * 8, (first + count) * 8)
            .reshape({2, 7, count, 8})
            .transpose(1, 2);
      };
      const Tensor out = scaled_dot_product_attention(
          heads(0, 4), heads(4, kv_heads), heads(4 + kv_heads, kv_heads), {.causal = true});
      const Tensor expected = module.c_proj(out.transpose(1, 2).reshape({2, 7, 32}));
      EXPECT_EQ(y.shape(), x.shape());
      EXPECT_LT(largest_difference(y, expected), 1e-6);
      y.sum().backward();
      for (const Tensor& p : module.parameters()) EXPECT_TRUE(p.grad().defined()) << p.name();
    }
  }
}

TEST(SelfAttention, APositionSeesNothingLater) {
  for (const Device device : test_devices()) {
    const NoGrad no_grad;
    nn::SelfAttention module(16, {.heads = 2});
    module.to(device);
    const Tensor x = randn({1, 6, 16}, {.device = device});
    Tensor changed = x.clone();
    changed.slice(1, 4, 6).fill_(3);
    const Tensor a = module(x), b = module(changed);
    EXPECT_EQ(largest_difference(a.slice(1, 0, 4), b.slice(1, 0, 4)), 0);
    EXPECT_GT(largest_difference(a.slice(1, 4, 6), b.slice(1, 4, 6)), 0);
  }
}

TEST(SelfAttention, DropsOnlyInTraining) {
  for (const Device device : test_devices()) {
    const NoGrad no_grad;
    nn::SelfAttention module(16, {.heads = 2, .dropout = 0.5});
    module.to(device);
    const Tensor x = randn({2, 9, 16}, {.device = device});
    EXPECT_GT(largest_difference(module(x), module(x)), 0);
    module.eval();
    EXPECT_EQ(largest_difference(module(x), module(x)), 0);
  }
}

TEST(SelfAttention, NamesWhatDoesNotFit) {
  expect_error([] { nn::SelfAttention(30, {.heads = 4}); }, "a multiple of heads");
  expect_error([] { nn::SelfAttention(32, {.heads = 4, .kv_heads = 3}); }, "heads of kv_heads");
  expect_error([] { nn::SelfAttention(32, {.heads = 4, .dropout = 2}); }, "a dropout in [0, 1]");
  EXPECT_EQ(nn::SelfAttention(32, {.heads = 4, .kv_heads = 2}).describe(),
            "SelfAttention(32, 4 heads on 2 of keys and values, causal)");
}

TEST(Attention, ErrorsNameWhatIsWrong) {
  const Tensor q = randn({1, 4, 3, 8}), k = randn({1, 2, 5, 8});
  expect_error(
      [&] {
        scaled_dot_product_attention(q, randn({1, 3, 5, 8}), k);
      },
      "H a multiple of G");
  expect_error(
      [&] {
        scaled_dot_product_attention(q, k, k, {.mask = randn({3, 5}).set_requires_grad()});
      },
      "requires no gradient");
  expect_error(
      [&] {
        scaled_dot_product_attention(q, k, k, {.mask = ones({4, 5})});
      },
      "do not broadcast");
  expect_error([&] { scaled_dot_product_attention(q, k, k, {.dropout = -1}); },
               "a dropout in [0, 1]");
  expect_error([&] { self_attention(randn({2, 3, 25}), {.heads = 4}); }, "12 parts");
  Tensor x = randn({1, 3, 24}).set_requires_grad();
  const std::vector<Tensor> g =
      grad({self_attention(x, {.heads = 2})}, {x}, {ones({1, 3, 8})}, {.create_graph = true});
  expect_error([&] { g[0].sum().backward(); }, "self_attention");
}

/// The same seed draws the same mask again, and gradients use the forward pass's.
TEST(Attention, DropoutFollowsTheGenerator) {
  for (const Device device : test_devices()) {
    Tensor v = ones({1, 1, 64, 8}, {.device = device}).set_requires_grad();
    const Tensor q = randn({1, 1, 64, 8}, {.device = device});
    manual_seed(5);
    const Tensor a = scaled_dot_product_attention(q, q, v, {.dropout = 0.3});
    const Tensor b = scaled_dot_product_attention(q, q, v, {.dropout = 0.3});
    manual_seed(5);
    const Tensor c = scaled_dot_product_attention(q, q, v, {.dropout = 0.3});
    EXPECT_EQ(a.to_vector<float>(), c.to_vector<float>());
    EXPECT_NE(a.to_vector<float>(), b.to_vector<float>());
    EXPECT_NEAR(a.mean().item<double>(), 1, 0.1);  // kept probabilities are scaled up
    // out is linear in v: sum(dv * v) = sum(out) only if both used one mask.
    a.sum().backward();
    EXPECT_NEAR(v.grad().sum().item<double>(), a.sum().item<double>(), 1e-2);
  }
}

}  // namespace
}  // namespace mixtape::testing
