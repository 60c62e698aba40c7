// GradScaler's state machine and what optimizers do under it.
#include "optim/grad_scaler.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/autocast.h"
#include "engine/grad_mode.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "optim/clip.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

using testing::expect_error;
using testing::test_devices;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Tensor parameter(std::vector<float> values, Device d = {}, const char* name = "w") {
  Tensor p = from_vector(values, {static_cast<std::int64_t>(values.size())}, {.device = d})
                 .set_requires_grad();
  p.set_name(name);
  return p;
}

/// One iteration whose gradient (before scaling) is `g` in every element.
void iterate(GradScaler& scaler, optim::Optimizer& opt, const Tensor& p, float g) {
  scaler.scale(sum(p * static_cast<double>(g))).backward();
  scaler.step(opt);
  scaler.update();
  opt.zero_grad();
}

TEST(GradScaler, GrowsAndBacksOff) {
  for (const Device d : test_devices()) {
    Tensor p = parameter({1, 1}, d);
    optim::Sgd opt({p}, {.lr = 0.5f});
    GradScaler scaler({.init_scale = 8, .growth_interval = 2});
    EXPECT_EQ(scaler.get_scale(), 8);
    iterate(scaler, opt, p, 1);
    EXPECT_EQ(scaler.get_scale(), 8);
    iterate(scaler, opt, p, 1);
    EXPECT_EQ(scaler.get_scale(), 16);
    EXPECT_EQ(p.to_vector<float>(), (std::vector<float>{0, 0}));
    iterate(scaler, opt, p, kInfinity);
    EXPECT_EQ(scaler.get_scale(), 8);
    EXPECT_EQ(p.to_vector<float>(), (std::vector<float>{0, 0}));
    const GradScaler::Report report = scaler.last_step();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.scale, 16);
    EXPECT_EQ(report.names, std::vector<std::string>{"w"});
    iterate(scaler, opt, p, 1);
    EXPECT_FALSE(scaler.last_step().skipped);
    EXPECT_EQ(p.to_vector<float>(), (std::vector<float>{-0.5, -0.5}));
  }
}

TEST(GradScaler, Case41StateMachine) {
  Tensor p = parameter({1});
  optim::Sgd opt({p});
  GradScaler scaler;
  scaler.scale(sum(p)).backward();
  scaler.unscale(opt);
  expect_error([&] { scaler.unscale(opt); },
               "already called for this optimizer since the last update()");
  scaler.update();  // the step was left out
  opt.zero_grad();
  scaler.scale(sum(p)).backward();
  scaler.unscale(opt);
  scaler.step(opt);
  expect_error([&] { scaler.step(opt); }, "already called");
  expect_error([&] { scaler.unscale(opt); }, "called after step()");
  scaler.update();
}

TEST(GradScaler, Case42ExplicitUnscaleIsNotRepeatedInTheStep) {
  for (const Device d : test_devices()) {
    Tensor a = parameter({1, 1}, d), b = parameter({1, 1}, d);
    optim::AdamW oa({a}, {.lr = 0.1f}), ob({b}, {.lr = 0.1f});
    GradScaler sa, sb;
    for (int i = 0; i < 3; ++i) {
      sa.scale(sum(a * a)).backward();
      sa.unscale(oa);
      sa.step(oa);
      sa.update();
      oa.zero_grad();
      sb.scale(sum(b * b)).backward();
      sb.step(ob);
      sb.update();
      ob.zero_grad();
    }
    EXPECT_EQ(a.to_vector<float>(), b.to_vector<float>());
  }
}

TEST(GradScaler, Case44ClippingScaledGradientsIsAnError) {
  Tensor p = parameter({0.3f, 0.4f});
  optim::Sgd opt({p}, {.lr = 1});
  GradScaler scaler({.init_scale = 1024});
  scaler.scale(sum(p * p) * 0.5).backward();
  expect_error([&] { optim::clip_grad_norm({p}, 1); }, "still multiplied by the loss scale");
  scaler.unscale(opt);
  EXPECT_NEAR(optim::clip_grad_norm({p}, 1).item<float>(), 0.5, 1e-6);
  EXPECT_NEAR(p.grad().to_vector<float>()[0], 0.3, 1e-6);
  EXPECT_NEAR(optim::clip_grad_norm({p}, 0.25f).item<float>(), 0.5, 1e-6);
  EXPECT_NEAR(p.grad().to_vector<float>()[0], 0.15, 1e-5);
}

TEST(GradScaler, Case46ScaleNeverReachesZeroAndGivesUpLoudly) {
  Tensor p = parameter({1});
  optim::Sgd opt({p});
  GradScaler patient({.max_consecutive_skips = 0});
  for (int i = 0; i < 300; ++i) iterate(patient, opt, p, kInfinity);
  EXPECT_GT(patient.get_scale(), 0);
  EXPECT_TRUE(std::isfinite(1 / patient.get_scale()));
  iterate(patient, opt, p, 0.5f);
  EXPECT_NEAR(p.to_vector<float>()[0], 1 - 0.5 * 1e-2, 1e-6);
  GradScaler strict({.max_consecutive_skips = 20});
  expect_error(
      [&] {
        for (int i = 0; i < 30; ++i) iterate(strict, opt, p, kInfinity);
      },
      "steps in a row were skipped");
}

TEST(GradScaler, Case47ScaleMayFallBelowOne) {
  Tensor p = parameter({1});
  optim::Sgd opt({p});
  GradScaler scaler({.init_scale = 1});
  iterate(scaler, opt, p, kInfinity);
  iterate(scaler, opt, p, kInfinity);
  EXPECT_EQ(scaler.get_scale(), 0.25f);
  GradScaler floored({.init_scale = 2, .min_scale = 1});
  for (int i = 0; i < 4; ++i) iterate(floored, opt, p, kInfinity);
  EXPECT_EQ(floored.get_scale(), 1);
}

TEST(GradScaler, Case49Float16ParametersHaveFloat32Masters) {
  for (const Device d : test_devices()) {
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      Tensor p = parameter({1, 2}, d).detach().to(dtype).set_requires_grad();
      optim::Sgd opt({p}, {.lr = 1e-4f});
      GradScaler scaler({.init_scale = 1024});
      for (int i = 0; i < 100; ++i) iterate(scaler, opt, p, 1);
      EXPECT_EQ(p.dtype(), dtype);
      const double expected = 1 - 100 * 1e-4;
      EXPECT_NEAR(p.to_vector<float>()[0], expected, 2 * unit_roundoff(dtype));
      const optim::State state = opt.state_dict();
      EXPECT_NEAR(state[0].tensor.to_vector<float>()[0], expected, 1e-5);
    }
  }
}

TEST(GradScaler, Case50StateSurvivesACheckpoint) {
  Tensor p = parameter({1}), q = parameter({1});
  optim::Sgd op({p}), oq({q});
  GradScaler a({.init_scale = 8192, .growth_interval = 50});
  for (int i = 0; i < 37; ++i) iterate(a, op, p, 0.25f);
  GradScaler b;
  b.load_state_dict(a.state_dict());
  {
    const NoGrad no_grad;
    q.copy_(p);
  }
  for (int i = 0; i < 100; ++i) {
    iterate(a, op, p, 0.25f);
    iterate(b, oq, q, 0.25f);
    ASSERT_EQ(a.get_scale(), b.get_scale());
    ASSERT_EQ(p.item<float>(), q.item<float>());
  }
}

TEST(GradScaler, SeveralOptimizersSkipOnTheirOwn) {
  for (const Device d : test_devices()) {
    Tensor p = parameter({1}, d, "p"), q = parameter({1}, d, "q");
    optim::Sgd op({p}, {.lr = 1}), oq({q}, {.lr = 1});
    GradScaler scaler({.init_scale = 4});
    for (int i = 0; i < 2; ++i) {
      scaler.scale(sum(p) + sum(q * static_cast<double>(i == 0 ? kInfinity : 1.0f))).backward();
      scaler.step(op);
      scaler.step(oq);
      scaler.update();
      EXPECT_EQ(scaler.last_step().names,
                i == 0 ? std::vector<std::string>{"q"} : std::vector<std::string>());
      op.zero_grad();
      oq.zero_grad();
      EXPECT_EQ(p.item<float>(), static_cast<float>(-i));
      EXPECT_EQ(q.item<float>(), static_cast<float>(1 - i));
      EXPECT_EQ(scaler.get_scale(), 2);
    }
  }
}

struct HostSgd : optim::Optimizer {
  explicit HostSgd(Tensor p_) : p(std::move(p_)) {}
  using Optimizer::step;
  void step() override {
    const NoGrad no_grad;
    p.sub_(p.grad());
  }
  std::vector<Tensor> parameters() const override { return {p}; }
  Tensor p;
};

TEST(GradScaler, UserOptimizerNeedsLeaveToSynchronise) {
  Tensor p = parameter({1});
  HostSgd opt(p);
  GradScaler scaler;
  scaler.scale(sum(p)).backward();
  expect_error([&] { scaler.step(opt); }, "has no step(const StepControl&)");
  GradScaler allowed({.allow_sync = true});
  p.zero_grad();
  allowed.scale(sum(p)).backward();
  allowed.step(opt);
  allowed.update();
  EXPECT_EQ(p.item<float>(), 0);
}

TEST(GradScaler, DisabledPassesThrough) {
  Tensor p = parameter({1});
  optim::Sgd opt({p}, {.lr = 1});
  GradScaler scaler({.enabled = false});
  iterate(scaler, opt, p, 1);
  EXPECT_EQ(p.item<float>(), 0);
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(Optimizer, Case56ClipNormIsFloat32) {
  Tensor p = from_vector<float>({0}, {1}, {.dtype = Dtype::f16}).set_requires_grad();
  p.set_grad(from_vector<float>({5000}, {1}, {.dtype = Dtype::f16}));
  EXPECT_NEAR(optim::clip_grad_norm({p}, 1e9f).item<float>(), 5000, 1);
}

TEST(Optimizer, Case61WeightDecayIsCoupledInAdamAndDecoupledInAdamW) {
  for (const Device d : test_devices()) {
    Tensor a = parameter({1}, d), w = parameter({1}, d);
    optim::Adam adam({a}, {.lr = 1e-3f, .weight_decay = 0.1f});
    optim::AdamW adamw({w}, {.lr = 1e-3f, .weight_decay = 0.1f});
    sum(a * 0.0 + w * 0.0).backward();
    adam.step();
    adamw.step();
    EXPECT_NEAR(a.item<float>(), 0.999f, 1e-6);
    EXPECT_NEAR(w.item<float>(), 0.9999f, 1e-6);
  }
}

TEST(Optimizer, Case63EachParameterCountsItsOwnSteps) {
  for (const Device d : test_devices()) {
    Tensor a = parameter({1}, d, "a"), b = parameter({1}, d, "b");
    optim::Adam opt({a, b}, {.lr = 0.1f});
    sum(a).backward();
    opt.step();
    opt.zero_grad();
    EXPECT_EQ(b.item<float>(), 1);
    sum(a + b).backward();
    opt.step();
    EXPECT_NEAR(b.item<float>(), 0.9, 1e-6);
  }
}

TEST(Optimizer, Case64StateDictIsBitExact) {
  Tensor p = parameter({1, -2, 0.5f}).detach().to(Dtype::f16).set_requires_grad();
  p.set_name("w");
  optim::AdamW opt({p}, {.lr = 0.01f});
  for (int i = 0; i < 3; ++i) {
    sum(p * p).backward();
    opt.step();
    opt.zero_grad();
  }
  Tensor q = p.detach().clone().set_requires_grad();
  q.set_name("w");
  optim::AdamW other({q}, {.lr = 0.5f});
  other.load_state_dict(opt.state_dict());
  const optim::State a = opt.state_dict(), b = other.state_dict();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    EXPECT_EQ(a[i].tensor.dtype(), Dtype::f32);
    EXPECT_EQ(b[i].tensor.dtype(), Dtype::f32);
    EXPECT_EQ(a[i].tensor.to_vector<float>(), b[i].tensor.to_vector<float>());
  }
  EXPECT_EQ(other.lr(), 0.01f);
}

TEST(Optimizer, Case65SmallUpdatesOfBfloat16Weights) {
  for (const Device d : test_devices()) {
    Tensor w = full({1}, 1.0, {.dtype = Dtype::bf16, .device = d}).set_requires_grad();
    optim::Sgd opt({w}, {.lr = 6e-4f});
    for (int i = 0; i < 100; ++i) {
      sum(w).backward();
      opt.step();
      opt.zero_grad();
    }
    EXPECT_EQ(w.item<float>(), 0.94140625f);
    EXPECT_NEAR(opt.state_dict()[0].tensor.to_vector<float>()[0], 0.94, 1e-5);
  }
}

TEST(Optimizer, ShadowWrittenByTheStepIsTheWeightsCast) {
  for (const Device d : test_devices()) {
    nn::Linear f(64, 32);
    f.to(d);
    optim::AdamW opt(f.parameters(), {.lr = 0.01f});
    const Tensor x = randn({8, 64}, {.device = d});
    for (int i = 0; i < 3; ++i) {
      const Autocast amp(Dtype::bf16);
      const Tensor y = f(x);
      EXPECT_EQ(y.detach().to_vector<float>(),
                linear(x.to(Dtype::bf16), f.weight.detach().to(Dtype::bf16),
                       f.bias.detach().to(Dtype::bf16))
                    .to_vector<float>());
      mean(y * y).backward();
      opt.step();
      opt.zero_grad();
    }
  }
}

}  // namespace
}  // namespace mixtape
