// Activation recomputation: the same bits as without it (CASES 38, 53), gradients to everything
// that the function uses, hooks that wait for the last contribution, and errors instead of wrong
// gradients.
#include <gtest/gtest.h>

#include "engine/allocator.h"
#include "engine/determinism.h"
#include "mixtape.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

using testing::expect_error;
using testing::test_devices;
using Values = std::vector<float>;

Values values_of(const Tensor& t) { return t.to_vector<float>(); }

struct Block : nn::Module<Block> {
  nn::LayerNorm norm{Shape{16}};
  nn::Linear in{16, 32}, out{32, 16};
  Block() {
    add("norm", norm);
    add("in", in);
    add("out", out);
  }
  Tensor forward(const Tensor& x) {
    return x + dropout(out(dropout(gelu(in(norm(x))), 0.2, training())), 0.3, training());
  }
};

enum class Use : std::uint8_t { none, each_block, nested };

struct Net : nn::Module<Net> {
  nn::Embedding embedding{11, 16};
  nn::ModuleList<Block> blocks;
  nn::Linear head{16, 11, {.bias = false}};
  Use use;
  explicit Net(Use u) : use(u) {
    add("embedding", embedding);
    for (int i = 0; i < 3; ++i) blocks.emplace_back();
    add("blocks", blocks);
    add("head", head);
    head.weight = embedding.weight;  // tied: used inside and outside of what is recomputed
  }
  Tensor body(Tensor x) {
    for (Block& block : blocks) x = use == Use::none ? block(x) : nn::checkpoint(block, x);
    return linear(x, embedding.weight);
  }
  Tensor forward(const Tensor& tokens) {
    const Tensor x = embedding(tokens);
    if (use != Use::nested) return body(x);
    return nn::checkpoint([this](const Tensor& h) { return body(h); }, x);
  }
};

struct Trained {
  std::vector<Values> losses, gradients, parameters;
  PhiloxState random;
};

Trained train(Device device, Use use, Dtype dtype, bool captured = false) {
  set_deterministic(true);
  manual_seed(5);
  Net net(use);
  net.to(device);
  optim::AdamW opt(net.parameters(), {.lr = 1e-2f});
  const StepFunction step = [&](Inputs in) -> std::vector<Tensor> {
    Tensor loss;
    {
      const Autocast amp(dtype);
      loss = cross_entropy(net(in[0]).flatten(0, 1), in[1]);
    }
    opt.zero_grad();
    loss.backward();
    std::vector<Tensor> results = {loss};
    for (const Tensor& p : net.parameters()) results.push_back(p.grad().clone());
    opt.step();
    return results;
  };
  CapturedStep captured_step(step, {.device = device, .warmup = 2});
  Trained t;
  for (int i = 0; i < 5; ++i) {
    const Tensor in[] = {randint(0, 11, {4, 6}).to(device), randint(0, 11, {24}).to(device)};
    const std::vector<Tensor> results = captured ? captured_step(in) : step(in);
    t.losses.push_back(values_of(results[0]));
    for (std::size_t k = 1; k < results.size(); ++k) t.gradients.push_back(values_of(results[k]));
  }
  for (const Tensor& p : net.parameters()) t.parameters.push_back(values_of(p));
  t.random = random_state(device);
  set_deterministic(false);
  return t;
}

void expect_same_bits(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.gradients, b.gradients);
  EXPECT_EQ(a.parameters, b.parameters);
  EXPECT_EQ(a.random.offset, b.random.offset);
}

TEST(Checkpoint, LossesAndGradientsAreTheSameBits) {  // CASES 38, 53
  for (const Device device : test_devices()) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
      const Trained plain = train(device, Use::none, dtype);
      EXPECT_NE(plain.losses.front(), plain.losses.back());
      expect_same_bits(train(device, Use::each_block, dtype), plain);
      expect_same_bits(train(device, Use::nested, dtype), plain);
    }
  }
}

TEST(Checkpoint, CapturedStepsDrawTheSameMasks) {  // CASES 97; a graph on CUDA only
  for (const Device device : test_devices()) {
    const Trained plain = train(device, Use::none, Dtype::bf16);
    expect_same_bits(train(device, Use::each_block, Dtype::bf16, true), plain);
    expect_same_bits(train(device, Use::nested, Dtype::bf16, true), plain);
  }
}

TEST(Checkpoint, GradientsReachInputsParametersAndOtherTensors) {
  for (const Device device : test_devices()) {
    const auto run = [&](bool recompute, std::vector<Tensor>& leaves) {
      manual_seed(3);
      Tensor x = randn({4, 8}, {.device = device}), w = randn({8, 8}, {.device = device});
      Tensor scale = randn({8}, {.device = device});
      for (Tensor* t : {&x, &w, &scale}) t->set_requires_grad();
      const Tensor activation = mul(exp(scale), 0.5);  // made outside, used inside and outside
      const auto f = [&](const Tensor& a) { return mul(tanh(matmul(mul(a, 2.0), w)), activation); };
      const Tensor h = sigmoid(x), y = recompute ? nn::checkpoint(f, h) : f(h);
      sum(mul(mul(y, y), add(activation, h))).backward();
      leaves = {x, w, scale};
    };
    std::vector<Tensor> plain, recomputed;
    run(false, plain);
    run(true, recomputed);
    for (std::size_t i = 0; i < plain.size(); ++i)
      EXPECT_EQ(values_of(recomputed[i].grad()), values_of(plain[i].grad())) << i;
  }
}

TEST(Checkpoint, ParametersNeedNoInputWithAGradient) {
  Tensor w = randn({3, 3}).set_requires_grad();
  const Tensor y = nn::checkpoint([&](const Tensor& x) { return matmul(x, w); }, ones({2, 3}));
  ASSERT_TRUE(y.requires_grad());
  sum(y).backward();
  EXPECT_EQ(values_of(w.grad()), Values(9, 2.0f));
}

TEST(Checkpoint, HooksSeeTheWholeGradientOnce) {
  Tensor w = ones({2}).set_requires_grad();
  int hooks = 0, post_hooks = 0;
  Values seen;
  w.register_hook([&](const Tensor& g) {
    ++hooks;
    seen = values_of(g);
    return Tensor();
  });
  w.register_post_accumulate_hook([&](Tensor&) { ++post_hooks; });
  const Tensor y =
      nn::checkpoint([&](const Tensor& x) { return mul(mul(x, w), w); }, tensor({3.0f, 4.0f}));
  sum(add(y, mul(w, 10.0))).backward();
  EXPECT_EQ(hooks, 1);
  EXPECT_EQ(post_hooks, 1);
  EXPECT_EQ(seen, (Values{16, 18}));
  EXPECT_EQ(values_of(w.grad()), (Values{16, 18}));
}

TEST(Checkpoint, GradReturnsWhatIsAskedFor) {
  Tensor x = tensor({2.0f, 3.0f}).set_requires_grad(), w = ones({2}).set_requires_grad();
  const auto f = [&](const Tensor& a) { return mul(mul(a, a), w); };
  const std::vector<Tensor> g = grad({sum(nn::checkpoint(f, x))}, {x});
  EXPECT_EQ(values_of(g[0]), (Values{4, 6}));
  EXPECT_FALSE(w.grad().defined());
}

TEST(Checkpoint, SeveralResultsOneOfThemAnInput) {
  Tensor x = tensor({2.0f, 3.0f}).set_requires_grad();
  const std::vector<Tensor> out = nn::checkpoint(
      [](const Tensor& a) -> std::vector<Tensor> {
        return {a, mul(a, a), argmax(a, 0), Tensor()};
      },
      x);
  ASSERT_EQ(out.size(), 4u);
  EXPECT_FALSE(out[2].requires_grad());
  EXPECT_FALSE(out[3].defined());
  EXPECT_TRUE(x.is_leaf());
  sum(out[1]).backward({}, {.retain_graph = true});
  EXPECT_EQ(values_of(x.grad()), (Values{4, 6}));
  sum(out[0]).backward();
  EXPECT_EQ(values_of(x.grad()), (Values{5, 7}));
}

TEST(Checkpoint, RecomputesUnderForwardsAutocast) {  // CASES 53
  std::vector<Dtype> seen;
  Tensor x = randn({2, 4}).set_requires_grad(), w = randn({4, 4}).set_requires_grad();
  Tensor loss;
  {
    const Autocast amp(Dtype::f16);
    const Tensor y = nn::checkpoint(
        [&](const Tensor& a) {
          const Tensor product = matmul(a, w);
          seen.push_back(product.dtype());
          return product;
        },
        x);
    loss = sum(y);
  }
  {
    const Autocast other(Dtype::bf16);
    loss.backward();
  }
  EXPECT_EQ(seen, (std::vector<Dtype>{Dtype::f16, Dtype::f16}));
}

TEST(Checkpoint, RunsOnceWhereNothingIsRecorded) {
  int runs = 0;
  const auto f = [&](const Tensor& a) {
    ++runs;
    return mul(a, 2.0);
  };
  EXPECT_FALSE(nn::checkpoint(f, ones({2})).requires_grad());
  Tensor x = ones({2}).set_requires_grad();
  {
    const NoGrad no_grad;
    EXPECT_FALSE(nn::checkpoint(f, x).requires_grad());
  }
  EXPECT_EQ(runs, 2);
  const Tensor y = nn::checkpoint(f, x);
  EXPECT_EQ(runs, 3);
  sum(y).backward();
  EXPECT_EQ(runs, 4);
}

TEST(Checkpoint, KeepsOnlyInputsAndResults) {
  for (const Device device : test_devices()) {
    const auto in_use = [&] {
      synchronize(device);
      return memory_stats(device).allocated;
    };
    Tensor x = randn({64, 256}, {.device = device}).set_requires_grad();
    const auto f = [](const Tensor& a) {
      Tensor y = a;
      for (int i = 0; i < 6; ++i) y = tanh(y);
      return y;
    };
    const std::size_t before = in_use(), one = 64 * 256 * sizeof(float);
    {
      const Tensor plain = sum(f(x));
      EXPECT_GE(in_use() - before, 6 * one);
    }
    EXPECT_EQ(in_use(), before);
    {
      const Tensor recomputed = sum(nn::checkpoint(f, x));
      EXPECT_LT(in_use() - before, 2 * one);
      recomputed.backward();
      x.zero_grad();
    }
    { const Tensor dropped = sum(nn::checkpoint(f, x)); }
    EXPECT_LE(in_use(), before + one);  // a gradient that zero_grad() kept
  }
}

TEST(Checkpoint, RetainedGraphsRunAgain) {
  Tensor x = tensor({2.0f, 3.0f}).set_requires_grad();
  const Tensor y = sum(nn::checkpoint([](const Tensor& a) { return mul(a, a); }, x));
  y.backward({}, {.retain_graph = true});
  y.backward();
  EXPECT_EQ(values_of(x.grad()), (Values{8, 12}));
  expect_error([&] { y.backward(); }, "backward a second time");
}

TEST(Checkpoint, WhatWasWrittenInPlaceIsAnError) {
  Tensor x = ones({2}).set_requires_grad(), w = ones({2}).set_requires_grad();
  w.set_name("net.weight");
  const auto f = [&](const Tensor& a) { return mul(exp(a), w); };
  {
    const Tensor y = sum(nn::checkpoint(f, x));
    const NoGrad no_grad;
    x.add_(1.0);
    expect_error([&] { y.backward(); },
                 "checkpoint: input 0 (float32(2,)) was modified in place since forward");
  }
  x.zero_grad();
  w.zero_grad();
  {
    const Tensor y = sum(nn::checkpoint(f, x));
    const NoGrad no_grad;
    w.mul_(2.0);
    expect_error([&] { y.backward(); }, "checkpoint: net.weight (float32(2,)) was modified");
  }
  {  // by the function itself
    const Tensor h = exp(ones({2}).set_requires_grad());
    const Tensor y = sum(nn::checkpoint(
        [](const Tensor& a) {
          Tensor b = a;
          return mul(b.mul_(2.0), 3.0);
        },
        h));
    expect_error([&] { y.backward(); }, "checkpoint: input 0 (float32(2,)) was modified in place");
  }
}

TEST(Checkpoint, SecondDerivativesAreAnError) {
  Tensor x = ones({2}).set_requires_grad();
  const Tensor y = sum(nn::checkpoint([](const Tensor& a) { return exp(a); }, x));
  expect_error([&] { grad({y}, {x}, {}, {.create_graph = true}); },
               "checkpoint: second derivatives through a recomputed function");
}

TEST(Checkpoint, AFunctionThatDoesSomethingElseIsAnError) {
  Tensor x = ones({4}).set_requires_grad(), w = ones({4}).set_requires_grad();
  bool again = false;
  const auto backward_of = [&](auto f) {
    again = false;
    const Tensor y = sum(nn::checkpoint(f, x));
    again = true;
    y.backward();
  };
  expect_error([&] { backward_of([&](const Tensor& a) { return again ? a : dropout(a, 0.5); }); },
               "expected the recomputation to make 1 random draws as forward did, got 0");
  expect_error(
      [&] { backward_of([&](const Tensor& a) { return again ? dropout(a, 0.5) : mul(a, 1.0); }); },
      "expected 0 random draws as in the first run, got one more");
  expect_error(
      [&] { backward_of([&](const Tensor& a) { return again ? mul(a, w) : mul(a, 1.0); }); },
      "the recomputation used a leaf, which forward did not use");
  expect_error(
      [&] { backward_of([&](const Tensor& a) { return again ? a.slice(0, 0, 2) : mul(a, 1.0); }); },
      "expected result 0 of the recomputation to be float32(4,) as in forward");
}

TEST(Checkpoint, AFailedBackwardCanBeRepeated) {
  Tensor x = ones({2}).set_requires_grad();
  bool fail = false;
  const Tensor y = sum(nn::checkpoint(
      [&](const Tensor& a) {
        MT_CHECK(!fail, "test: told to fail");
        return mul(a, 3.0);
      },
      x));
  fail = true;
  expect_error([&] { y.backward({}, {.retain_graph = true}); }, "told to fail");
  fail = false;
  y.backward();
  EXPECT_EQ(values_of(x.grad()), (Values{3, 3}));
}

}  // namespace
}  // namespace mixtape
