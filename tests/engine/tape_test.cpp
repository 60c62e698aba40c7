// The tape: accumulation, hooks, version checks, teardown, higher order, errors. Names of tests
// that begin with Case give the number of the fault they guard against.
#include <gtest/gtest.h>

#include <cmath>

#include <functional>
#include <thread>

#include "engine/allocator.h"
#include "engine/anomaly.h"
#include "engine/backward.h"
#include "engine/grad_mode.h"
#include "engine/node.h"
#include "ops/ops.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

using testing::expect_error;
using testing::test_devices;

Tensor leaf(std::vector<float> values, const Shape& shape, Device device = {}) {
  return from_vector(values, shape, {.device = device}).set_requires_grad();
}
std::vector<float> numbers(const Tensor& t) { return t.to_vector<float>(); }

TEST(Tape, AccumulatesOverUsesAndPasses) {
  for (const Device d : test_devices()) {
    Tensor x = leaf({1, 2, 3}, {3}, d);
    sum(x * x + 3.0 * x).backward();
    EXPECT_EQ(numbers(x.grad()), (std::vector<float>{5, 7, 9}));
    sum(x).backward();
    EXPECT_EQ(numbers(x.grad()), (std::vector<float>{6, 8, 10}));
    x.zero_grad();
    EXPECT_FALSE(x.grad().defined());
  }
}

TEST(Tape, GradReturnsWithoutAccumulating) {
  Tensor x = leaf({2}, {1}), y = leaf({3}, {1});
  const Tensor z = x * y;
  const auto g = grad({z}, {x, y});
  EXPECT_EQ(numbers(g[0]), std::vector<float>{3});
  EXPECT_EQ(numbers(g[1]), std::vector<float>{2});
  EXPECT_FALSE(x.grad().defined());
  expect_error([&] { grad({x * x}, {y}); }, "was not used");
  EXPECT_FALSE(grad({x * x}, {y}, {}, {.allow_unused = true})[0].defined());
}

TEST(Tape, GradStopsAtIntermediateResults) {
  Tensor x = leaf({2, 3}, {2});
  const Tensor h = x * x, y = sum(h * h);
  const auto g = grad({y}, {h});
  EXPECT_EQ(numbers(g[0]), (std::vector<float>{8, 18}));
}

TEST(Tape, HigherOrder) {
  Tensor x = leaf({2}, {1});
  const Tensor y = x * x * x;
  const Tensor dy = grad({y}, {x}, {}, {.create_graph = true})[0];
  const Tensor d2y = grad({dy}, {x}, {}, {.create_graph = true})[0];
  const Tensor d3y = grad({d2y}, {x})[0];
  EXPECT_EQ(dy.item<float>(), 12);
  EXPECT_EQ(d2y.item<float>(), 12);
  EXPECT_EQ(d3y.item<float>(), 6);
}

TEST(Tape, SecondDerivativeOfAFusedKernelIsAnError) {
  Tensor x = leaf({1, 2, 3, 5}, {2, 2});
  const Tensor y = layer_norm(x, {2});
  const Tensor g = grad({sum(y * y)}, {x}, {}, {.create_graph = true})[0];
  expect_error([&] { sum(g * g).backward(); }, "layer_norm: its backward is a fused kernel");
}

TEST(Tape, BackwardNeedsAScalarOrAGradient) {
  Tensor x = leaf({1, 2}, {2});
  expect_error([&] { (x * 2.0).backward(); },
               "expected a one-element output or an explicit gradient");
  (x * 2.0).backward(from_vector<float>({1, 10}, {2}));
  EXPECT_EQ(numbers(x.grad()), (std::vector<float>{2, 20}));
  expect_error([&] { (x * 2.0).backward(ones({3})); }, "shape of the gradient");
  expect_error([&] { from_vector<float>({1}, {1}).backward(); },
               "expected an output that requires a gradient");
}

TEST(Tape, Case1InPlaceThroughADetachedAlias) {
  for (const Device d : test_devices()) {
    Tensor a = leaf({1, 2, 3}, {3}, d);
    const Tensor s = sigmoid(a);
    sum(s).backward({}, {.retain_graph = true});
    const auto g = numbers(a.grad());
    EXPECT_NEAR(g[0], 0.196612, 1e-6);
    EXPECT_NEAR(g[1], 0.104994, 1e-6);
    EXPECT_NEAR(g[2], 0.045177, 1e-6);
    s.detach().zero_();
    expect_error([&] { sum(s).backward(); }, "sigmoid: a tensor needed for backward");
  }
}

TEST(Tape, Case2InPlaceInsideNoGrad) {
  Tensor w = leaf({1, 2}, {2});
  const Tensor y = sum(w * w);
  {
    const NoGrad no_grad;
    w.mul_(2.0);
  }
  expect_error([&] { y.backward(); }, "mul: a tensor needed for backward");
}

TEST(Tape, Case4SavedViewSeesWritesToItsBase) {
  const Tensor w = randn({4, 5}).set_requires_grad();
  Tensor x = randn({2, 3, 4});
  const Tensor y = matmul(x, w);  // saves a 2-D reshape of x
  x.add_(1.0);
  expect_error([&] { sum(y).backward(); }, "modified in place");
}

TEST(Tape, Case6ExpandedLeaf) {
  for (const Device d : test_devices()) {
    Tensor x = from_vector<float>({5, 7}, {1, 2}, {.device = d})
                   .expand({2, 2})
                   .detach()
                   .set_requires_grad();
    const Tensor w = from_vector<float>({1, 2, 3, 4}, {2, 2}, {.device = d});
    const Tensor y = matmul(x.reshape({2, 2}), w);
    y.backward(from_vector<float>({1, 0, 0, 1}, {2, 2}, {.device = d}));
    EXPECT_EQ(numbers(x.grad()), (std::vector<float>{1, 3, 2, 4}));
    EXPECT_TRUE(x.grad().is_contiguous());
  }
}

TEST(Tape, Case7BroadcastCotangent) {
  for (const Device d : test_devices()) {
    Tensor v = leaf({1, 1}, {2}, d);
    const Tensor a = from_vector<float>({1, 2, 3, 4}, {2, 2}, {.device = d});
    sum(matmul(a, v)).backward();
    EXPECT_EQ(numbers(v.grad()), (std::vector<float>{4, 6}));

    Tensor logits = randn({64, 10}, {.device = d}).set_requires_grad();
    const Tensor target = randint(0, 10, {64}, {.dtype = Dtype::i64, .device = d});
    sum(cross_entropy(logits, target, {.reduction = Reduction::none})).backward();
    const Tensor p = softmax(logits.detach());
    const auto got = numbers(logits.grad()), soft = numbers(p);
    const auto t = target.to_vector<std::int64_t>();
    for (int i = 0; i < 640; ++i)
      EXPECT_NEAR(
          got[static_cast<std::size_t>(i)],
          soft[static_cast<std::size_t>(i)] - (t[static_cast<std::size_t>(i / 10)] == i % 10),
          1e-6);
  }
}

TEST(Tape, Case11SiblingGradientsDoNotShareMemory) {
  Tensor x = leaf({1}, {1}), y = leaf({1}, {1});
  ((x + y) + 3.0 * x).backward();
  EXPECT_EQ(numbers(x.grad()), std::vector<float>{4});
  EXPECT_EQ(numbers(y.grad()), std::vector<float>{1});
  EXPECT_NE(x.grad().raw_data(), y.grad().raw_data());
}

TEST(Tape, Case12SecondBackward) {
  for (const Device d : test_devices()) {
    Tensor x = randn({1, 2, 5, 5}, {.device = d}).set_requires_grad(),
           w = randn({3, 2, 3, 3}, {.device = d}).set_requires_grad();
    const Tensor y = sum(conv2d(x, w));
    y.backward({}, {.retain_graph = true});
    const auto once = numbers(w.grad());
    y.backward();
    const auto twice = numbers(w.grad());
    for (std::size_t i = 0; i < once.size(); ++i) EXPECT_EQ(twice[i], 2 * once[i]);
    expect_error([&] { y.backward(); }, "backward a second time");
  }
  Tensor x = leaf({1, 2}, {2});
  for (const auto& f : std::vector<std::function<Tensor()>>{
           [&] { return x + x; }, [&] { return exp(x); }, [&] { return mean(x); },
           [&] {
             return cat({x, x});
           },
           [&] { return softmax(x); }}) {
    const Tensor y = sum(f());
    y.backward();
    expect_error([&] { y.backward(); }, "backward a second time");
  }
}

Tensor deep_chain(int depth) {
  const Tensor x = scalar_tensor(1.0).set_requires_grad();
  Tensor y = x;
  for (int i = 0; i < depth; ++i) y = y + y * 1e-6;
  return y;
}

TEST(Tape, Case13DeepGraphIsTornDownIteratively) {
  deep_chain(200000);  // dropped without backward
  deep_chain(200000).backward();
  std::thread([] { deep_chain(50000); }).join();
}

TEST(Tape, Case14MemoryIsFreed) {
  for (const Device d : test_devices()) {
    Tensor x = randn({1000}, {.device = d}).set_requires_grad();
    exp(x);
    sum(exp(x)).backward();
    x.zero_grad();
    const std::size_t before = memory_stats(d).allocated;
    for (int i = 0; i < 1000; ++i) {
      Tensor y = exp(x);
      if (i % 2) sum(y).backward();
      x.zero_grad();
      Tensor z = exp(x);
      z.mul_(2.0);
      z = {};
    }
    EXPECT_EQ(memory_stats(d).allocated, before);
  }
}

TEST(Tape, Case35WhereSendsExactZeroToTheOtherBranch) {
  Tensor a = leaf({100}, {1});
  const Tensor e = exp(a);
  e.retain_grad();
  where(le(a, 0.0), e, a + 1.0).backward();
  EXPECT_EQ(numbers(e.grad()), std::vector<float>{0});
}

TEST(Tape, Case36ClampPassesItsGradientAtTheBounds) {
  Tensor x = leaf({-1, 0, 0.5, 1, 2}, {5});
  sum(clamp(x, 0.0, 1.0)).backward();
  EXPECT_EQ(numbers(x.grad()), (std::vector<float>{0, 1, 1, 1, 0}));
  EXPECT_TRUE(std::isnan(clamp(leaf({1}, {1}), std::nan(""), 2.0).item<float>()));
}

TEST(Tape, Case38DropoutGradientUsesTheMaskNotTheOutput) {
  for (const Device d : test_devices()) {
    Tensor x = zeros({1000}, {.device = d}).set_requires_grad();
    sum(dropout(x, 0.25)).backward();
    int kept = 0;
    for (const float g : numbers(x.grad())) {
      EXPECT_TRUE(g == 0 || std::fabs(g - 4.0f / 3) < 1e-6);
      kept += g != 0;
    }
    EXPECT_NEAR(kept, 750, 80);
    EXPECT_EQ(numbers(dropout(ones({3}, {.device = d}), 1.0)), (std::vector<float>{0, 0, 0}));
  }
}

TEST(Tape, HooksReplaceAndObserve) {
  Tensor x = leaf({1, 2}, {2});
  const Tensor h = x * 3.0;
  h.register_hook([](const Tensor& g) { return g * 10.0; });
  int accumulated = 0;
  x.register_post_accumulate_hook([&](Tensor& t) {
    ++accumulated;
    EXPECT_TRUE(t.same(x));
  });
  x.register_hook([](const Tensor& g) { return g + 1.0; });
  sum(h + h).backward();
  EXPECT_EQ(numbers(x.grad()), (std::vector<float>{61, 61}));
  EXPECT_EQ(accumulated, 1);
}

TEST(Tape, CallbacksAtTheEndOfAPassSeeAllGradients) {
  for (const Device d : test_devices()) {
    Tensor first = leaf({1, 2}, {2}, d), last = leaf({3, 4}, {2}, d);
    std::vector<std::string> calls;
    const auto at_end = [&](const char* name) {
      BackwardRun::current()->at_end([&calls, name, first](bool whole) {
        calls.push_back(name + std::string(whole ? " whole" : " failed"));
        if (whole) {
          EXPECT_EQ(numbers(first.grad()), (std::vector<float>{6, 8}));
        }
      });
    };
    last.register_post_accumulate_hook([&](Tensor&) { at_end("a"), at_end("b"); });
    bool fail = false;
    first.register_post_accumulate_hook([&](Tensor&) { MT_CHECK(!fail, "on purpose"); });
    sum(first * 2.0 * last).backward();  // last's gradient is complete before first's
    EXPECT_EQ(calls, (std::vector<std::string>{"a whole", "b whole"}));
    EXPECT_EQ(BackwardRun::current(), nullptr);
    calls.clear();
    fail = true;
    expect_error([&] { sum(first * 2.0 * last).backward(); }, "on purpose");
    EXPECT_EQ(calls, (std::vector<std::string>{"a failed", "b failed"}));
  }
}

TEST(Tape, WhatACallbackAtTheEndThrowsFailsThePass) {
  Tensor x = leaf({1}, {1});
  int failed = 0;
  x.register_post_accumulate_hook([&](Tensor&) {
    BackwardRun::current()->at_end([](bool whole) { MT_CHECK(!whole, "too late"); });
    BackwardRun::current()->at_end([&](bool whole) { failed += whole ? 0 : 1; });
  });
  expect_error([&] { sum(x).backward(); }, "too late");
  EXPECT_EQ(failed, 1);
  expect_error([&] { x.grad(); }, "incomplete");
}

TEST(Tape, InPlaceOnTheTape) {
  Tensor x = leaf({1, 2}, {2});
  Tensor y = x * 2.0;
  y.add_(x);
  y.mul_(2.0);
  y.mul_(from_vector<float>({1, 2}, {2}));
  sum(y).backward();
  EXPECT_EQ(numbers(x.grad()), (std::vector<float>{6, 12}));
  Tensor z = x * 2.0;
  z.mul_(z);  // needs what it overwrites
  expect_error([&] { sum(z).backward(); }, "mul: a tensor needed for backward");
  expect_error([&] { x.mul_(2.0); }, "a leaf that requires a gradient is written in place");
  Tensor base = x * 1.0;
  Tensor row = base.slice(0, 0, 1);
  expect_error([&] { row.mul_(2.0); }, "writing a view in place while recording");
  base.mul_(2.0);
  expect_error([&] { row * 1.0; }, "this view was made before its memory was written");
  Tensor fresh = x * 1.0;
  fresh.fill_(7);
  sum(fresh).backward();
}

TEST(Tape, InferenceTensorsStayOffTheTape) {
  Tensor x;
  {
    const InferenceMode inference;
    x = ones({2});
  }
  Tensor w = leaf({1, 2}, {2});
  expect_error([&] { x* w; }, "made in inference mode");
  EXPECT_EQ(numbers(x.clone() * w.detach()), (std::vector<float>{1, 2}));
}

TEST(Tape, AnomalyModeNamesTheOpAndThePlace) {
  Tensor x = leaf({-1}, {1});
  const AnomalyMode anomaly;
  const Tensor y = sqrt(x) * 1.0;
  expect_error([&] { y.backward(); }, "sqrt: backward produced NaN");
}

TEST(Tape, AFailedBackwardMarksGradientsIncomplete) {
  Tensor x = leaf({1, 2}, {2}), w = leaf({3, 4}, {2});
  const Tensor h = w * 2.0, y = sum(x + h);
  h.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("hook"); });
  EXPECT_THROW(y.backward(), std::runtime_error);
  expect_error([&] { x.grad(); }, "incomplete because backward failed");
  x.zero_grad();
  sum(x).backward();
  EXPECT_EQ(numbers(x.grad()), (std::vector<float>{1, 1}));
}

struct Cube {  // a user's op, from outside the library
  double factor;
  static constexpr OpInfo info{.name = "user_cube", .higher_order = true};
  Metas infer(Inputs in) const { return {meta_of(in[0])}; }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    out[0] = in[0] * in[0] * in[0] * factor;
    saved.value(in[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor x = saved[0];
    if (dx[0]) dx[0].set(dy[0] * x * x * (3 * factor));
  }
};

TEST(Tape, UserDefinedOp) {
  Tensor x = leaf({1, 2}, {2});
  const Tensor y = sum(apply(Cube{2}, {x}));
  const Tensor g = grad({y}, {x}, {}, {.create_graph = true})[0];
  EXPECT_EQ(numbers(g), (std::vector<float>{6, 24}));
  sum(g).backward();
  EXPECT_EQ(numbers(x.grad()), (std::vector<float>{12, 24}));
}

TEST(Tape, GradModeScopes) {
  Tensor x = leaf({1}, {1});
  {
    const NoGrad no_grad;
    EXPECT_FALSE((x * 2.0).requires_grad());
    const EnableGrad grad;
    EXPECT_TRUE((x * 2.0).requires_grad());
  }
  EXPECT_TRUE((x * 2.0).requires_grad());
  EXPECT_FALSE(x.detach().requires_grad());
  EXPECT_FALSE(gt(x, 0.0).requires_grad());
}

}  // namespace
}  // namespace mixtape
