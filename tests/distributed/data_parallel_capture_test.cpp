// A captured step with its all-reduces. On the CPU capture runs the step itself; ranks that share a
// GPU go through MPI, which cannot be captured, and must be told so.
#include "distributed/data_parallel.h"
#include "engine/capture.h"
#include "tests/distributed/data_parallel_models.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using distributed::DataParallel;
using distributed::Unused;

/// A model, its optimizer and a captured step of two micro-batches, of which the second averages.
struct Captured {
  std::unique_ptr<Mlp> model = make<Mlp>(1);
  DataParallel dp;
  optim::Sgd opt{model->parameters(), {.lr = 0.1f, .momentum = 0.9f}};
  CapturedStep step;

  explicit Captured(Unused unused = Unused::error)
      : dp(*model, world(), {.buckets = {.first = 500, .rest = 5000}, .unused = unused}),
        step(capture([this](Inputs in) { return run(in); }, {.device = world().device()})) {}
  std::vector<Tensor> run(Inputs in) {
    {
      const auto local = dp.no_sync();
      loss((*model)(in[0]), {in[0], in[1]}).backward();
    }
    const Tensor second = loss((*model)(in[0] * 0.5), {in[0], in[1]});
    second.backward();
    opt.step();
    opt.zero_grad();
    return {second};
  }
};

bool captures() { return world().device().is_cuda(); }
/// Whether all-reduces go through MPI with staging.
bool shared_gpu() { return captures() && world().size() > cuda_device_count(); }

TEST(DataParallelCapture, ReplaysAreTheStepsOfOneProcess) {
  Captured captured;
  const auto alone = make<Mlp>(1);
  optim::Sgd opt(alone->parameters(), {.lr = 0.1f, .momentum = 0.9f});
  const auto step = [&](int i) {
    const Batch whole = batch(i, kRows, 6), mine = my_part(whole);
    loss((*alone)(whole.x), whole).backward();
    loss((*alone)(whole.x * 0.5), whole).backward();
    opt.step();
    opt.zero_grad();
    captured.step({mine.x, mine.y});
  };
  for (int i = 0; i < 3; ++i) step(i);  // eager
  if (shared_gpu()) return expect_error([&] { step(3); }, "cannot be captured");
  for (int i = 3; i < 10; ++i) step(i);
  EXPECT_EQ(captured.step.graphs(), captures() ? 1 : 0);
  expect_near(values_of(*captured.model), values_of(*alone), rounding(10 * 2 * (kRows + 64)));
  captured.dp.check_parameters();
}

TEST(DataParallelCapture, WhatTheHostWouldDecideCannotChangeAfterIt) {
  if (shared_gpu()) return;  // the test above
  // Where every call runs the step itself nothing is fixed.
  const auto expect_refused = [](const auto& f, const std::string& text) {
    if (captures())
      expect_error(f, text);
    else
      EXPECT_NO_THROW(f());
  };
  Captured captured;
  const Batch mine = my_part(batch(0, kRows, 6));
  const auto step = [&] { captured.step({mine.x, mine.y}); };
  for (int i = 0; i < 5; ++i) step();
  expect_refused([&] { captured.dp.set_bucket_sizes({}); }, "after a step was captured");
  {
    const auto local = captured.dp.no_sync();
    expect_refused(step, "cannot be replayed under no_sync()");
  }
  {
    const distributed::Join join(captured.dp);
    expect_refused(step, "cannot be replayed under Join");
  }
  step();
  Captured finds(Unused::find);
  const auto find_step = [&] { finds.step({mine.x, mine.y}); };
  for (int i = 0; i < 3; ++i) find_step();
  expect_refused(find_step, "use Unused::fixed in a step that is captured");
}

}  // namespace
}  // namespace mixtape::testing
