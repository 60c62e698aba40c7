// MultiheadAttention and TransformerBlock against plain compositions of ops, their gradients
// against central differences in float64, and what they refuse. PyTorch's numbers are in
// tests/parity/attention_test.cpp.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/autocast.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "nn/transformer.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using Config = nn::MultiheadAttentionConfig;

void expect_near(const Tensor& got, const Tensor& want, double tolerance) {
  ASSERT_EQ(got.shape(), want.shape());
  EXPECT_LE(abs(sub(got, want)).max().item<double>(), tolerance);
}

/// Every parameter at random, so that each matters.
void randomize(nn::ModuleBase& m) {
  const NoGrad no_grad;
  for (Tensor p : m.parameters()) p.uniform_(-0.5, 0.5);
}

/// The weight and bias of queries, keys or values (`part` 0, 1, 2), packed or not.
Tensor projected(const nn::MultiheadAttention& m, const Tensor& x, int part, std::int64_t heads,
                 std::int64_t kv_heads, std::int64_t columns) {
  const std::int64_t first = part == 0 ? 0 : heads + (part - 1) * kv_heads;
  const std::int64_t count = part == 0 ? heads : kv_heads;
  const auto rows = [&](const Tensor& t) {
    return t.slice(0, first * columns, (first + count) * columns);
  };
  const Tensor separate[] = {m.q_proj_weight, m.k_proj_weight, m.v_proj_weight};
  const Tensor weight = m.in_proj_weight ? rows(m.in_proj_weight) : separate[part];
  Tensor y = matmul(x, weight.t());
  if (m.in_proj_bias) y = y + rows(m.in_proj_bias);
  return y.reshape({x.size(0), x.size(1), count, columns}).transpose(1, 2);  // (B, count, N, D)
}

/// The module with all scores in memory and each group's keys and values repeated.
Tensor composed(const nn::MultiheadAttention& m, const Config& c, const Tensor& query,
                const Tensor& key, const Tensor& value, const Tensor& added) {
  const std::int64_t b = query.size(0), t = query.size(1), s = key.size(1), h = c.heads,
                     g = c.kv_heads == 0 ? h : c.kv_heads, d = query.size(2) / h;
  const auto repeated = [&](const Tensor& x) {
    return x.unsqueeze(2).expand({b, g, h / g, s, d}).reshape({b, h, s, d});
  };
  const Tensor q = projected(m, query, 0, h, g, d), k = repeated(projected(m, key, 1, h, g, d)),
               v = repeated(projected(m, value, 2, h, g, d));
  Tensor scores = matmul(q, k.t()) / std::sqrt(static_cast<double>(d));
  if (added) scores = scores + added;
  const Tensor y = matmul(softmax(scores), v).transpose(1, 2).reshape({b, t, h * d});
  const Tensor z = matmul(y, m.out_proj.weight.t());
  return m.out_proj.bias ? z + m.out_proj.bias : z;
}

/// -1e30 above the diagonal.
Tensor causal_scores(std::int64_t t, std::int64_t s, Device device) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < t; ++i)
    for (std::int64_t j = 0; j < s; ++j) values.push_back(j > i ? -1e30f : 0.0f);
  return from_vector(values, {t, s}, {.device = device});
}

TEST(MultiheadAttention, OfAnotherSequenceIsTheCompositionOfOps) {
  for (const Device device : test_devices()) {
    for (const Config& c : {Config{.heads = 4}, Config{.heads = 4, .kv_heads = 2},
                            Config{.heads = 4, .key_channels = 12, .value_channels = 20},
                            Config{.heads = 2, .kv_heads = 1, .value_channels = 8, .bias = false},
                            Config{.heads = 4, .causal = true}}) {
      manual_seed(1);
      nn::MultiheadAttention m(16, c);
      randomize(m);
      m.to(device);
      const TensorOptions options{.device = device};
      const Tensor q = randn({2, 5, 16}, options);
      const Tensor k = randn({2, 7, c.key_channels ? c.key_channels : 16}, options);
      const Tensor v = randn({2, 7, c.value_channels ? c.value_channels : 16}, options);
      const Tensor added = c.causal ? causal_scores(5, 7, device) : Tensor();
      expect_near(m(q, k, v), composed(m, c, q, k, v, added), 1e-5);
      if (k.size(2) == v.size(2))  // one product for both
        expect_near(m(q, k, k), composed(m, c, q, k, k, added), 1e-5);
    }
  }
}

TEST(MultiheadAttention, OfItselfReadsThePackedProjection) {
  for (const Device device : test_devices()) {
    for (const Config& c :
         {Config{.heads = 4}, Config{.heads = 4, .kv_heads = 2, .causal = true}}) {
      nn::MultiheadAttention m(32, c);
      randomize(m);
      m.to(device);
      const Tensor x = randn({2, 6, 32}, {.device = device}), y = x.clone(), z = x.clone();
      const Tensor added = c.causal ? causal_scores(6, 6, device) : Tensor();
      expect_near(m(x), composed(m, c, x, x, x, added), 1e-5);
      expect_near(m(x), m(x, y, z), 1e-5);
      expect_near(m(x, x, x, zeros({6, 6}, {.device = device})), m(x), 1e-5);  // the way of masks
    }
  }
}

TEST(MultiheadAttention, MasksAreAddedOrSayWhereToAttend) {
  for (const Device device : test_devices()) {
    nn::MultiheadAttention m(16, {.heads = 2});
    randomize(m);
    m.to(device);
    const Tensor q = randn({2, 3, 16}, {.device = device}),
                 k = randn({2, 4, 16}, {.device = device});
    const Tensor added = randn({2, 1, 3, 4}, {.device = device});
    expect_near(m(q, k, k, added), composed(m, {.heads = 2}, q, k, k, added), 1e-5);
    const Tensor attend = tensor({1.0f, 1.0f, 0.0f, 1.0f}).to(device, Dtype::b8);
    const Tensor hidden = tensor({0.0f, 0.0f, -1e30f, 0.0f}).to(device);
    expect_near(m(q, k, k, attend), composed(m, {.heads = 2}, q, k, k, hidden), 1e-5);
  }
}

/// Gradients of sum(weights * f()) for every tensor of `leaves` against central differences.
template <class F>
void expect_gradients(F&& f, std::vector<Tensor> leaves) {
  const Tensor weights = randn(f().shape(), {.dtype = Dtype::f64});
  const auto loss = [&] { return sum(f() * weights); };
  const std::vector<Tensor> got = grad({loss()}, leaves);
  const NoGrad no_grad;
  constexpr double kStep = 1e-5;
  for (std::size_t l = 0; l < leaves.size(); ++l) {
    const std::vector<double> g = got[l].to_vector<double>();
    Tensor flat = leaves[l].detach().reshape({leaves[l].numel()});
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      Tensor element = flat.slice(0, i, i + 1);
      const double at = element.item<double>();
      element.fill_(at + kStep);
      const double above = loss().template item<double>();
      element.fill_(at - kStep);
      const double below = loss().template item<double>();
      element.fill_(at);
      ASSERT_NEAR(g[static_cast<std::size_t>(i)], (above - below) / (2 * kStep), 1e-7)
          << leaves[l].name() << " [" << i << "]";
    }
  }
}

Tensor input(const Shape& shape) {
  return randn(shape, {.dtype = Dtype::f64, .requires_grad = true});
}

TEST(MultiheadAttention, GradientsAreThoseOfCentralDifferences) {
  manual_seed(3);
  for (const Config& c : {Config{.heads = 2}, Config{.heads = 2, .key_channels = 3},
                          Config{.heads = 2, .kv_heads = 1, .causal = true}}) {
    nn::MultiheadAttention m(4, c);
    randomize(m);
    m.to(Dtype::f64);
    const Tensor q = input({1, 3, 4}), k = input({1, 4, c.key_channels ? c.key_channels : 4}),
                 v = input({1, 4, 4});
    std::vector<Tensor> leaves = m.parameters();
    leaves.insert(leaves.end(), {q, k, v});
    expect_gradients([&] { return m(q, k, v); }, leaves);
    if (c.key_channels != 0) continue;
    leaves = m.parameters();
    leaves.push_back(q);
    expect_gradients([&] { return m(q); }, leaves);
    leaves.push_back(k);
    expect_gradients([&] { return m(q, k, k); }, leaves);
  }
}

TEST(MultiheadAttention, NamesAreTorchs) {
  const auto names = [](const Config& c) {
    const nn::MultiheadAttention m(8, c);
    std::string all;
    for (const nn::NamedTensor& n : m.state_dict())
      all += detail::concat(n.name, n.tensor.shape(), " ");
    return all;
  };
  EXPECT_EQ(names({.heads = 2}),
            "in_proj_weight(24, 8) in_proj_bias(24,) out_proj.weight(8, 8) out_proj.bias(8,) ");
  EXPECT_EQ(names({.heads = 4, .kv_heads = 1, .value_channels = 6, .bias = false}),
            "q_proj_weight(8, 8) k_proj_weight(2, 8) v_proj_weight(2, 6) out_proj.weight(8, 8) ");
  EXPECT_EQ(nn::MultiheadAttention(8, {.heads = 4, .kv_heads = 2, .key_channels = 6}).describe(),
            "MultiheadAttention(8, 4 heads on 2 of keys and values, keys of 6 and values of 8)");
}

TEST(MultiheadAttention, DropsOnlyInTrainingAndCastsUnderAutocast) {
  for (const Device device : test_devices()) {
    nn::MultiheadAttention m(16, {.heads = 2, .dropout = 0.5});
    m.to(device);
    const Tensor q = randn({2, 9, 16}, {.device = device}),
                 k = randn({2, 8, 16}, {.device = device});
    EXPECT_GT(abs(m(q, k, k) - m(q, k, k)).max().item<double>(), 0);
    m.eval();
    EXPECT_EQ(abs(m(q, k, k) - m(q, k, k)).max().item<double>(), 0);
    const Tensor wide = m(q, k, k);
    const Autocast amp(Dtype::bf16);
    const Tensor low = m(q, k, k);
    EXPECT_EQ(low.dtype(), Dtype::bf16);
    expect_near(low.to(Dtype::f32), wide, 0.05);
    low.to(Dtype::f32).sum().backward();
    for (const Tensor& p : m.parameters()) EXPECT_EQ(p.grad().dtype(), Dtype::f32) << p.name();
  }
}

TEST(MultiheadAttention, NamesWhatDoesNotFit) {
  expect_error([] { nn::MultiheadAttention(30, {.heads = 4}); }, "a multiple of heads");
  expect_error([] { nn::MultiheadAttention(8, {.heads = 2, .key_channels = -1}); }, "at least 0");
  expect_error([] { nn::MultiheadAttention(8, {.heads = 2, .dropout = 2}); }, "in [0, 1]");
  nn::MultiheadAttention m(8, {.heads = 2, .key_channels = 6});
  const Tensor q = randn({2, 3, 8}), k = randn({2, 4, 6}), v = randn({2, 4, 8});
  expect_error([&] { m(q); }, "a key (B, S, 6) and a value (B, S, 8), got (2, 3, 8)");
  expect_error(
      [&] {
        m(q, k, randn({2, 5, 8}));
      },
      "MultiheadAttention: expected a query (B, T, 8)");
  expect_error(
      [&] {
        m(q, randn({1, 4, 6}), v);
      },
      "MultiheadAttention: expected a query (B, T, 8)");
  expect_error([&] { m(q, k, v, zeros({5, 4})); }, "do not broadcast");
}

// ---- blocks ------------------------------------------------------------------------------------

Tensor block_of_ops(const nn::TransformerBlock& b, const Tensor& x, bool causal) {
  const std::int64_t c = x.size(2);
  const auto norm = [&](const Tensor& y, const nn::LayerNorm& n) {
    return layer_norm(y, {c}, n.weight, n.bias, n.eps());
  };
  const Tensor a = self_attention(linear(norm(x, b.ln_1), b.attn.c_attn.weight, b.attn.c_attn.bias),
                                  {.heads = 2, .causal = causal});
  const Tensor y = x + linear(a, b.attn.c_proj.weight, b.attn.c_proj.bias);
  const Tensor hidden = gelu_tanh(linear(norm(y, b.ln_2), b.mlp.c_fc.weight, b.mlp.c_fc.bias));
  return y + linear(hidden, b.mlp.c_proj.weight, b.mlp.c_proj.bias);
}

TEST(TransformerBlock, IsTheCompositionOfOpsAloneAndInARow) {
  for (const Device device : test_devices()) {
    for (const bool causal : {true, false}) {
      const nn::TransformerBlockConfig config{
          .heads = 2, .hidden = 24, .causal = causal, .eps = 0.1};
      nn::TransformerBlock first(16, config), second(16, config);
      nn::LayerNorm last({16});
      for (nn::ModuleBase* m :
           {static_cast<nn::ModuleBase*>(&first), static_cast<nn::ModuleBase*>(&second),
            static_cast<nn::ModuleBase*>(&last)}) {
        randomize(*m);
        m->to(device);
      }
      const Tensor x = randn({2, 5, 16}, {.device = device});
      const Tensor want = block_of_ops(second, block_of_ops(first, x, causal), causal);
      expect_near(second(first(x)), want, 2e-5);
      const nn::Residual r = second(first(nn::Residual{first.ln_1(x), x}, second.ln_1), last);
      expect_near(r.sum, want, 2e-5);
      expect_near(r.normalized, last(want), 2e-5);
    }
  }
}

TEST(TransformerBlock, GradientsAreThoseOfCentralDifferences) {
  manual_seed(4);
  for (const bool bias : {true, false}) {
    nn::TransformerBlock block(4, {.heads = 2, .kv_heads = 1, .hidden = 6, .bias = bias});
    randomize(block);
    block.to(Dtype::f64);
    std::vector<Tensor> leaves = block.parameters();
    const Tensor x = input({1, 3, 4});
    leaves.push_back(x);
    expect_gradients([&] { return block(x); }, leaves);
  }
}

TEST(TransformerBlock, KeepsTheStreamsDtypeUnderAutocast) {
  for (const Device device : test_devices()) {
    nn::TransformerBlock block(16, {.heads = 2});
    block.to(device);
    const Tensor x = randn({2, 5, 16}, {.device = device}), wide = block(x);
    const Autocast amp(Dtype::bf16);
    EXPECT_EQ(block(x).dtype(), Dtype::f32);
    EXPECT_EQ(block(x.to(Dtype::bf16)).dtype(), Dtype::bf16);
    expect_near(block(x), wide, 0.05);
    const nn::Residual r = block(nn::Residual{block.ln_1(x), x}, block.ln_1);
    EXPECT_EQ(r.sum.dtype(), Dtype::f32);
    EXPECT_EQ(r.normalized.dtype(), Dtype::bf16);
  }
}

TEST(TransformerBlock, DropsOnlyInTraining) {
  const NoGrad no_grad;
  nn::TransformerBlock block(8, {.heads = 2, .dropout = 0.5});
  const Tensor x = randn({1, 5, 8});
  EXPECT_GT(abs(block(x) - block(x)).max().item<double>(), 0);
  block.eval();
  EXPECT_EQ(abs(block(x) - block(x)).max().item<double>(), 0);
}

}  // namespace
}  // namespace mixtape::testing
