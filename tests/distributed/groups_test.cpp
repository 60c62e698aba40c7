// Parts of a group (CASE 90), comparisons between ranks (CASE 80) and random streams (CASE 84).
#include "engine/generator.h"
#include "ops/ops.h"
#include "tests/distributed/rank_values.h"
#include "tests/support/expect_error.h"

namespace mixtape::distributed {
namespace {

using testing::expect_error;
using testing::tensor_of;

double sum_of_ranks(Communicator& group, double mine) {
  const Tensor t = tensor_of({mine}, Dtype::f64, world().device());
  group.all_reduce(t);
  return t.to_vector<double>()[0];
}

TEST(Groups, SplitByColorAndKey) {
  Communicator w = world();
  Communicator half = w.split(w.rank() % 2, -w.rank());  // in reverse order
  ASSERT_TRUE(half);
  std::vector<int> want;
  for (int r = w.size() - 1; r >= 0; --r)
    if (r % 2 == w.rank() % 2) want.push_back(r);
  EXPECT_EQ(half.world_ranks(), want);
  EXPECT_EQ(half.world_ranks()[static_cast<std::size_t>(half.rank())], w.rank());
  double sum = 0;
  for (const int r : want) sum += r;
  EXPECT_EQ(sum_of_ranks(half, w.rank()), sum);
  half.barrier();
}

TEST(Groups, SplitWithoutAColorJoinsNone) {
  Communicator w = world();
  Communicator first = w.split(w.rank() == 0 ? 0 : -1);
  EXPECT_EQ(first.defined(), w.rank() == 0);
  if (first) {
    EXPECT_EQ(sum_of_ranks(first, 5), 5);
  }
}

TEST(Groups, SubgroupInTheGivenOrder) {
  Communicator w = world();
  const std::vector<int> ranks{w.size() - 1, 0};
  if (w.size() == 1) GTEST_SKIP() << "one rank";
  Communicator pair = w.subgroup(ranks);
  const bool member = w.rank() == 0 || w.rank() == w.size() - 1;
  ASSERT_EQ(pair.defined(), member);
  if (member) {
    EXPECT_EQ(pair.rank(), w.rank() == 0 ? 1 : 0);
    EXPECT_EQ(sum_of_ranks(pair, w.rank() + 1), w.size() + 1);
  }
  expect_error([&] { w.subgroup(std::vector<int>{0, 0}); }, "subgroup: expected each rank once");
  expect_error([&] { w.subgroup(std::vector<int>{w.size()}); }, "subgroup: expected ranks from 0");
}

TEST(Groups, PartsOfParts) {
  Communicator w = world();
  Communicator one = w.split(w.rank() / 2).split(w.rank() % 2);
  EXPECT_EQ(one.size(), 1);
  EXPECT_EQ(sum_of_ranks(one, w.rank()), w.rank());
}

TEST(Groups, UsedInDifferentOrders) {  // CASE 90
  Communicator w = world();
  Communicator a = w.split(0), b = w.split(0);
  for (int round = 0; round < 10; ++round) {
    const Tensor x = tensor_of({1.0 * w.rank()}, Dtype::f64, w.device());
    const Tensor y = tensor_of({10.0 * w.rank()}, Dtype::f64, w.device());
    std::vector<Work> works;
    if (w.rank() % 2 == 0) {
      works = {a.all_reduce_async(x), b.all_reduce_async(y)};
    } else {
      works = {b.all_reduce_async(y), a.all_reduce_async(x)};
    }
    for (Work& work : works) work.wait();
    const double sum = w.size() * (w.size() - 1) / 2;
    EXPECT_EQ(x.to_vector<double>()[0], sum);
    EXPECT_EQ(y.to_vector<double>()[0], 10 * sum);
  }
}

TEST(Groups, ASplitWaitsForWhatIsUnderWay) {
  Communicator w = world();
  const Tensor big = tensor_of(std::vector<double>(200'000, 1), Dtype::f16, w.device());
  Work work = w.all_reduce_async(big);
  Communicator part = w.split(0);
  work.wait();
  EXPECT_EQ(sum_of_ranks(part, 1), w.size());
  EXPECT_EQ(big.to_vector<double>()[199'999], w.size());
}

std::vector<TensorSummary> model() {
  return {{"fc.weight", {10, 784}, Dtype::f32, 1}, {"fc.bias", {10}, Dtype::f32, 2}};
}

TEST(SameOnAllRanks, AcceptsEqualLists) {
  check_same_on_all_ranks(world(), "parameters", model());
  check_same_on_all_ranks(world(), "parameters", {});
}

TEST(SameOnAllRanks, NamesTheFirstDifference) {  // CASE 80
  Communicator w = world();
  if (w.size() == 1) GTEST_SKIP() << "one rank";
  const bool other = w.rank() == 1;
  const auto check = [&](std::vector<TensorSummary> list, const std::string& text) {
    expect_error([&] { check_same_on_all_ranks(w, "parameters", list); }, text);
  };
  std::vector<TensorSummary> list = model();
  if (other) list[1].shape = {8};
  check(list, "parameters: expected the same on all ranks, got at number 1\n");
  check(list, "\n  rank 1: 'fc.bias' float32(8,)");
  list = model();
  if (other) list[0].dtype = Dtype::bf16;
  check(list, "'fc.weight' bfloat16");
  list = model();
  if (other) list.pop_back();
  check(list, "\n  rank 1: only 1 tensors");
  list = model();
  if (other) list[1].hash = 3;
  check(list, "'fc.bias' float32(10,) with other values (hash 3)");
}

TEST(Seeds, RanksDrawDifferentNumbersThatRepeat) {  // CASE 84
  Communicator w = world();
  const auto draws = [&] {
    const Tensor mine = rand({4}).to(w.device());
    const Tensor all = Tensor::empty({4 * w.size()}, Dtype::f32, w.device());
    w.all_gather(all, mine);
    return all.to_vector<double>();
  };
  seed(7);
  const std::vector<double> first = draws();
  for (int a = 0; a < w.size(); ++a)
    for (int b = 0; b < a; ++b)
      EXPECT_NE(first[static_cast<std::size_t>(4 * a)], first[static_cast<std::size_t>(4 * b)]);
  seed(7);
  EXPECT_EQ(draws(), first);
  manual_seed(7);  // for initialisation: the same on all ranks, and what rank 0 drew
  const std::vector<double> equal = draws();
  for (int r = 0; r < w.size(); ++r) EXPECT_EQ(equal[static_cast<std::size_t>(4 * r)], first[0]);
}

}  // namespace
}  // namespace mixtape::distributed
