// What differs between ranks or passes: unused parameters, accumulation, uneven inputs, and other
// buckets on the way.
#include "distributed/data_parallel.h"

#include <set>

#include "distributed/parameter_check.h"
#include "engine/node.h"
#include "tests/distributed/data_parallel_models.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using distributed::DataParallel;
using distributed::Unused;

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

// ---- bucket sizes chosen by measuring
// ------------------------------------------------------------

TEST(DataParallelTuning, RanksTrySizesAndAgree) {
  struct Wide : nn::Module<Wide> {
    nn::Linear a{6, 400}, b{400, 700}, c{700, 600}, d{600, 5};
    Wide() {
      add("a", a);
      add("b", b);
      add("c", c);
      add("d", d);
    }
    Tensor forward(const Tensor& x) { return d(relu(c(relu(b(relu(a(x))))))); }
  };
  const auto model = make<Wide>(1), alone = make<Wide>(1);
  DataParallel dp(*model, world());
  std::set<std::size_t> tried;
  for (int pass = 0; pass < 20; ++pass) {  // 2.8 MiB: at most 2 MiB in a bucket, or all in two
    const Batch whole = batch(pass, kRows, 6), mine = my_part(whole);
    tried.insert(dp.buckets().size());
    loss((*model)(mine.x), mine).backward();
    if (pass % 7 == 0) {
      loss((*alone)(whole.x), whole).backward();
      expect_near(gradients_of(*model), gradients_of(*alone), rounding(kRows + 700));
    }
    model->zero_grad();
    alone->zero_grad();
  }
  std::vector<nn::NamedTensor> buckets;
  for (const auto& b : dp.buckets()) buckets.push_back({b.gradients.name(), b.gradients});
  distributed::check_same_tensors(world(), "buckets", buckets, false);
  const bool reported = dp.summary().find("(chosen)") != std::string::npos;
  EXPECT_EQ(reported, world().size() > 1);
  EXPECT_EQ(tried.size(), world().size() > 1 ? 2u : 1u);
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

}  // namespace
}  // namespace mixtape::testing
