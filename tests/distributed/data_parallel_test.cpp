// Data-parallel training is training: ranks with parts of a batch arrive where one process with the
// whole batch does. Run under mpirun with 2 and 4 ranks, and alone.
#include "distributed/data_parallel.h"

#include "distributed/parameter_check.h"
#include "engine/determinism.h"
#include "examples/gpt2/gpt2.h"
#include "tests/distributed/data_parallel_models.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using distributed::DataParallel;
using distributed::DataParallelOptions;

/// Mean cross-entropy over the rows, so that the mean of the parts' gradients is the whole batch's.
template <class M>
Tensor loss_of(M& model, const Batch& b) {
  return loss(model(b.x), b);
}

/// In float64, where rounding hides nothing.
template <class M>
void expect_descent_equal(std::int64_t features, int steps, const DataParallelOptions& options) {
  const auto alone = make<M>(1, Dtype::f64);
  // Other weights on every rank but the first: CASES 83.
  const auto model = make<M>(1 + static_cast<std::uint64_t>(world().rank()), Dtype::f64);
  DataParallel dp(*model, world(), options);
  for (int step = 0; step < steps; ++step) {
    const Batch whole = batch(step, kRows, features, Dtype::f64);
    loss_of(*alone, whole).backward();
    loss_of(*model, my_part(whole)).backward();
    descend(*alone, 0.2);
    descend(*model, 0.2);
  }
  dp.check_parameters();
  const std::int64_t terms = kRows + 64;  // of a gradient and of the products before it
  expect_near(values_of(*model), values_of(*alone), rounding(terms * steps, Dtype::f64));
}

TEST(DataParallel, AnMlpTrainsAsOneProcessDoes) {
  expect_descent_equal<Mlp>(6, 40, {});
  expect_descent_equal<Mlp>(6, 40, {.buckets = kTiny});
}

TEST(DataParallel, AConvolutionalNetTrainsAsOneProcessDoes) {
  expect_descent_equal<Cnn>(36, 20, {.buckets = {.first = 512, .rest = 2048}});
}

/// GPT-2 with its head tied to the embedding: a parameter used twice.
TEST(DataParallel, ASmallGptHasTheGradientsOfOneProcess) {
  const gpt2::Config config{
      .layers = 2, .heads = 2, .channels = 32, .context = 16, .vocabulary = 64};
  const auto tokens = [&](int step) {
    manual_seed(50 + static_cast<std::uint64_t>(step));
    const Tensor t = randint(0, 64, {8, 17}).to(world().device());
    return Batch{t.slice(1, 0, 16).contiguous(), t.slice(1, 1, 17).contiguous()};
  };
  const auto alone = make<gpt2::Gpt2>(1, Dtype::f32, config);
  const auto model = make<gpt2::Gpt2>(2, Dtype::f32, config);
  {
    const NoGrad no_grad;
    alone->load_state_dict(make<gpt2::Gpt2>(2, Dtype::f32, config)->state_dict());
  }
  DataParallel dp(*model, world(), {.buckets = {.first = 1000, .rest = 20000}});
  EXPECT_GT(dp.buckets().size(), 3u);
  optim::Sgd opt(model->parameters(), {.lr = 0.1f}), alone_opt(alone->parameters(), {.lr = 0.1f});
  for (int step = 0; step < 4; ++step) {
    const Batch whole = tokens(step), mine = my_part(whole);
    alone->loss(whole.x, whole.y).backward();
    model->loss(mine.x, mine.y).backward();
    // Each gradient sums over 8 x 16 tokens, through products of up to 128 terms.
    expect_near(gradients_of(*model), gradients_of(*alone), rounding((8 * 16 + 128) * (step + 1)));
    for (optim::Optimizer* o :
         {static_cast<optim::Optimizer*>(&opt), static_cast<optim::Optimizer*>(&alone_opt)}) {
      o->step();
      o->zero_grad();
    }
  }
  dp.check_parameters();
}

TEST(DataParallel, BucketsDoNotChangeTheAverages) {
  std::vector<std::vector<std::vector<double>>> results;
  for (const distributed::BucketSizes& sizes :
       {distributed::BucketSizes{.first = 1 << 30, .rest = 1 << 30}, kTiny,
        distributed::BucketSizes{.first = 300, .rest = 5000}}) {
    const auto model = make<Mlp>(3);
    DataParallel dp(*model, world(), {.buckets = sizes});
    EXPECT_EQ(dp.buckets().size(), sizes == kTiny ? 6u : sizes.rest == 5000 ? 4u : 1u);
    const Batch b = my_part(batch(0, kRows, 6));
    loss_of(*model, b).backward();
    results.push_back(gradients_of(*model));
  }
  // Ranks' terms may be added in another order when the bucket has another size.
  const double order = world().size() <= 2 ? 0 : rounding(world().size());
  expect_near(results[1], results[0], order);
  expect_near(results[2], results[0], order);
}

/// CASES 77: what the caller reads on its own stream, right after backward, is the average.
TEST(DataParallel, GradientsReadOnASideStreamRightAfterBackwardAreAverages) {
  const Device device = world().device();
  const Stream side = device.is_cuda() ? Stream::create(device) : Stream();
  const StreamGuard on_side(side);
  manual_seed(4);
  nn::Linear model(6, 40);
  model.to(device);
  DataParallel dp(model, world(), {.buckets = kTiny});
  const double mean = (world().size() + 1) / 2.0;  // of the ranks' numbers 1, 2, ...
  for (int i = 0; i < 100; ++i) {
    const Tensor x = full({4, 6}, world().rank() + 1.0 + i, {.device = device});
    sum(model(x)).backward();  // d/dw is the sum of the rows
    EXPECT_EQ(model.weight.grad().to_vector<double>(), std::vector<double>(240, 4 * (mean + i)));
    model.zero_grad();
  }
}

TEST(DataParallel, TwoRunsAreBitIdenticalInDeterministicMode) {
  set_deterministic(true);
  std::vector<std::uint64_t> hashes[2];
  for (auto& run : hashes) {
    const auto model = make<Mlp>(5);
    DataParallel dp(*model, world(), {.buckets = {.first = 512, .rest = 4096}});
    optim::AdamW opt(model->parameters());
    for (int step = 0; step < 20; ++step) {
      loss_of(*model, my_part(batch(step, kRows, 6))).backward();
      opt.step();
      opt.zero_grad();
    }
    for (const Tensor& p : model->parameters()) run.push_back(distributed::hash_of(p));
  }
  set_deterministic(false);
  EXPECT_EQ(hashes[0], hashes[1]);
}

}  // namespace
}  // namespace mixtape::testing
