// Models of all kinds at the wrap and after it: equal starts, buffers, ranks that go apart, frozen
// parameters, several optimizers, mixed dtypes.
#include "distributed/data_parallel.h"
#include "tests/distributed/data_parallel_models.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using distributed::DataParallel;

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
  const auto expect_difference = [](nn::ModuleBase& model, const std::string& text) {
    if (world().size() == 1)
      DataParallel dp(model, world());  // differs from nobody
    else
      expect_error([&] { DataParallel dp(model, world()); }, text);
  };
  nn::Linear shape(6, first_rank() ? 5 : 4), dtype(6, 5), frozen(6, 5),
      count(6, 5, {.bias = first_rank()});
  if (last_rank()) {
    dtype.to(Dtype::bf16);
    frozen.weight.set_requires_grad(false);
  }
  for (nn::ModuleBase* m : std::initializer_list<nn::ModuleBase*>{&shape, &dtype, &frozen, &count})
    m->to(world().device());
  expect_difference(shape, "'weight'");
  expect_difference(dtype, "'weight'");
  expect_difference(frozen, "'weight (frozen)'");
  expect_difference(count, "DataParallel: parameters and buffers");
}

TEST(DataParallelStart, AParameterBelongsToOneWrapAtATime) {
  const auto model = make<Branches>(1);
  {
    DataParallel whole(*model, world());
    expect_error([&] { DataParallel part(model->b, world()); },
                 "weight is a parameter of another DataParallel already");
  }
  DataParallel part(model->b, world());  // after the first one's end
  const Batch b = my_part(batch(0, kRows, 6));
  loss((*model)(b.x, true, true), b).backward();
  const Tensor mine = model->a.weight.grad().clone();  // local now
  const auto alone = make<Branches>(1);
  loss((*alone)(b.x, true, true), b).backward();
  EXPECT_EQ(mine.to_vector<float>(), alone->a.weight.grad().to_vector<float>());
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
