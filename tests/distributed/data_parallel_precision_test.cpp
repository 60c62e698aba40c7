// What numbers do on their way over the ranks: 16-bit parameters, compression, user hooks, inf and
// NaN, the loss scaler and clipping.
#include "distributed/data_parallel.h"
#include "distributed/global_mean.h"
#include "distributed/parameter_check.h"
#include "engine/node.h"
#include "tests/distributed/data_parallel_models.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using distributed::DataParallel;
using distributed::DataParallelOptions;
using distributed::Reduce;

/// One parameter; its gradient is what loss() is given.
struct Probe : nn::Module<Probe> {
  Tensor w;
  explicit Probe(std::int64_t n, Dtype dtype = Dtype::f32)
      : w(zeros({n}, {.dtype = dtype, .device = world().device()})) {
    add_parameter("w", w);
  }
  Tensor loss(const std::vector<float>& gradient) {
    const auto n = static_cast<std::int64_t>(gradient.size());
    return sum(w * from_vector(gradient, {n}).to(world().device(), w.dtype()));
  }
  Tensor forward(const Tensor& x) { return x; }
};

std::vector<double> averaged(const std::vector<float>& gradient, Reduce reduce,
                             Dtype dtype = Dtype::f32) {
  Probe model(static_cast<std::int64_t>(gradient.size()), dtype);
  DataParallel dp(model, world(), {.reduce = reduce});
  model.loss(gradient).backward();
  distributed::check_same_tensors(world(), "averages", {{"w", model.w.grad()}}, true);
  return model.w.grad().to_vector<double>();
}

/// CASES 78: the sum of 40000 and 40000 is inf in float16, their mean is not.
TEST(DataParallelPrecision, AveragesThatFitDoNotOverflow) {
  for (const Reduce reduce : {Reduce::full, Reduce::bf16, Reduce::fp16}) {
    const double error = reduce == Reduce::full ? 0 : 40000 * 0x1p-8;
    EXPECT_NEAR(averaged({40000, -40000}, reduce)[0], 40000, error);
    EXPECT_NEAR(averaged({40000, -40000}, reduce, Dtype::f16)[1], -40000, error);
  }
  for (const float large : {1e20f, 3e37f})
    EXPECT_NEAR(averaged({large}, Reduce::fp16)[0] / large, 1, 0x1p-10);
}

TEST(DataParallelPrecision, SmallGradientsDoNotBecomeZero) {
  for (const float small : {1e-7f, 1e-12f, 1e-30f}) {
    for (const Reduce reduce : {Reduce::bf16, Reduce::fp16})
      EXPECT_NEAR(averaged({small, -small / 2}, reduce)[1] / (-small / 2), 1, 0x1p-7);
  }
  EXPECT_NEAR(averaged({1.0f, 1e-9f}, Reduce::fp16)[1], 1e-9, 1e-10);  // beside a large one
  EXPECT_EQ(averaged({0, 0}, Reduce::fp16), (std::vector<double>{0, 0}));
}

TEST(DataParallelPrecision, InfAndNanOfOneRankReachAll) {
  const float inf = INFINITY;
  for (const Reduce reduce : {Reduce::full, Reduce::bf16, Reduce::fp16}) {
    for (const float bad : {inf, -inf, NAN}) {
      const double got = averaged({last_rank() ? bad : 1.0f, 2.0f}, reduce)[0];
      EXPECT_FALSE(std::isfinite(got)) << bad;
    }
  }
}

TEST(DataParallelPrecision, CompressedTrainingStaysCloseToFull) {
  for (const Reduce reduce : {Reduce::bf16, Reduce::fp16}) {
    const auto full = make<Mlp>(1), compressed = make<Mlp>(1);
    DataParallel dp_full(*full, world());
    DataParallel dp(*compressed, world(),
                    {.buckets = {.first = 500, .rest = 3000}, .reduce = reduce});
    const Batch b = my_part(batch(0, 16, 6));
    cross_entropy((*full)(b.x), b.y).backward();
    cross_entropy((*compressed)(b.x), b.y).backward();
    // What is sent and what comes back are rounded to 8 or 11 bits.
    expect_near(gradients_of(*compressed), gradients_of(*full),
                reduce == Reduce::bf16 ? 0x1p-7 : 0x1p-9);
  }
}

TEST(DataParallelPrecision, AUserHookSeesEveryBucketOnceAndInOrder) {
  const auto model = make<Mlp>(2), reference = make<Mlp>(2);
  std::vector<int> seen;
  int finished = 0;
  const auto hook = [&](distributed::GradientBucket& bucket, distributed::Communicator& group) {
    seen.push_back(bucket.index);
    // Max instead of a mean, and doubled afterwards.
    return distributed::Reduction{
        group.all_reduce_async(bucket.gradients, distributed::ReduceOp::max),
        [&finished, t = bucket.gradients]() mutable {
          ++finished;
          t.mul_(2.0);
        }};
  };
  DataParallel dp(*model, world(), {.buckets = {.first = 1, .rest = 1}, .comm_hook = hook});
  const Batch whole = batch(0, 16, 6), mine = my_part(whole);
  cross_entropy((*model)(mine.x), mine.y).backward();
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(finished, 6);
  std::vector<std::vector<double>> largest;
  for (int r = 0; r < world().size(); ++r) {
    const Batch p = part(whole, r, world().size());
    cross_entropy((*reference)(p.x), p.y).backward();
    const auto gradients = gradients_of(*reference);
    if (r == 0) largest = gradients;
    for (std::size_t t = 0; t < largest.size(); ++t) {
      for (std::size_t i = 0; i < largest[t].size(); ++i)
        largest[t][i] = std::max(largest[t][i], gradients[t][i]);
    }
    reference->zero_grad();
  }
  for (auto& tensor : largest)
    for (double& value : tensor) value *= 2;
  expect_near(gradients_of(*model), largest, 0);
}

// ---- the loss scaler (CASES 58) ----------------------------------------------------------------

struct Scaled {
  Probe model{4};
  DataParallel dp;
  optim::AdamW opt;
  GradScaler scaler{{.init_scale = 256}};
  explicit Scaled(const DataParallelOptions& options = {})
      : dp(model, world(), options), opt(model.parameters(), {.lr = 0.1f}) {}
  void backward(float gradient) { scaler.scale(model.loss({gradient, 1, 1, 1})).backward(); }
  void finish() {
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
  }
};

TEST(DataParallelScaler, OverflowOnOneRankIsSkippedByAllWithoutFurtherCommunication) {
  for (const Reduce reduce : {Reduce::full, Reduce::bf16, Reduce::fp16}) {
    Scaled s({.reduce = reduce});
    s.backward(last_rank() ? INFINITY : 1.0f);
    s.finish();
    EXPECT_TRUE(s.scaler.last_step().skipped);
    EXPECT_EQ(s.scaler.get_scale(), 128);
    EXPECT_EQ(s.model.w.to_vector<float>(), (std::vector<float>(4, 0)));
    s.backward(1);
    s.finish();
    EXPECT_FALSE(s.scaler.last_step().skipped);
    s.dp.check_parameters();
  }
}

TEST(DataParallelScaler, OverflowAfterTheReductionIsAgreedOnWhereAsked) {
  Scaled s;
  distributed::agree_on_overflow(s.scaler, world());
  s.backward(1);
  if (last_rank()) {  // outside of what was reduced
    const NoGrad no_grad;
    s.model.w.grad().slice(0, 0, 1).fill_(INFINITY);
  }
  s.finish();
  EXPECT_TRUE(s.scaler.last_step().skipped);
  EXPECT_EQ(s.scaler.get_scale(), 128);
  s.dp.check_parameters();
  s.backward(1);
  s.scaler.unscale(s.opt);
  optim::clip_grad_norm(s.model.parameters(), 0.5f);
  s.finish();
  EXPECT_FALSE(s.scaler.last_step().skipped);
  s.dp.check_parameters();
}

TEST(DataParallelScaler, TheGradientNormIsThatOfOneProcess) {
  const auto model = make<Mlp>(3, Dtype::f64), alone = make<Mlp>(3, Dtype::f64);
  DataParallel dp(*model, world());
  const Batch whole = batch(0, 16, 6, Dtype::f64), mine = my_part(whole);
  cross_entropy((*model)(mine.x), mine.y).backward();
  cross_entropy((*alone)(whole.x), whole.y).backward();
  const double norm = optim::clip_grad_norm(model->parameters(), 0.01f).item<double>();
  EXPECT_NEAR(norm, optim::clip_grad_norm(alone->parameters(), 0.01f).item<double>(),
              norm * rounding(64));
  expect_near(gradients_of(*model), gradients_of(*alone), rounding(64));
}

// ---- losses weighted by tokens (CASES 69)
// --------------------------------------------------------

TEST(GlobalMean, IsOverTheTokensOfAllRanks) {
  const int ranks = world().size();
  const bool first = world().rank() == 0;
  // Rank 0 has one token with loss 4, the others have three tokens with loss 2 each.
  Tensor w = full({1}, first ? 4.0 : 6.0, {.device = world().device(), .requires_grad = true});
  const Tensor mean = distributed::global_mean(sum(w), first ? 1.0 : 3.0, world());
  const double tokens = 1 + 3 * (ranks - 1);
  EXPECT_FLOAT_EQ(mean.item<float>(), static_cast<float>((4 + 6 * (ranks - 1)) / tokens));
  if (ranks == 2) {
    EXPECT_EQ(mean.item<float>(), 2.5f);  // the mean of the ranks' means is 3
  }
  mean.backward();  // to be averaged over the ranks
  EXPECT_FLOAT_EQ(w.grad().item<float>(), static_cast<float>(ranks / tokens));
}

TEST(GlobalMean, GivesTheGradientsOfTheWholeBatchForUnequalParts) {
  const auto model = make<Mlp>(4, Dtype::f64), alone = make<Mlp>(4, Dtype::f64);
  DataParallel dp(*model, world());
  const int size = world().size(), rank = world().rank();
  const Batch whole = batch(0, size * (size + 1) / 2, 6, Dtype::f64);
  const std::int64_t begin = rank * (rank + 1) / 2, end = begin + rank + 1;  // 1, 2, 3, ... rows
  const Tensor x = whole.x.slice(0, begin, end), y = whole.y.slice(0, begin, end).contiguous();
  const Tensor total = cross_entropy((*model)(x), y, {.reduction = Reduction::sum});
  const Tensor mean = distributed::global_mean(total, static_cast<double>(end - begin), world());
  mean.backward();
  const Tensor expected = cross_entropy((*alone)(whole.x), whole.y);
  expected.backward();
  EXPECT_NEAR(mean.item<double>(), expected.item<double>(), 1e-6);
  expect_near(gradients_of(*model), gradients_of(*alone), rounding(64));
}

TEST(GlobalMean, OfNoTokensIsZero) {
  Tensor w = zeros({1}, {.device = world().device(), .requires_grad = true});
  const Tensor mean = distributed::global_mean(sum(w.slice(0, 0, 0)), 0.0, world());
  mean.backward();
  EXPECT_EQ(mean.item<float>(), 0);
  EXPECT_EQ(w.grad().item<float>(), 0);
}

}  // namespace
}  // namespace mixtape::testing
