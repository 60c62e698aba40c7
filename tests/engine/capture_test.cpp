// Captured steps: on the CPU the step itself at every call; on CUDA a graph whose replays do what
// the eager step does (CASES 97, 99).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/allocator.h"
#include "engine/determinism.h"
#include "mixtape.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

using ::testing::ElementsAreArray;
using testing::expect_error;
using testing::test_devices;

struct Net : nn::Module<Net> {
  nn::Linear in{16, 32}, out{32, 4};
  double p;
  explicit Net(double dropout_p = 0) : p(dropout_p) {
    add("in", in);
    add("out", out);
  }
  Tensor forward(const Tensor& x) { return out(dropout(relu(in(x)), p, training())); }
};

class Capture : public ::testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  bool replays() const { return device().is_cuda(); }
  Tensor inputs(int rows = 8) const { return randn({rows, 16}).to(device()); }
  Tensor labels(int rows = 8) const { return randint(0, 4, {rows}).to(device()); }
};

/// Losses of `steps` fp16 training steps with everything a step may have: dropout, scaler, clipping
/// and a learning rate that changes.
std::vector<float> train(Device device, bool captured, int steps) {
  set_deterministic(true);
  manual_seed(3);
  Net net(0.3);
  net.to(device);
  optim::AdamW opt(net.parameters(), {.lr = 1e-2f});
  GradScaler scaler({.init_scale = 1024, .growth_interval = 5});
  std::vector<float> losses;
  const StepFunction step = [&](Inputs in) -> std::vector<Tensor> {
    Tensor loss;
    {
      const Autocast amp(Dtype::f16);
      loss = cross_entropy(net(in[0]), in[1]);
    }
    scaler.scale(loss).backward();
    scaler.unscale(opt);
    optim::clip_grad_norm(net.parameters(), 0.5f);
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    return {loss};
  };
  CapturedStep replayed = capture(step, {.device = device, .warmup = 2});
  const Tensor data = randn({steps, 8, 16}).to(device),
               target = randint(0, 4, {steps, 8}).to(device);
  for (int i = 0; i < steps; ++i) {
    opt.set_lr(1e-2f / static_cast<float>(1 + i));
    const std::vector<Tensor> in = {data[i], target[i]};
    losses.push_back((captured ? replayed(in) : step(in))[0].item<float>());
  }
  EXPECT_EQ(scaler.get_scale(), 1024.0f * static_cast<float>(1 << (steps / 5)));
  set_deterministic(false);
  return losses;
}

TEST_P(Capture, TrainsAsTheEagerStepDoes) {
  EXPECT_THAT(train(device(), true, 12), ElementsAreArray(train(device(), false, 12)));
}

TEST_P(Capture, RecordsOneGraphForEachSetOfShapes) {
  CapturedStep step = capture([](Inputs in) -> std::vector<Tensor> { return {in[0] * 2.0f}; },
                              {.device = device(), .warmup = 1});
  for (int round = 0; round < 3; ++round) {
    for (const int rows : {2, 5}) {
      const Tensor x = full({rows, 3}, 1.0 + round, {.device = device()});
      EXPECT_THAT(step({x})[0].to_vector<float>(), ::testing::Each(2.0f + 2.0f * round));
    }
  }
  EXPECT_EQ(step.graphs(), replays() ? 2 : 0);
  EXPECT_EQ(step.nodes() > 0, replays());
  step.reset();
  EXPECT_EQ(step.graphs(), 0);
}

TEST_P(Capture, DrawsNewNumbersAtEachReplayAndFollowsTheSeed) {  // CASES 97
  const Tensor x = ones({64}, {.device = device()});
  CapturedStep step =
      capture([](Inputs in) -> std::vector<Tensor> { return {dropout(in[0], 0.5)}; },
              {.device = device(), .warmup = 1});
  const auto run = [&](bool eager) {
    manual_seed(11);
    std::vector<std::vector<float>> masks;
    for (int i = 0; i < 3; ++i)
      masks.push_back((eager ? dropout(x, 0.5) : step({x})[0]).to_vector<float>());
    return masks;
  };
  step({x});
  step({x});  // captured by now
  const auto replayed = run(false);
  EXPECT_NE(replayed[0], replayed[1]);
  EXPECT_NE(replayed[1], replayed[2]);
  EXPECT_EQ(replayed, run(true));
}

TEST_P(Capture, ReplaysMoveVersions) {
  Tensor total = zeros({4}, {.device = device()});
  CapturedStep step = capture(
      [&](Inputs in) -> std::vector<Tensor> {
        const NoGrad no_grad;
        total.add_(in[0]);
        return {total};
      },
      {.device = device(), .warmup = 1});
  const Tensor x = ones({4}, {.device = device()});
  for (int i = 0; i < 3; ++i) step({x});
  EXPECT_EQ(total.to_vector<float>()[0], 3.0f);
  Tensor w = ones({4}, {.device = device(), .requires_grad = true});
  const Tensor y = (w * total).sum();
  step({x});
  expect_error([&] { y.backward(); }, "modified in place");
}

TEST_P(Capture, AccumulatesAcrossReplays) {
  Net net;
  net.to(device());
  optim::Sgd opt(net.parameters(), {.lr = 0});
  CapturedStep step = capture(
      [&](Inputs in) -> std::vector<Tensor> {
        const Tensor loss = cross_entropy(net(in[0]), in[1]);
        loss.backward();
        return {loss};
      },
      {.device = device(), .warmup = 2});
  const Tensor x = inputs(), y = labels();
  step({x, y});
  const std::vector<float> once = net.out.bias.grad().to_vector<float>();
  for (int i = 1; i < 8; ++i) step({x, y});
  const std::vector<float> eight = net.out.bias.grad().to_vector<float>();
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(eight[i], 8 * once[i], 1e-5);
  if (!replays()) return;
  opt.zero_grad();
  expect_error([&] { step({x, y}); }, "expected the same at every call");
}

TEST_P(Capture, SeesWeightsThatTheHostChanged) {
  Net net;
  net.to(device());
  optim::Sgd opt(net.parameters(), {.lr = 0});
  CapturedStep step = capture(
      [&](Inputs in) -> std::vector<Tensor> {
        const Autocast amp(Dtype::bf16);
        const Tensor y = net(in[0]);
        cross_entropy(y, in[1]).backward();
        opt.zero_grad();
        return {y.to(Dtype::f32)};
      },
      {.device = device(), .warmup = 2});
  const Tensor x = inputs(), y = labels();
  for (int i = 0; i < 4; ++i) step({x, y});
  {
    const NoGrad no_grad;
    net.out.weight.fill_(0);
    net.out.bias.fill_(2);
  }
  EXPECT_THAT(step({x, y})[0].to_vector<float>(), ::testing::Each(2.0f));
}

TEST_P(Capture, NamesWhatBlocksCapture) {
  if (!replays()) GTEST_SKIP() << "needs CUDA";
  CapturedStep step = capture(
      [](Inputs in) -> std::vector<Tensor> {
        return {in[0] * static_cast<float>(in[0].sum().item<float>() > 0)};
      },
      {.device = device(), .warmup = 1});
  const Tensor x = ones({4}, {.device = device()});
  step({x});
  const std::size_t before = memory_stats(device()).allocated;
  expect_error([&] { step({x}); }, "item");
  EXPECT_EQ(memory_stats(device()).allocated, before);  // CASES 99: nothing leaks
  EXPECT_EQ(ones({4}, {.device = device()}).sum().item<float>(), 4.0f);
}

TEST_P(Capture, RefusesParametersThatMoved) {  // CASES 99
  if (!replays()) GTEST_SKIP() << "needs CUDA";
  Net net;
  net.to(device());
  CapturedStep step =
      capture([&](Inputs in) -> std::vector<Tensor> { return {net(in[0]).detach()}; },
              {.device = device(), .warmup = 1});
  const Tensor x = inputs();
  for (int i = 0; i < 2; ++i) step({x});
  net.to(Device::cpu());
  net.to(device());
  expect_error([&] { step({x}); }, "has moved since the step was captured");
}

TEST_P(Capture, MemoryReturnsWithTheGraph) {  // CASES 99
  if (!replays()) GTEST_SKIP() << "needs CUDA";
  const Tensor x = ones({1 << 20}, {.device = device()});
  empty_cache(device());
  const MemoryStats before = memory_stats(device());
  {
    CapturedStep step =
        capture([](Inputs in) -> std::vector<Tensor> { return {(in[0] * 2.0f + 1.0f).sum()}; },
                {.device = device(), .warmup = 1});
    for (int i = 0; i < 4; ++i) EXPECT_EQ(step({x})[0].item<float>(), 3.0f * (1 << 20));
  }
  empty_cache(device());
  EXPECT_EQ(memory_stats(device()).allocated, before.allocated);
  EXPECT_EQ(memory_stats(device()).reserved, before.reserved);
}

TEST_P(Capture, ChecksItsArguments) {
  const StepFunction nothing = [](Inputs) { return std::vector<Tensor>{}; };
  expect_error([&] { capture(nothing, {.device = device(), .warmup = 0}); },
               "warmup of at least 1");
  expect_error([&] { capture({}, {.device = device()}); }, "expected a function");
  CapturedStep step = capture(nothing, {.device = device()});
  expect_error([&] { step({Tensor()}); }, "input 0 is undefined");
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Capture);
INSTANTIATE_TEST_SUITE_P(Devices, Capture, ::testing::ValuesIn(test_devices()));

}  // namespace
}  // namespace mixtape
