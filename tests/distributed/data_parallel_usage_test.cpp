// What differs between ranks or passes: unused parameters, accumulation, uneven inputs, other
// buckets on the way, and ranks that began or went apart.
#include "distributed/data_parallel.h"
#include "distributed/parameter_check.h"
#include "engine/node.h"
#include "tests/distributed/data_parallel_models.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using distributed::DataParallel;
using distributed::Unused;

constexpr std::int64_t kRows = 16;
const distributed::BucketSizes kTiny{.first = 1, .rest = 1};

bool first_rank() { return world().rank() == 0; }
bool last_rank() { return world().rank() == world().size() - 1; }

Tensor loss(const Tensor& logits, const Batch& b) { return cross_entropy(logits, b.y); }

/// Adds its inputs up in a buffer, as running statistics do.
struct Counting : nn::Module<Counting> {
  nn::Linear out{6, 5};
  Tensor total = zeros({1});
  Counting() {
    add("out", out);
    add_buffer("total", total);
  }
  Tensor forward(const Tensor& x) {
    const NoGrad no_grad;
    total.add_(sum(x).reshape({1}));
    return {};
  }
  Tensor run(const Tensor& x) {
    (*this)(x);
    return out(x);
  }
};

// ---- unused parameters (CASES 72) --------------------------------------------------------------

TEST(DataParallelUnused, OnAllRanksIsAnErrorThatNamesThem) {
  const auto model = make<Branches>(1);
  DataParallel dp(*model, world(), {.buckets = kTiny});
  const Batch b = my_part(batch(0, kRows, 6));
  expect_error(
      [&] { loss((*model)(b.x, true, false), b).backward(); },
      detail::concat("b.weight (on ", world().size(), " of ", world().size(), " ranks), b.bias"));
  world().barrier();  // nobody hangs, and the ranks are in step
  model->zero_grad();
  loss((*model)(b.x, true, true), b).backward();
  dp.check_parameters();
}

TEST(DataParallelUnused, OnOneRankIsAnErrorOnAllInTheFirstPassAndThereLater) {
  const auto model = make<Branches>(1);
  DataParallel dp(*model, world());
  const Batch b = my_part(batch(0, kRows, 6));
  expect_error([&] { loss((*model)(b.x, true, !first_rank()), b).backward(); },
               detail::concat("b.weight (on 1 of ", world().size(), " ranks)"));
  model->zero_grad();
  loss((*model)(b.x, true, true), b).backward();
  model->zero_grad();
  const auto later = [&] { loss((*model)(b.x, true, !first_rank()), b).backward(); };
  if (first_rank())
    expect_error(later, "got no gradient for b.weight, b.bias on rank 0");
  else
    later();
  world().barrier();
}

TEST(DataParallelUnused, FoundOnesCountAsZeroWhereAnotherRankUsesThem) {
  const auto model = make<Branches>(2), alone = make<Branches>(2);
  DataParallel dp(*model, world(), {.buckets = kTiny, .unused = Unused::find});
  for (int step = 0; step < 3; ++step) {
    const Batch whole = batch(step, kRows, 6), mine = my_part(whole);
    // The last rank uses b too; in step 1 nobody does.
    const bool with_b = step != 1;
    loss((*model)(mine.x, true, with_b && last_rank()), mine).backward();
    for (int r = 0; r < world().size(); ++r) {
      const Batch p = part(whole, r, world().size());
      const bool uses_b = with_b && r == world().size() - 1;
      (loss((*alone)(p.x, true, uses_b), p) * (1.0 / world().size())).backward();
    }
    EXPECT_EQ(model->b.weight.grad().defined(), with_b);
    expect_near(gradients_of(*model), gradients_of(*alone), rounding(2 * kRows));
    model->zero_grad();
    alone->zero_grad();
  }
}

TEST(DataParallelUnused, FixedIsAgreedOnceAndHeldTo) {
  const auto model = make<Branches>(2);
  DataParallel dp(*model, world(), {.buckets = kTiny, .unused = Unused::fixed});
  const Batch b = my_part(batch(0, kRows, 6));
  std::vector<std::vector<double>> gradients;
  for (int step = 0; step < 3; ++step) {
    loss((*model)(b.x, true, last_rank()), b).backward();
    if (step == 0) gradients = gradients_of(*model);
    expect_near(gradients_of(*model), gradients, 0);
    EXPECT_TRUE(model->b.weight.grad().defined());
    model->zero_grad();
  }
  if (world().size() == 1) return;
  const auto other = [&] { loss((*model)(b.x, true, true), b).backward(); };
  if (last_rank())
    other();
  else
    expect_error(other, "got a gradient, but not in the first backward");
}

// ---- accumulation (CASES 73, 75) ---------------------------------------------------------------

TEST(DataParallelNoSync, AccumulatesLocallyAndAveragesOnce) {
  const auto model = make<Mlp>(3), alone = make<Mlp>(3);
  DataParallel dp(*model, world(), {.buckets = kTiny});
  for (int step = 0; step < 2; ++step) {
    for (int micro = 0; micro < 3; ++micro) {
      const Batch whole = batch(10 * step + micro, kRows, 6), mine = my_part(whole);
      loss((*alone)(whole.x), whole).backward();
      const auto local = dp.no_sync(micro < 2);
      loss((*model)(mine.x), mine).backward();
    }
    expect_near(gradients_of(*model), gradients_of(*alone), rounding(3 * kRows + 40));
    model->zero_grad();
    alone->zero_grad();
  }
}

TEST(DataParallelNoSync, ParametersOfEarlierPassesOnlyAreAveragedToo) {
  const auto model = make<Branches>(4), alone = make<Branches>(4);
  DataParallel dp(*model, world());
  const Batch whole = batch(0, kRows, 6), mine = my_part(whole);
  loss((*alone)(whole.x, true, false), whole).backward();
  loss((*alone)(whole.x, false, true), whole).backward();
  {
    const auto local = dp.no_sync();
    loss((*model)(mine.x, true, false), mine).backward();
  }
  loss((*model)(mine.x, false, true), mine).backward();
  expect_near(gradients_of(*model), gradients_of(*alone), rounding(2 * kRows));
}

TEST(DataParallelNoSync, OtherBucketsAfterAStepLoseNoMicroBatch) {
  const auto model = make<Mlp>(5), alone = make<Mlp>(5);
  DataParallel dp(*model, world());
  const auto both = [&](int index) {
    const Batch whole = batch(index, kRows, 6), mine = my_part(whole);
    loss((*alone)(whole.x), whole).backward();
    loss((*model)(mine.x), mine).backward();
  };
  both(0);  // step 1, and its gradients stay: no zero_grad in between
  std::vector<const void*> before, after;
  for (const Tensor& p : model->parameters()) before.push_back(p.grad().raw_data());
  {
    const auto local = dp.no_sync();
    both(1);
  }
  dp.set_bucket_sizes(kTiny);
  both(2);
  for (const Tensor& p : model->parameters()) after.push_back(p.grad().raw_data());
  EXPECT_EQ(before, after);
  expect_near(gradients_of(*model), gradients_of(*alone), rounding(3 * kRows + 40));
}

// ---- uneven inputs (CASES 70) ------------------------------------------------------------------

/// Rank r has 5 - r batches.
TEST(DataParallelJoin, AveragesAreOverTheRanksWithABatch) {
  const auto model = make<Mlp>(6, Dtype::f64), alone = make<Mlp>(6, Dtype::f64);
  DataParallel dp(*model, world());
  distributed::Join join(dp);
  int step = 0;
  for (const int mine = 5 - world().rank(); join.more(step < mine); ++step) {
    const Batch whole = batch(step, kRows, 6, Dtype::f64), b = my_part(whole);
    if (step < mine)
      loss((*model)(b.x), b).backward();
    else
      join.backward();
    const int active = std::min(world().size(), 5 - step);
    for (int r = 0; r < active; ++r) {
      const Batch p = part(whole, r, world().size());
      (loss((*alone)(p.x), p) * (1.0 / active)).backward();
    }
    descend(*model, 0.2);
    descend(*alone, 0.2);
  }
  EXPECT_EQ(step, 5);
  expect_near(values_of(*model), values_of(*alone), rounding(5 * 64, Dtype::f64));
}

TEST(DataParallelJoin, RanksWithoutBatchesKeepTheSameOptimizerState) {
  const auto model = make<Counting>(6);
  DataParallel dp(*model, world());
  optim::AdamW opt(model->parameters());
  {
    distributed::Join join(dp);
    int step = 0;
    // Rank 0 ends first: buffers are then those of a rank that goes on.
    for (const int mine = 1 + world().rank(); join.more(step < mine); ++step) {
      const Batch b = my_part(batch(step, kRows, 6));
      if (step < mine)
        loss(model->run(b.x), b).backward();
      else
        join.backward();
      opt.step();
      opt.zero_grad();
    }
  }
  dp.check_parameters();
  distributed::check_same_tensors(world(), "optimizer state", opt.state_dict(), true);
}

TEST(DataParallelJoin, BackwardIsForRanksWithoutABatch) {
  const auto model = make<Mlp>(6);
  DataParallel dp(*model, world());
  distributed::Join join(dp);
  EXPECT_TRUE(join.more(true));
  expect_error([&] { join.backward(); }, "told more() that they have no batch");
  EXPECT_FALSE(join.more(false));
}

// ---- equal starts, and ranks that go apart (CASES 83) -------------------------------------------

TEST(DataParallelStart, ParametersAndBuffersAreRankZerosAndStaySo) {
  const auto model = make<Counting>(static_cast<std::uint64_t>(world().rank()) + 1);
  model->total.fill_(world().rank() + 5.0);
  DataParallel dp(*model, world());
  const auto first = make<Counting>(1);
  EXPECT_EQ(model->out.weight.to_vector<float>(), first->out.weight.to_vector<float>());
  EXPECT_EQ(model->total.item<float>(), 5.0f);
  optim::Sgd opt(model->parameters(), {.lr = 0.1f, .momentum = 0.9f});
  double rank_zeros = 5;
  for (int step = 0; step < 100; ++step) {
    const Batch whole = batch(step, kRows, 6), b = my_part(whole);
    rank_zeros += sum(part(whole, 0, world().size()).x).item<double>();
    loss(model->run(b.x), b).backward();
    opt.step();
    opt.zero_grad();
    if (step == 0 || step == 99) dp.check_parameters();  // buffers too
  }
  EXPECT_NEAR(model->total.item<double>(), rank_zeros,
              100 * kRows * 6 * unit_roundoff(Dtype::f32) * 100);
}

TEST(DataParallelStart, DifferentModelsAreAnErrorOnEveryRank) {
  if (world().size() == 1) GTEST_SKIP() << "one rank differs from nobody";
  nn::Linear shape(6, first_rank() ? 5 : 4);
  expect_error([&] { DataParallel dp(shape, world()); }, "weight");
  nn::Linear half(6, 5);
  if (last_rank()) half.to(Dtype::bf16);
  expect_error([&] { DataParallel dp(half, world()); }, "weight");
  nn::Linear frozen(6, 5);
  if (last_rank()) frozen.weight.set_requires_grad(false);
  expect_error([&] { DataParallel dp(frozen, world()); }, "weight");
  nn::Linear count(6, 5, {.bias = first_rank()});
  expect_error([&] { DataParallel dp(count, world()); }, "DataParallel: parameters and buffers");
}

TEST(DataParallelStart, CheckSyncFindsTheParameterThatDrifted) {
  const auto model = make<Mlp>(7);
  DataParallel dp(*model, world(), {.check_sync_every = 2});
  const Batch b = my_part(batch(0, kRows, 6));
  const auto pass = [&] {
    loss((*model)(b.x), b).backward();
    model->zero_grad();
  };
  pass();
  pass();  // compared: equal
  if (last_rank() && world().size() > 1) {
    const NoGrad no_grad;
    model->mid.bias.slice(0, 3, 4).add_(1e-3);
  }
  pass();
  if (world().size() == 1) return pass();
  expect_error(pass, "mid.bias");
}

// ---- models of other kinds ---------------------------------------------------------------------

TEST(DataParallelModels, FrozenParametersTakeNoPart) {
  const auto model = make<Branches>(8), alone = make<Branches>(8);
  for (Branches* m : {model.get(), alone.get()}) {
    m->b.weight.set_requires_grad(false);
    m->b.bias.set_requires_grad(false);
  }
  DataParallel dp(*model, world());
  const Batch whole = batch(0, kRows, 6), mine = my_part(whole);
  loss((*model)(mine.x, true, true), mine).backward();
  loss((*alone)(whole.x, true, true), whole).backward();
  EXPECT_FALSE(model->b.weight.grad().defined());
  expect_near(gradients_of(*model), gradients_of(*alone), rounding(2 * kRows));
}

TEST(DataParallelModels, SeveralOptimizersAndGroupsShareTheBuckets) {
  const auto model = make<Mlp>(9), alone = make<Mlp>(9);
  struct Optimizers {
    optim::AdamW weights;
    optim::Sgd biases;
    explicit Optimizers(Mlp& m)
        // A large eps, or Adam would make much of the rounding of gradients near 0.
        : weights({m.out.weight, m.in.weight}, {.lr = 1e-2f, .eps = 1e-2f}),
          biases({m.in.bias, m.mid.bias, m.out.bias}, {.lr = 1e-1f}) {
      weights.add_group({m.mid.weight}, {.lr = 3e-3f, .eps = 1e-2f});
    }
  };
  Optimizers before(*model), reference(*alone);  // so gradients lie in three buffers
  DataParallel dp(*model, world(), {.buckets = {.first = 1000, .rest = 1000}});
  for (int step = 0; step < 6; ++step) {
    const Batch whole = batch(step, kRows, 6), mine = my_part(whole);
    loss((*model)(mine.x), mine).backward();
    loss((*alone)(whole.x), whole).backward();
    for (optim::Optimizer* o : std::initializer_list<optim::Optimizer*>{
             &before.weights, &before.biases, &reference.weights, &reference.biases}) {
      o->step();
      o->zero_grad();
    }
  }
  expect_near(values_of(*model), values_of(*alone), rounding((kRows + 64) * 6));
}

/// float32, bfloat16 and float64 parameters in one model.
struct MixedDtypes : nn::Module<MixedDtypes> {
  nn::Linear a{6, 8}, b{8, 8}, c{8, 5};
  MixedDtypes() {
    add("a", a);
    add("b", b);
    add("c", c);
    b.to(Dtype::bf16);
    c.to(Dtype::f64);
  }
  Tensor forward(const Tensor& x) { return c(b(a(x).to(Dtype::bf16)).to(Dtype::f64)); }
};

TEST(DataParallelModels, ParametersOfDifferentDtypes) {
  manual_seed(10);
  MixedDtypes model, alone;
  model.to(world().device());
  alone.to(world().device());
  alone.load_state_dict(model.state_dict());
  DataParallel dp(model, world(), {.buckets = kTiny});
  alone.load_state_dict(model.state_dict());
  const Batch whole = batch(0, kRows, 6), mine = my_part(whole);
  loss(model(mine.x), mine).backward();
  loss(alone(whole.x), whole).backward();
  EXPECT_EQ(model.b.weight.grad().dtype(), Dtype::f32);
  EXPECT_EQ(model.c.weight.grad().dtype(), Dtype::f64);
  expect_near(gradients_of(model), gradients_of(alone), rounding(16, Dtype::bf16));
}

TEST(DataParallelModels, AfterAFailedBackwardTheRankIsOutOfStepAndSaysSo) {
  const auto model = make<Mlp>(11);
  DataParallel dp(*model, world(), {.comm_hook = [](auto&, auto&) -> distributed::Reduction {
    MT_THROW("broken on purpose");
  }});
  const Batch b = my_part(batch(0, kRows, 6));
  const auto pass = [&] { loss((*model)(b.x), b).backward(); };
  expect_error(pass, "broken on purpose");
  model->zero_grad();
  expect_error(pass, "an earlier backward failed on this rank");
}

}  // namespace
}  // namespace mixtape::testing
