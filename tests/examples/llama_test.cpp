// The Llama-style model of examples/gpt2/llama.h: against the same network written in elementary
// ops, that it learns, and that recomputing its blocks changes no bit.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/determinism.h"
#include "examples/gpt2/llama.h"
#include "tests/support/devices.h"

namespace mixtape {
namespace {

using testing::test_devices;

constexpr llama::Config kSmall{.layers = 2,
                               .heads = 4,
                               .kv_heads = 2,
                               .channels = 32,
                               .hidden = 48,
                               .context = 16,
                               .vocabulary = 19,
                               .eps = 1e-3};

Tensor rms(const Tensor& x, const nn::RmsNorm& norm) {
  return x / sqrt(mean(x * x, {-1}, true) + 1e-3) * norm.weight;
}

/// x (B, N, T, D) turned by its position.
Tensor turned(const Tensor& x) {
  const std::int64_t t = x.size(2), half = x.size(3) / 2;
  std::vector<float> cosine, sine;
  for (std::int64_t p = 0; p < t; ++p) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) *
                           std::pow(10000, -static_cast<double>(i) / static_cast<double>(half));
      cosine.push_back(static_cast<float>(std::cos(angle)));
      sine.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  const TensorOptions options{.device = x.device()};
  const Tensor c = from_vector(cosine, {t, half}, options),
               s = from_vector(sine, {t, half}, options);
  const Tensor low = x.slice(3, 0, half), high = x.slice(3, half);
  return cat({low * c - high * s, high * c + low * s}, 3);
}

/// (B, T, C) -> the same, with each group's keys and values repeated and all scores in memory.
Tensor attention(const Tensor& x, const llama::Block& block) {
  const std::int64_t b = x.size(0), t = x.size(1), h = kSmall.heads, g = kSmall.kv_heads,
                     d = kSmall.channels / h;
  const Tensor qkv = linear(x, block.attention.qkv_proj.weight);
  const auto heads = [&](std::int64_t first, std::int64_t count) {
    return qkv.slice(2, first * d, (first + count) * d).reshape({b, t, count, d}).transpose(1, 2);
  };
  const auto repeated = [&](const Tensor& y) {
    return y.unsqueeze(2).expand({b, g, h / g, t, d}).reshape({b, h, t, d});
  };
  const Tensor q = turned(heads(0, h)), k = repeated(turned(heads(h, g))),
               v = repeated(heads(h + g, g));
  std::vector<float> future;
  for (std::int64_t i = 0; i < t; ++i)
    for (std::int64_t j = 0; j < t; ++j) future.push_back(j > i ? -1e30f : 0.0f);
  const Tensor mask = from_vector(future, {t, t}, {.device = x.device()});
  const Tensor p = softmax(matmul(q, k.t()) / std::sqrt(static_cast<double>(d)) + mask);
  return linear(matmul(p, v).transpose(1, 2).reshape({b, t, h * d}), block.attention.o_proj.weight);
}

Tensor logits(llama::Llama& net, const Tensor& tokens) {
  Tensor x = embedding(net.embed_tokens.weight, tokens);
  for (llama::Block& block : net.layers) {
    x = x + attention(rms(x, block.input_norm), block);
    const Tensor gate_up = linear(rms(x, block.post_attention_norm), block.mlp.gate_up.weight);
    const Tensor gate = gate_up.slice(2, 0, kSmall.hidden), up = gate_up.slice(2, kSmall.hidden);
    x = x + linear(silu(gate) * up, block.mlp.down.weight);
  }
  return linear(rms(x, net.norm), net.lm_head.weight);
}

/// Weights that make every part of the network matter.
void enlarge(llama::Llama& net) {
  const NoGrad no_grad;
  for (Tensor p : net.parameters()) {
    if (p.dim() > 1)
      p.mul_(10.0);
    else
      p.uniform_(0.5, 1.5);
  }
}

void expect_near(const Tensor& got, const Tensor& want, const std::string& what) {
  const std::vector<double> a = got.to_vector<double>(), b = want.to_vector<double>();
  ASSERT_EQ(a.size(), b.size());
  double largest = 0;
  for (const double v : b) largest = std::max(largest, std::abs(v));
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_NEAR(a[i], b[i], 2e-5 * std::max(1.0, largest)) << what << " [" << i << "]";
}

TEST(Llama, IsTheNetworkInElementaryOps) {
  for (const Device device : test_devices()) {
    manual_seed(1);
    llama::Llama net(kSmall);
    net.to(device);
    enlarge(net);
    const Tensor tokens = randint(0, 19, {2, 11}).to(device);
    const Tensor weights = randn({2, 11, 19}).to(device);
    const Tensor want = logits(net, tokens), got = net(tokens);
    expect_near(got, want, "logits");
    const std::vector<Tensor> parameters = net.parameters();
    const std::vector<Tensor> a = grad({sum(got * weights)}, parameters),
                              b = grad({sum(want * weights)}, parameters);
    for (std::size_t i = 0; i < a.size(); ++i)
      expect_near(a[i], b[i], net.named_parameters()[i].name);
  }
}

std::vector<float> losses(Device device, bool recompute) {
  set_deterministic(true);
  manual_seed(2);
  llama::Config config = kSmall;
  config.recompute = recompute;
  llama::Llama net(config);
  net.to(device);
  optim::AdamW opt(net.parameters(), {.lr = 1e-2f});
  const Tensor text = randint(0, 19, {4, 13}).to(device);
  std::vector<float> all;
  for (int i = 0; i < 40; ++i) {
    Tensor loss;
    {
      const Autocast amp(Dtype::bf16);
      loss = net.loss(text.slice(1, 0, 12), text.slice(1, 1));
    }
    opt.zero_grad();
    loss.backward();
    opt.step();
    all.push_back(loss.item<float>());
  }
  set_deterministic(false);
  return all;
}

TEST(Llama, LearnsTheSameWithAndWithoutRecomputation) {
  for (const Device device : test_devices()) {
    const std::vector<float> plain = losses(device, false);
    EXPECT_NEAR(plain.front(), std::log(19.0f), 0.2f);
    EXPECT_LT(plain.back(), 0.5f);
    EXPECT_EQ(losses(device, true), plain);
  }
}

}  // namespace
}  // namespace mixtape
