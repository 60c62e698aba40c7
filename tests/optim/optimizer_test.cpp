// What an optimizer does when others write its parameters, and that a step is taken for all of its
// groups or for none.
#include "optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/capture.h"
#include "engine/device_error.h"
#include "engine/grad_mode.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

using testing::expect_error;
using testing::test_devices;
using Values = std::vector<float>;

Tensor parameter(const Values& values, Dtype dtype, Device device, const char* name = "w") {
  const auto n = static_cast<std::int64_t>(values.size());
  Tensor p = from_vector(values, {n}).to(device, dtype).set_requires_grad();
  p.set_name(name);
  return p;
}

/// One step whose gradient is `g` in every element.
void step(optim::Optimizer& opt, const Tensor& p, double g) {
  sum(p * g).backward();
  opt.step();
  opt.zero_grad();
}

Values master_of(const optim::Optimizer& opt, const std::string& name = "w") {
  for (const nn::NamedTensor& n : opt.state_dict())
    if (n.name == name + ".master") return n.tensor.to_vector<float>();
  return {};
}

/// Calls f(device, dtype) for each device and 16-bit type.
template <class F>
void on_each(F&& f) {
  for (const Device device : test_devices())
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) f(device, dtype);
}

TEST(Masters, FollowWeightsThatAreLoaded) {
  on_each([](Device d, Dtype dtype) {
    nn::Linear f(3, 2);
    f.to(d, dtype);
    optim::AdamW opt(f.parameters(), {.lr = 1e-3f, .weight_decay = 0});
    const Tensor x = ones({1, 3}, {.dtype = dtype, .device = d});
    const auto take_step = [&](double g) {
      sum(f(x) * g).backward();
      opt.step();
      opt.zero_grad();
    };
    take_step(1);
    f.load_state_dict({{"weight", full({2, 3}, 5)}, {"bias", full({2}, -3)}});
    EXPECT_EQ(master_of(opt, "weight"), Values(6, 5.0f));  // in a checkpoint before the next step
    take_step(0);
    // What is left of the first step's momentum moves a weight by less than lr.
    for (const float w : f.weight.to_vector<float>()) EXPECT_NEAR(w, 5, 5e-3) << dtype;
    for (const float w : master_of(opt, "weight")) EXPECT_NEAR(w, 5, 1e-3) << dtype;
    for (const float b : master_of(opt, "bias")) EXPECT_NEAR(b, -3, 1e-3) << dtype;
  });
}

TEST(Masters, KeepWhatRoundingHidesWhereAWriteChangesNothing) {
  on_each([](Device d, Dtype dtype) {
    Tensor p = parameter({1, 1, 1}, dtype, d);
    optim::Sgd opt({p}, {.lr = 1e-4f});
    for (int i = 0; i < 3; ++i) step(opt, p, 1);
    const Values before = master_of(opt);
    EXPECT_NE(before[0], p.to_vector<float>()[0]);  // the master holds more than the weight
    {
      const NoGrad no_grad;
      p.copy_(p.clone());
      p.slice(0, 2, 3).fill_(4);
    }
    const Values after = master_of(opt);
    EXPECT_EQ(after, (Values{before[0], before[1], 4}));
    step(opt, p, 0);
    EXPECT_EQ(master_of(opt), after);
  });
}

// Cases 64 and 65: whichever of weights and optimizer state is loaded first.
TEST(Masters, AreExactAfterLoadingStateInEitherOrder) {
  on_each([](Device d, Dtype dtype) {
    Tensor p = parameter({1, -2}, dtype, d);
    optim::Sgd opt({p}, {.lr = 1e-4f});
    for (int i = 0; i < 5; ++i) step(opt, p, 1);
    const Values exact = master_of(opt);
    const optim::State state = [&] {
      optim::State copy;
      for (const nn::NamedTensor& n : opt.state_dict()) copy.push_back({n.name, n.tensor.clone()});
      return copy;
    }();
    for (const bool weights_first : {true, false}) {
      Tensor q = parameter({7, 7}, dtype, d);
      optim::Sgd other({q}, {.lr = 1e-4f});
      step(other, q, 1);
      {
        const NoGrad no_grad;
        if (weights_first) q.copy_(p);
        other.load_state_dict(state);
        if (!weights_first) q.copy_(p);
      }
      EXPECT_EQ(master_of(other), exact);
      step(other, q, 0);
      EXPECT_EQ(master_of(other), exact);
      EXPECT_EQ(q.to_vector<float>(), p.to_vector<float>());
    }
  });
}

TEST(Masters, OfWeightsThatBecomeNanAreNan) {
  on_each([](Device d, Dtype dtype) {
    Tensor p = parameter({1, 1}, dtype, d);
    optim::Sgd opt({p}, {.lr = 1e-4f});
    {
      const NoGrad no_grad;
      p.slice(0, 0, 1).fill_(std::nan(""));
    }
    EXPECT_TRUE(std::isnan(master_of(opt)[0]));
    EXPECT_EQ(master_of(opt)[1], 1);
  });
}

/// A captured step of Sgd with gradient 1; with `limit`, the step itself clamps the weight after.
struct CapturedSgd {
  Tensor p;
  optim::Sgd opt;
  CapturedStep step;
  CapturedSgd(Dtype dtype, Device d, double limit = 0)
      : p(parameter({1, 2}, dtype, d)),
        opt({p}, {.lr = 0.25f}),
        step(capture(
            [this, limit](Inputs) -> std::vector<Tensor> {
              sum(p).backward();
              opt.step();
              opt.zero_grad();
              const NoGrad no_grad;
              if (limit > 0) p.clamp_(limit, 10);
              return {};
            },
            {.device = d, .warmup = 2})) {}
  void run(int times) {
    for (int i = 0; i < times; ++i) step(std::vector<Tensor>{});
  }
};

TEST(Masters, FollowWritesBetweenCapturedSteps) {
  on_each([](Device d, Dtype dtype) {
    for (const int before : {1, 2, 3, 5}) {  // eager, the call that records, a replay
      CapturedSgd net(dtype, d);
      net.run(before);
      {
        const NoGrad no_grad;
        net.p.fill_(16);
      }
      net.run(4);
      EXPECT_EQ(net.p.to_vector<float>(), Values(2, 15)) << "written after " << before;
      EXPECT_EQ(master_of(net.opt), Values(2, 15));
    }
  });
}

TEST(Masters, FollowWritesOfTheCapturedStepItself) {
  on_each([](Device d, Dtype dtype) {
    CapturedSgd net(dtype, d, 0.5);
    net.run(8);  // from 1 and 2 downwards by 0.25, and up again to the limit
    EXPECT_EQ(net.p.to_vector<float>(), Values(2, 0.5));
    EXPECT_EQ(master_of(net.opt), Values(2, 0.5));
  });
}

// ---- several groups ----------------------------------------------------------------------------

struct TwoGroups {
  Tensor a, b;
  optim::AdamW opt;
  explicit TwoGroups(Device d)
      : a(parameter({1}, Dtype::f32, d, "a")),
        b(parameter({1}, Dtype::f32, d, "b")),
        opt({a}, {.lr = 0.5f, .weight_decay = 0}) {
    opt.add_group({b}, {.lr = 0.25f, .weight_decay = 0});
  }
  void backward() { sum(a + b).backward(); }
  std::pair<float, float> values() const { return {a.item<float>(), b.item<float>()}; }
};

TEST(Groups, StepWithTheirOwnRates) {
  for (const Device d : test_devices()) {
    TwoGroups net(d);
    net.backward();
    net.opt.step();
    EXPECT_NEAR(net.a.item<float>(), 0.5, 1e-6);
    EXPECT_NEAR(net.b.item<float>(), 0.75, 1e-6);
  }
}

TEST(Groups, AreSkippedTogetherByFoundInf) {
  for (const Device d : test_devices()) {
    TwoGroups net(d);
    net.backward();
    net.opt.step({.found_inf = ones({1}, {.device = d}), .inv_scale = {}, .clip_factor = {}});
    EXPECT_EQ(net.values(), std::pair(1.0f, 1.0f));
    net.opt.step({.found_inf = zeros({1}, {.device = d}), .inv_scale = {}, .clip_factor = {}});
    EXPECT_NE(net.a.item<float>(), 1);
    EXPECT_NE(net.b.item<float>(), 1);
  }
}

TEST(Groups, AreSkippedTogetherByADeviceError) {
  for (const Device d : test_devices()) {
    if (d.is_cpu()) continue;  // kernels there throw at once
    TwoGroups net(d);
    net.backward();
    const Tensor row =
        embedding(ones({3, 1}, {.device = d}), full({1}, 5, {.dtype = Dtype::i64}).to(d));
    net.opt.step();
    expect_error([&] { synchronize(d); }, "expected an index in [0, 3), got 5");
    EXPECT_EQ(net.values(), std::pair(1.0f, 1.0f));
    net.opt.step();
    EXPECT_NE(net.a.item<float>(), 1);
    EXPECT_NE(net.b.item<float>(), 1);
  }
}

TEST(Groups, AreLeftAloneTogetherByAnIncompleteGradient) {
  for (const Device d : test_devices()) {
    TwoGroups net(d);
    net.backward();
    net.b.register_hook([](const Tensor&) -> Tensor { MT_THROW("a hook fails"); });
    expect_error([&] { net.b.sum().backward(); }, "a hook fails");
    expect_error([&] { net.opt.step(); }, "the gradient of b is incomplete");
    EXPECT_EQ(net.values(), std::pair(1.0f, 1.0f));
  }
}

TEST(Groups, AreOnOneDevice) {
  for (const Device d : test_devices()) {
    if (d.is_cpu()) continue;
    const Tensor a = parameter({1}, Dtype::f32, d), b = parameter({1}, Dtype::f32, Device::cpu());
    expect_error([&] { optim::Sgd({a, b}); }, "expected all parameters on cuda:0");
    optim::Sgd opt({a});
    expect_error([&] { opt.add_group({b}, {}); }, "expected all parameters on cuda:0");
  }
}

}  // namespace
}  // namespace mixtape
