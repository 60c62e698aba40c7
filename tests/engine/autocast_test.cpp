// Autocast: policies, nesting, and the weight cache.
#include "engine/autocast.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/grad_mode.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "tests/support/devices.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

using testing::expect_error;
using testing::test_devices;

TEST(Autocast, NestsAndSwitchesOff) {
  const Tensor a = randn({3, 4}), b = randn({4, 5});
  EXPECT_EQ(matmul(a, b).dtype(), Dtype::f32);
  {
    const Autocast outer(Dtype::f16);
    EXPECT_EQ(matmul(a, b).dtype(), Dtype::f16);
    {
      const Autocast off(false);
      EXPECT_EQ(matmul(a, b).dtype(), Dtype::f32);
      const Autocast inner(Dtype::bf16);
      EXPECT_EQ(matmul(a, b).dtype(), Dtype::bf16);
    }
    EXPECT_EQ(matmul(a, b).dtype(), Dtype::f16);
  }
  EXPECT_EQ(matmul(a, b).dtype(), Dtype::f32);
  expect_error([] { Autocast bad(Dtype::f32); }, "expected float16 or bfloat16");
}

TEST(Autocast, Case51EvalPassDoesNotHideTheWeight) {
  for (const Device d : test_devices()) {
    nn::Linear f(4, 3);
    f.to(d);
    const Tensor x = randn({2, 4}, {.device = d});
    const Autocast amp(Dtype::bf16);
    {
      const NoGrad no_grad;
      f(x);
    }
    sum(f(x)).backward();
    EXPECT_TRUE(f.weight.grad().defined());
    EXPECT_TRUE(f.bias.grad().defined());
    EXPECT_EQ(f.weight.grad().dtype(), Dtype::f32);
  }
}

TEST(Autocast, CacheIsRightAfterInPlaceUpdates) {
  nn::Linear f(4, 3, {.bias = false});
  const Tensor x = ones({1, 4});
  const Autocast amp(Dtype::bf16);
  {
    const NoGrad no_grad;
    f.weight.fill_(1);
    EXPECT_EQ(f(x).to_vector<float>()[0], 4);
    f.weight.mul_(2.0);
    EXPECT_EQ(f(x).to_vector<float>()[0], 8);
    f.weight.select(0, 0).zero_();
    EXPECT_EQ(f(x).to_vector<float>()[0], 0);
  }
}

TEST(Autocast, ExplainListsCastsOfTheLastStep) {
  nn::Linear f(4, 3);
  const Tensor x = randn({2, 4});
  for (int step = 0; step < 2; ++step) {
    const Autocast amp(Dtype::f16);
    sum(f(x));
  }
  bool found = false;
  for (const amp::PolicyUse& use : amp::last_step()) {
    if (use.op != "linear") continue;
    found = true;
    EXPECT_EQ(use.cast, Cast::low);
    EXPECT_EQ(use.calls, 1u);
    EXPECT_EQ(use.casts, 3u);       // x, weight and bias
    EXPECT_EQ(use.cache_hits, 2u);  // the parameters' copies are kept
    EXPECT_EQ(use.cast_bytes, 16u);
  }
  EXPECT_TRUE(found);
  EXPECT_NE(amp::explain().find("linear"), std::string::npos);
  EXPECT_NE(amp::explain().find("full"), std::string::npos);
}

struct Recompute {  // runs a matmul again in backward
  Dtype* seen;
  static constexpr OpInfo info{.name = "recompute", .cast = Cast::low, .higher_order = true};
  Metas infer(Inputs in) const { return {{{in[0].size(0), in[1].size(1)}, in[0].dtype()}}; }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    out[0] = matmul(in[0], in[1]);
    saved.value(in[0]);
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    *seen = matmul(saved[0].to(Dtype::f32), saved[1].to(Dtype::f32)).dtype();
    if (dx[0]) dx[0].set(matmul(dy[0], saved[1].t()));
    if (dx[1]) dx[1].set(matmul(saved[0].t(), dy[0]));
  }
};

TEST(Autocast, Case53BackwardRunsUnderTheForwardsDtype) {
  Tensor a = randn({2, 3}).set_requires_grad(), b = randn({3, 4});
  Dtype seen = Dtype::f64;
  Tensor y;
  {
    const Autocast amp(Dtype::bf16);
    y = apply(Recompute{&seen}, {a, b});
  }
  y.backward(ones(y.shape(), {.dtype = y.dtype()}));
  EXPECT_EQ(seen, Dtype::bf16);
}

TEST(Autocast, Case55LossesStayInFloat32) {
  for (const Device d : test_devices()) {
    const Autocast amp(Dtype::f16);
    Tensor logits = zeros({4, 10}, {.dtype = Dtype::f16, .device = d}).set_requires_grad();
    const Tensor loss = cross_entropy(logits, zeros({4}, {.dtype = Dtype::i64, .device = d}));
    EXPECT_EQ(loss.dtype(), Dtype::f32);
    EXPECT_TRUE(std::isfinite((loss * 65536.0).item<float>()));
    EXPECT_EQ(mse_loss(logits, logits).dtype(), Dtype::f32);
  }
}

}  // namespace
}  // namespace mixtape
