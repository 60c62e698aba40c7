// SyncBatchNorm against BatchNorm on the batch of all ranks, which every rank can make for itself:
// outputs, running statistics and gradients, where ranks hold different numbers of samples.
#include "distributed/sync_batch_norm.h"

#include <algorithm>
#include <cmath>

#include "distributed/data_parallel.h"
#include "engine/channels_last.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "nn/checkpoint.h"
#include "optim/optimizer.h"
#include "tests/distributed/rank_values.h"
#include "tests/support/expect_error.h"

namespace mixtape::distributed {
namespace {

using testing::expect_error;
using testing::rank_values;
using testing::rounded;
using testing::tensor_of;

struct Case {
  std::vector<std::int64_t> samples;  // of ranks 0, 1, ..; the list repeats
  std::int64_t channels = 3, side = 4;
  Dtype dtype = Dtype::f32;
  double offset = 0;  // of all values
  bool channels_last = false, relu = false, residual = false, affine = true, twice = false;
  std::optional<double> momentum = 0.1;
  std::int64_t of(int rank) const {
    return samples[static_cast<std::size_t>(rank) % samples.size()];
  }
};

/// Rank r's tensor number `what`, in float64 as the dtype of the case holds it.
Tensor values_of(const Case& c, int r, unsigned what, double offset = 0) {
  const Shape shape{c.of(r), c.channels, c.side, c.side};
  std::vector<double> values = rank_values(c.dtype, shape.numel(), r, what);
  for (double& v : values) v = rounded(c.dtype, v + offset);
  return tensor_of(values, Dtype::f64, shape, world().device());
}
/// All ranks' in rank order.
Tensor joined(const Case& c, unsigned what, double offset = 0) {
  std::vector<Tensor> parts;
  for (int r = 0; r < world().size(); ++r) parts.push_back(values_of(c, r, what, offset));
  return cat(parts, 0);
}

Tensor leaf(const Tensor& t, Dtype dtype, bool channels_last) {
  const NoGrad no_grad;
  Tensor x = t.to(dtype).clone();
  if (channels_last) x = to_channels_last(x);
  x.set_requires_grad();
  return x;
}

/// Everything that one side of the comparison gives.
struct Result {
  Tensor y, dx, dresidual, dweight, dbias;
};

Result run(nn::BatchNorm& layer, const Tensor& x, const Tensor& residual, const Tensor& dy) {
  const Tensor y = layer(x, residual);
  sum(y * dy.to(y.dtype())).backward();
  return {y.detach(), x.grad(), residual ? residual.grad() : Tensor(),
          layer.weight ? layer.weight.grad() : Tensor(), layer.bias ? layer.bias.grad() : Tensor()};
}

void set_affine(nn::BatchNorm& layer, std::int64_t channels) {
  if (!layer.weight) return;
  const NoGrad no_grad;
  layer.weight.copy_(
      tensor_of(rank_values(Dtype::f32, channels, 0, 77), Dtype::f64, world().device()));
  layer.bias.copy_(
      tensor_of(rank_values(Dtype::f32, channels, 0, 78), Dtype::f64, world().device()));
}

void expect_near(const char* what, const Tensor& got, const Tensor& want, double tolerance) {
  ASSERT_EQ(got.shape(), want.shape()) << what;
  if (got.numel() == 0) return;
  const double scale = std::max(1.0, abs(want).max().item<double>());
  const double error = abs(sub(got.to(Dtype::f64), want.to(Dtype::f64))).max().item<double>();
  EXPECT_LE(error, tolerance * scale) << what;  // NaN fails
}

void check(const Case& c) {
  Communicator w = world();
  const Device device = w.device();
  const nn::BatchNormConfig config{.momentum = c.momentum, .affine = c.affine, .relu = c.relu};
  SyncBatchNorm layer(c.channels, w, config);
  nn::BatchNorm reference(c.channels, config);
  layer.to(device, c.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32);
  reference.to(device, Dtype::f64);
  set_affine(layer, c.channels);
  set_affine(reference, c.channels);

  std::int64_t before = 0;
  for (int r = 0; r < w.rank(); ++r) before += c.of(r);
  const auto mine = [&](const Tensor& t) { return t.slice(0, before, before + c.of(w.rank())); };
  Result got, want;
  for (int step = 0; step < (c.twice ? 2 : 1); ++step) {
    const unsigned seed = static_cast<unsigned>(10 * step);
    layer.zero_grad();
    reference.zero_grad();
    const Tensor x = leaf(values_of(c, w.rank(), seed, c.offset), c.dtype, c.channels_last),
                 whole = leaf(joined(c, seed, c.offset), Dtype::f64, false);
    Tensor residual, whole_residual;
    if (c.residual) {
      residual = leaf(values_of(c, w.rank(), seed + 1), c.dtype, c.channels_last);
      whole_residual = leaf(joined(c, seed + 1), Dtype::f64, false);
    }
    got = run(layer, x, residual, values_of(c, w.rank(), seed + 2));
    want = run(reference, whole, whole_residual, joined(c, seed + 2));
  }
  // Storage rounds y once and dx twice; statistics and sums are in float or wider, whose few
  // roundings a value divided by the deviation (at least about 1) passes on.
  const double unit = unit_roundoff(c.dtype),
               sums = 64 * unit_roundoff(c.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32);
  expect_near("y", got.y, mine(want.y), 2 * unit + sums);
  expect_near("dx", got.dx, mine(want.dx), 4 * unit + sums);
  EXPECT_TRUE(!c.channels_last || got.y.numel() == 0 || is_channels_last(got.y));
  if (c.residual) expect_near("dresidual", got.dresidual, mine(want.dresidual), 2 * unit);
  if (c.affine) {
    const Tensor dweight = got.dweight.clone(), dbias = got.dbias.clone();
    w.all_reduce(dweight);
    w.all_reduce(dbias);
    expect_near("dweight", dweight, want.dweight, sums);
    expect_near("dbias", dbias, want.dbias, sums);
  }
  expect_near("running_mean", layer.running_mean, reference.running_mean, sums);
  expect_near("running_var", layer.running_var, reference.running_var, sums);
  EXPECT_EQ(layer.num_batches_tracked.item<std::int64_t>(),
            reference.num_batches_tracked.item<std::int64_t>());
}

TEST(SyncBatchNorm, IsBatchNormOnTheBatchOfAllRanks) {
  check({.samples = {2}});
  check({.samples = {1, 3}});
  check({.samples = {3, 1, 2, 5}});
  check({.samples = {2}, .dtype = Dtype::f64, .twice = true, .momentum = 0.3});
}

TEST(SyncBatchNorm, RanksWithoutSamples) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has all samples";
  check({.samples = {0, 2}});
  check({.samples = {2, 0}, .relu = true, .residual = true});
  check({.samples = {0, 2, 0, 1}, .channels_last = true, .twice = true});
}

TEST(SyncBatchNorm, RanksWithOneValuePerChannel) {
  if (world().size() == 1) GTEST_SKIP() << "one rank needs more than one value";
  check({.samples = {1}, .side = 1});
  check({.samples = {1, 3}, .side = 1, .dtype = Dtype::f64});
  check({.samples = {0, 2, 1, 0}, .side = 1});
}

TEST(SyncBatchNorm, ManyChannelsLast) {
  check({.samples = {1, 3}, .channels = 65, .side = 100, .channels_last = true});
  check({.samples = {3, 1},
         .channels = 65,
         .side = 25,
         .dtype = Dtype::bf16,
         .channels_last = true,
         .relu = true,
         .residual = true});
}

TEST(SyncBatchNorm, SixteenBits) {
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
    check({.samples = {1, 3}, .side = 8, .dtype = dtype, .twice = true});
    check({.samples = {2, 1}, .side = 8, .dtype = dtype, .relu = true, .residual = true});
  }
}

TEST(SyncBatchNorm, FusesAndConfigures) {
  check({.samples = {2, 1}, .relu = true});
  check({.samples = {2, 1}, .residual = true});
  check({.samples = {2, 1}, .affine = false});
  check({.samples = {2, 1}, .twice = true, .momentum = std::nullopt});
}

TEST(SyncBatchNorm, AMeanFarAboveTheDeviation) {
  // 4096 times the spread, which float's E[x^2] - E[x]^2 would lose whole.
  check({.samples = {1, 3}, .side = 8, .offset = 8192});
  check({.samples = {1, 3}, .side = 8, .offset = 8192, .channels_last = true});
}

TEST(SyncBatchNorm, TooFewValues) {
  Communicator w = world();
  if (w.size() == 1 || !w.device().is_cpu()) GTEST_SKIP() << "an error of several CPU ranks";
  SyncBatchNorm layer(3, w);
  const Tensor one = zeros({w.rank() == 1 ? 1 : 0, 3, 1, 1});
  expect_error([&] { layer(one, Tensor()); }, "more than one value per channel over all ranks");
  // Nobody has any: nothing moves.
  const NoGrad no_grad;
  layer.running_mean.fill_(5);
  const Tensor y = layer(zeros({0, 3, 2, 2}));
  EXPECT_EQ(y.numel(), 0);
  EXPECT_EQ(layer.running_mean.to_vector<float>(), (std::vector<float>{5, 5, 5}));
  EXPECT_EQ(layer.running_var.to_vector<float>(), (std::vector<float>{1, 1, 1}));
  EXPECT_EQ(layer.num_batches_tracked.item<std::int64_t>(), 0);
}

TEST(SyncBatchNorm, RecomputationMovesTheRunningStatisticsOnce) {
  Communicator w = world();
  SyncBatchNorm layer(3, w), again(3, w);
  for (SyncBatchNorm* l : {&layer, &again}) l->to(w.device());
  const Case c{.samples = {1, 3}};
  const Tensor x = leaf(values_of(c, w.rank(), 1), Dtype::f32, false),
               same = leaf(values_of(c, w.rank(), 1), Dtype::f32, false),
               dy = values_of(c, w.rank(), 2).to(Dtype::f32);
  sum(layer(x) * dy).backward();
  sum(nn::checkpoint(again, same) * dy).backward();
  EXPECT_EQ(again.running_mean.to_vector<float>(), layer.running_mean.to_vector<float>());
  EXPECT_EQ(again.num_batches_tracked.item<std::int64_t>(), 1);
  EXPECT_EQ(same.grad().to_vector<float>(), x.grad().to_vector<float>());
}

TEST(SyncBatchNorm, EvaluatesWithoutTheOthers) {
  Communicator w = world();
  for (const bool tracked : {true, false}) {
    SyncBatchNorm layer(3, w, {.track_running_stats = tracked});
    nn::BatchNorm plain(3, {.track_running_stats = tracked});
    layer.to(w.device());
    plain.to(w.device());
    layer.eval();
    plain.eval();
    if (w.rank() == 0) {  // a collective would not return
      const Tensor x = values_of({.samples = {2}}, 0, 5).to(Dtype::f32);
      expect_near("y", layer(x), plain(x).to(Dtype::f64), 0);
    }
  }
}

TEST(SyncBatchNorm, OverAPartOfTheRanks) {
  Communicator w = world();
  if (w.size() < 4) GTEST_SKIP() << "needs four ranks";
  const Communicator pair = w.split(w.rank() / 2);
  SyncBatchNorm layer(3, pair);
  layer.to(w.device());
  nn::BatchNorm reference(3);
  reference.to(w.device(), Dtype::f64);
  const Case c{.samples = {1, 2, 3, 4}};
  const int first = w.rank() / 2 * 2;
  const Tensor whole = cat({values_of(c, first, 3), values_of(c, first + 1, 3)}, 0);
  const Tensor y = layer(values_of(c, w.rank(), 3).to(Dtype::f32)), want = reference(whole);
  const std::int64_t begin = w.rank() == first ? 0 : c.of(first);
  expect_near("y", y, want.slice(0, begin, begin + c.of(w.rank())), 1e-5);
  expect_near("running_mean", layer.running_mean, reference.running_mean, 1e-6);
}

struct Net : nn::Module<Net> {
  nn::Conv2d conv1{3, 8, {.padding = {1, 1}}}, conv2{8, 4, {.padding = {1, 1}}};
  nn::BatchNorm2d norm1{8, {.relu = true}}, norm2{4};
  Net() {
    add("conv1", conv1);
    add("norm1", norm1);
    add("conv2", conv2);
    add("norm2", norm2);
  }
  Tensor forward(const Tensor& x) { return norm2(conv2(norm1(conv1(x)))); }
};

TEST(SyncBatchNorm, AConvertedModelTrainsAsOneProcessWithTheWholeBatch) {
  Communicator w = world();
  manual_seed(3);
  Net net;
  manual_seed(3);
  Net alone;
  net.to(w.device());
  alone.to(w.device());
  EXPECT_EQ(convert_sync_batch_norm(net, w), 2);
  EXPECT_NE(net.norm1.describe().find(detail::concat("over ", w.size(), " ranks")),
            std::string::npos)
      << net.norm1.describe();
  DataParallel dp(net, w);
  optim::Sgd opt(net.parameters(), {.lr = 0.1f}), opt_alone(alone.parameters(), {.lr = 0.1f});
  const Case c{.samples = {2}, .channels = 3};
  for (unsigned step = 0; step < 4; ++step) {
    // Gradients are averaged over ranks: a mean over each rank's equal share is the batch's mean.
    const Tensor x = values_of(c, w.rank(), step).to(Dtype::f32),
                 all = joined(c, step).to(Dtype::f32);
    mean(pow(sub(net(x), 0.5), 2.0)).backward();
    mean(pow(sub(alone(all), 0.5), 2.0)).backward();
    for (optim::Sgd* o : {&opt, &opt_alone}) {
      o->step();
      o->zero_grad();
    }
  }
  const auto got = net.state_dict(), want = alone.state_dict();
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    expect_near(got[i].name.c_str(), got[i].tensor, want[i].tensor.to(Dtype::f64), 1e-4);
}

}  // namespace
}  // namespace mixtape::distributed
