// Gradients of the differentiable collectives against central differences: the loss is the sum over
// the ranks, and one element of one rank's input is moved at a time.
#include "distributed/collective_ops.h"

#include "engine/function.h"
#include "engine/grad_mode.h"
#include "ops/ops.h"
#include "tests/distributed/rank_values.h"
#include "tests/support/expect_error.h"

namespace mixtape::distributed {
namespace {

using testing::expect_close;
using testing::expect_error;
using testing::rank_values;
using testing::tensor_of;
using Forward = Function<Tensor(const Tensor&)>;

/// sum of w y^2, with weights that differ by rank and element: dy is no constant.
Tensor local_loss(const Tensor& y, int rank) {
  const Tensor w =
      tensor_of(rank_values(Dtype::f64, y.numel(), rank, 9), Dtype::f64, y.shape(), y.device());
  return (w * y * y).sum();
}

double total_loss(const Forward& f, const Tensor& x) {
  Communicator w = world();
  const NoGrad no_grad;
  const Tensor loss = local_loss(f(x), w.rank()).reshape({1}).clone();
  w.all_reduce(loss);
  return loss.to_vector<double>()[0];
}

void check_gradient(const Forward& f, const Shape& shape) {
  Communicator w = world();
  const std::vector<double> values = rank_values(Dtype::f64, shape.numel(), w.rank(), 4);
  Tensor x = tensor_of(values, Dtype::f64, shape, w.device());
  x.set_requires_grad();
  local_loss(f(x), w.rank()).backward();
  const std::vector<double> gradient = x.grad().to_vector<double>();

  constexpr double kStep =
      1e-4;  // the loss is quadratic: only rounding errs, by about 1e-16 / 1e-4
  std::vector<double> want(values.size());
  for (int r = 0; r < w.size(); ++r) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      double moved[2];
      for (const int side : {0, 1}) {
        std::vector<double> v = values;
        if (r == w.rank()) v[i] += side == 0 ? -kStep : kStep;
        moved[side] = total_loss(f, tensor_of(v, Dtype::f64, shape, w.device()));
      }
      if (r == w.rank()) want[i] = (moved[1] - moved[0]) / (2 * kStep);
    }
  }
  expect_close(gradient, want, 1e-8, 1e-8);
}

TEST(CollectiveOps, AllReduce) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
    check_gradient([op](const Tensor& x) { return all_reduce(x, world(), op); }, {2, 3});
}

TEST(CollectiveOps, AllGather) {
  check_gradient([](const Tensor& x) { return all_gather(x, world()); }, {2, 3});
  check_gradient([](const Tensor& x) { return all_gather(x.t(), world()); }, {3, 2});
}

TEST(CollectiveOps, ReduceScatter) {
  const std::int64_t rows = world().size();
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
    check_gradient([op](const Tensor& x) { return reduce_scatter(x, world(), op); }, {rows, 2});
}

TEST(CollectiveOps, AllToAll) {
  check_gradient([](const Tensor& x) { return all_to_all(x, world()); }, {world().size(), 3});
}

TEST(CollectiveOps, Broadcast) {
  for (const int root : {0, world().size() - 1})
    check_gradient([root](const Tensor& x) { return broadcast(x, world(), root); }, {2, 3});
}

TEST(CollectiveOps, CopyToRanksSumsGradients) {
  Communicator w = world();
  Tensor x = tensor_of({1, 2}, Dtype::f64, w.device());
  x.set_requires_grad();
  const Tensor factor = tensor_of({w.rank() + 1.0, 1}, Dtype::f64, w.device());
  (copy_to_ranks(x, w) * factor).sum().backward();
  const double n = w.size();
  EXPECT_EQ(x.grad().to_vector<double>(), (std::vector<double>{n * (n + 1) / 2, n}));
}

TEST(CollectiveOps, AllReduceOfTheSameLossHasIdentityGradient) {
  Communicator w = world();
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
    Tensor x = tensor_of({1.0 + w.rank()}, Dtype::f64, w.device());
    x.set_requires_grad();
    const Tensor y = all_reduce(x, w, op, AllReduceBackward::identity);
    (y * 3.0).sum().backward();
    EXPECT_DOUBLE_EQ(x.grad().to_vector<double>()[0], op == ReduceOp::avg ? 3.0 / w.size() : 3);
  }
}

TEST(CollectiveOps, RefusesWhatHasNoGradient) {
  const Tensor x = tensor_of({1, 2, 3}, Dtype::f64, world().device());
  expect_error([&] { all_reduce(x, world(), ReduceOp::max); }, "only sum and avg have a gradient");
  expect_error([&] { all_reduce(x.to(Dtype::i64), world()); }, "floating dtype");
  if (world().size() > 1)
    expect_error(
        [&] {
          reduce_scatter(tensor_of({1, 2, 3, 4, 5}, Dtype::f64, x.device()), world());
        },
        "equal parts");
}

}  // namespace
}  // namespace mixtape::distributed
