// Which samples and random numbers a rank sees (CASES 84).
#include <set>

#include "distributed/data.h"
#include "engine/generator.h"
#include "io/data_loader.h"
#include "tests/distributed/data_parallel_models.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using distributed::for_rank;

/// Sample i: its number, and a random number of its own (an augmentation).
struct Numbers : io::Dataset {
  explicit Numbers(std::int64_t n) : n_(n) {}
  std::int64_t size() const override { return n_; }
  io::Example get(std::int64_t i, io::SampleRandom& random) const override {
    return {scalar_tensor(static_cast<double>(random.bits() >> 8), {.dtype = Dtype::f64}),
            scalar_tensor(i, {.dtype = Dtype::i64})};
  }
  std::int64_t n_;
};

/// Every rank's `mine` (of one size on all ranks), in rank order.
std::vector<double> gathered(const std::vector<double>& mine) {
  const auto n = static_cast<std::int64_t>(mine.size());
  const Device device = world().device();
  const Tensor all = empty({world().size(), n}, {.dtype = Dtype::f64, .device = device});
  world().all_gather(all, from_vector(mine, {n}).to(device));
  return all.to_vector<double>();
}

std::vector<double> numbers(const Tensor& t) { return t.to_vector<double>(); }

TEST(DistributedData, BatchesOfTheRanksAreTheBatchOfOneProcess) {
  const std::int64_t size = world().size();
  const Numbers data(13 * size);
  io::DataLoaderOptions options{.batch_size = 3 * size, .shuffle = true, .seed = 5};
  io::DataLoader alone(data, options);
  options.batch_size = 3;
  io::DataLoader loader(data, for_rank(options, world()));
  ASSERT_EQ(loader.size(), alone.size());
  std::vector<double> last_epoch;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<double> this_epoch;
    auto whole = alone.begin();
    for (auto& [x, y] : loader) {
      std::vector<double> labels = gathered(numbers(y)), expected = numbers(whole->y);
      std::vector<double> draws = gathered(numbers(x)), expected_draws = numbers(whole->x);
      this_epoch.insert(this_epoch.end(), expected.begin(), expected.end());
      for (auto* v : {&labels, &expected, &draws, &expected_draws}) std::sort(v->begin(), v->end());
      EXPECT_EQ(labels, expected);
      EXPECT_EQ(draws, expected_draws);
      ++whole;
    }
    EXPECT_NE(this_epoch, last_epoch);  // seed plus epoch
    last_epoch = this_epoch;
  }
}

TEST(DistributedData, WithoutPaddingTheUnionIsExact) {
  const std::int64_t n = 5 * world().size() + 1;
  const Numbers data(n);
  io::DataLoader loader(
      data, for_rank({.batch_size = 4, .shuffle = true, .even_shards = false}, world()));
  std::vector<double> seen(static_cast<std::size_t>(n), 0);
  for (auto& [x, y] : loader) {
    for (const double label : numbers(y)) seen[static_cast<std::size_t>(label)] += 1;
  }
  const Tensor total = from_vector(seen, {n}).to(world().device());
  world().all_reduce(total, distributed::ReduceOp::sum);
  EXPECT_EQ(total.to_vector<double>(), std::vector<double>(static_cast<std::size_t>(n), 1));
}

TEST(DistributedData, AugmentationDiffersBetweenRanksAndRepeatsForAnyNumberOfWorkers) {
  const Numbers data(8 * world().size());
  std::vector<std::vector<double>> runs;
  for (const int workers : {0, 1, 3}) {
    io::DataLoader loader(data,
                          for_rank({.batch_size = 8, .seed = 9, .workers = workers}, world()));
    const std::vector<double> draws = gathered(numbers(loader.begin()->x));
    EXPECT_EQ(std::set<double>(draws.begin(), draws.end()).size(), draws.size());
    runs.push_back(draws);
  }
  EXPECT_EQ(runs[0], runs[1]);
  EXPECT_EQ(runs[0], runs[2]);
}

TEST(DistributedData, DropoutDiffersBetweenRanksAndRepeats) {
  const auto draws = [] {
    distributed::seed(3);
    return gathered(numbers(rand({4}, {.device = world().device()})));
  };
  const std::vector<double> first = draws();
  EXPECT_EQ(std::set<double>(first.begin(), first.end()).size(), first.size());
  EXPECT_EQ(draws(), first);
}

TEST(DistributedData, RandomStreamsGoOnFromRankZerosCheckpoint) {
  const Device device = world().device();
  const auto draw = [&] { return gathered(numbers(rand({4}, {.device = device}))); };
  distributed::seed(3);
  draw();
  const std::uint64_t offset = random_state(device).offset;
  const std::vector<double> expected = draw();
  manual_seed(3);  // as loading rank 0's checkpoint leaves it
  set_random_state(device, {.seed = 3, .offset = offset});
  distributed::restore_random_streams(3, world());
  EXPECT_EQ(draw(), expected);
}

TEST(DistributedData, PartsOfPartsAreAnError) {
  expect_error([] { for_rank({.shard = 1, .shard_count = 2}, world()); },
               "expected options of a whole data set, got shard 1 of 2");
}

}  // namespace
}  // namespace mixtape::testing
