// The loader: order, randomness, exceptions, early ends and resuming. CASES 84, 100, 107, 111.
#include "io/data_loader.h"

#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>

#include "engine/autocast.h"
#include "engine/grad_mode.h"
#include "ops/ops.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::throws_error;

/// Sample i: x = {i, a random number}, y = i.
class Numbers : public Dataset {
 public:
  explicit Numbers(std::int64_t n) : n_(n) {}
  std::int64_t size() const override { return n_; }
  Example get(std::int64_t i, SampleRandom& random) const override {
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    if (i == fail_at) throw std::out_of_range("sample 7 is broken");
    ++made;
    return {tensor({static_cast<float>(i), random.uniform()}),
            scalar_tensor(i, {.dtype = Dtype::i64})};
  }
  std::chrono::microseconds delay{0};
  std::int64_t fail_at = -1;
  mutable std::atomic<std::int64_t> made{0};

 private:
  std::int64_t n_;
};

/// The labels of all batches of one pass, batch by batch.
std::vector<std::vector<std::int64_t>> pass(DataLoader& loader) {
  std::vector<std::vector<std::int64_t>> batches;
  for (auto& [x, y] : loader) {
    EXPECT_EQ(x.shape(), (Shape{y.size(0), 2}));
    batches.push_back(y.to_vector<std::int64_t>());
  }
  return batches;
}

std::vector<std::int64_t> flat(const std::vector<std::vector<std::int64_t>>& batches) {
  std::vector<std::int64_t> all;
  for (const auto& b : batches) all.insert(all.end(), b.begin(), b.end());
  return all;
}

using Labels = std::vector<std::vector<std::int64_t>>;

TEST(DataLoader, BatchesInOrder) {
  const Numbers data(7);
  DataLoader loader(data, {.batch_size = 3});
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(pass(loader), (Labels{{0, 1, 2}, {3, 4, 5}, {6}}));
  DataLoader whole(data, {.batch_size = 3, .drop_last = true});
  EXPECT_EQ(whole.size(), 2);
  EXPECT_EQ(pass(whole), (Labels{{0, 1, 2}, {3, 4, 5}}));
  DataLoader large(data, {.batch_size = 100});
  EXPECT_EQ(pass(large), (Labels{{0, 1, 2, 3, 4, 5, 6}}));
  const Numbers none(0);
  DataLoader empty(none, {.batch_size = 3});
  EXPECT_EQ(empty.size(), 0);
  EXPECT_EQ(pass(empty), Labels{});
}

TEST(DataLoader, ShuffleRepeatsBySeedAndEpoch) {
  const Numbers data(100);
  const DataLoaderOptions options{.batch_size = 8, .shuffle = true, .seed = 5};
  DataLoader a(data, options), b(data, options);
  const auto first = pass(a), second = pass(a);
  EXPECT_NE(first, second);  // epochs go on by themselves
  EXPECT_EQ(flat(first), shuffled_order(100, 5, 0));
  EXPECT_EQ(flat(second), shuffled_order(100, 5, 1));
  b.set_epoch(1);
  EXPECT_EQ(pass(b), second);
  b.set_epoch(0);
  EXPECT_EQ(pass(b), first);
  EXPECT_EQ(pass(b), second);
  DataLoader other(data, {.batch_size = 8, .shuffle = true, .seed = 6});
  EXPECT_NE(pass(other), first);
}

TEST(DataLoader, Case84ResultsDoNotDependOnTheWorkers) {
  Numbers data(50);
  std::vector<std::vector<float>> expected;
  for (const int workers : {0, 1, 2, 5})
    for (const int prefetch : {1, 3}) {
      data.delay = std::chrono::microseconds(workers > 1 ? 200 : 0);
      DataLoader loader(
          data, {.batch_size = 4, .shuffle = true, .workers = workers, .prefetch = prefetch});
      std::vector<std::vector<float>> got;
      std::set<float> random;
      for (int epoch = 0; epoch < 2; ++epoch)
        for (auto& [x, y] : loader) {
          got.push_back(x.to_vector<float>());
          for (std::size_t i = 1; i < got.back().size(); i += 2) random.insert(got.back()[i]);
        }
      EXPECT_EQ(random.size(), 100u);  // every sample and epoch draws another number
      if (expected.empty()) expected = got;
      EXPECT_EQ(got, expected) << workers << " workers";
    }
}

TEST(DataLoader, Case111ExceptionOfASampleReachesTheConsumer) {
  Numbers data(100);
  data.fail_at = 7;
  for (const int workers : {0, 1, 3}) {
    DataLoader loader(data, {.batch_size = 2, .workers = workers});
    for (int again = 0; again < 2; ++again) {
      int batches = 0;
      try {
        for ([[maybe_unused]] auto& batch : loader) ++batches;
        FAIL() << "expected an exception";
      } catch (const std::out_of_range& e) {
        EXPECT_STREQ(e.what(), "sample 7 is broken");
      }
      EXPECT_EQ(batches, 3);
      EXPECT_EQ(loader.state().position, 3);
    }
    data.fail_at = -1;
    EXPECT_EQ(pass(loader).size(), 50u);
    data.fail_at = 7;
  }
  data.fail_at = 0;
  DataLoader loader(data, {.batch_size = 2});
  EXPECT_THROW(loader.begin(), std::out_of_range);
}

TEST(DataLoader, Case111EndingEarlyIsPrompt) {
  Numbers data(1 << 14);  // 80 seconds a pass
  data.delay = std::chrono::milliseconds(5);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 12; ++i) {
    DataLoader loader(data, {.batch_size = 4, .shuffle = i % 2 == 0, .workers = 1 + i % 3});
    for ([[maybe_unused]] auto& batch : loader) break;                           // at batch 1
    if (i % 4 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(40));  // queue full
    if (i % 4 == 2)
      for ([[maybe_unused]] auto& batch : loader) break;
    if (i % 4 == 3) {
      DataLoader unused(data, {.batch_size = 4});
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(DataLoader, WorkersStayWithinThePrefetchDepth) {
  const Numbers data(1000);
  DataLoader loader(data, {.batch_size = 1, .workers = 2, .prefetch = 3});
  auto it = loader.begin();
  for (int k = 1; k < 20; ++k) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_LE(data.made, k + 2 * 3) << k;
    ++it;
  }
}

TEST(DataLoader, Case107ResumingRepeatsAndSkipsNothing) {
  const Numbers data(23);
  const DataLoaderOptions options{.batch_size = 4, .shuffle = true, .seed = 9, .workers = 2};
  std::vector<std::vector<float>> expected;
  std::vector<DataLoaderState> states;
  {
    DataLoader loader(data, options);
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (auto& [x, y] : loader) {
        EXPECT_EQ(loader.epoch(), epoch);
        expected.push_back(x.to_vector<float>());
        states.push_back(loader.state());
      }
    }
    EXPECT_EQ(loader.state(), states.back());
  }
  ASSERT_EQ(expected.size(), 18u);
  EXPECT_EQ(states[0].position, 1);
  EXPECT_EQ(states[5].epoch, 1);
  EXPECT_EQ(states[5].position, 0);
  for (std::size_t k = 0; k < states.size(); ++k) {
    DataLoader loader(data, options);
    loader.load_state(states[k]);
    EXPECT_EQ(loader.state(), states[k]);
    std::vector<std::vector<float>> got(expected.begin(),
                                        expected.begin() + static_cast<std::ptrdiff_t>(k) + 1);
    for (std::int64_t epoch = loader.epoch(); epoch < 3; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x, y] : loader) got.push_back(x.to_vector<float>());
    }
    EXPECT_EQ(got, expected) << "resumed after batch " << k;
  }
}

TEST(DataLoader, StateAfterABreakResumesThere) {
  const Numbers data(20);
  DataLoader a(data, {.batch_size = 4}), b(data, {.batch_size = 4});
  int n = 0;
  for ([[maybe_unused]] auto& batch : a)
    if (++n == 2) break;
  b.load_state(a.state());
  EXPECT_EQ(pass(b), (Labels{{8, 9, 10, 11}, {12, 13, 14, 15}, {16, 17, 18, 19}}));
  EXPECT_EQ(b.epoch(), 0);
  b.load_state(a.state());
  b.set_epoch(1);  // another epoch starts from its first batch
  EXPECT_EQ(pass(b).size(), 5u);
}

TEST(DataLoader, StateOfAnotherLoaderIsRefused) {
  const Numbers data(20), other(21);
  DataLoader loader(data, {.batch_size = 4, .seed = 1});
  const auto refused = [&](DataLoader&& from, std::string_view what) {
    return throws_error([&] { loader.load_state(from.state()); }, {"load_state", what});
  };
  EXPECT_TRUE(refused(DataLoader(data, {.batch_size = 5, .seed = 1}), "batch size: expected 4"));
  EXPECT_TRUE(refused(DataLoader(data, {.batch_size = 4, .seed = 2}), "seed: expected 1, got 2"));
  EXPECT_TRUE(refused(DataLoader(other, {.batch_size = 4, .seed = 1}), "data set: expected 20"));
  DataLoaderState bad = loader.state();
  bad.position = 6;
  EXPECT_TRUE(throws_error([&] { loader.load_state(bad); }, {"[0, 5]", "got 6"}));
}

TEST(DataLoader, BatchesBelongToTheConsumer) {
  const Numbers data(8);
  DataLoader loader(data, {.batch_size = 4});
  std::vector<Tensor> kept;
  for (auto& [x, y] : loader) {
    kept.push_back(y);
    x = Tensor();
  }
  EXPECT_EQ(kept[0].to_vector<std::int64_t>(), (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(kept[1].to_vector<std::int64_t>(), (std::vector<std::int64_t>{4, 5, 6, 7}));
  for (auto& batch : loader) EXPECT_TRUE(batch.more.empty());
}

TEST(DataLoader, AnotherPassInvalidatesTheIterator) {
  const Numbers data(8);
  DataLoader loader(data, {.batch_size = 2});
  auto old = loader.begin();
  auto fresh = loader.begin();
  EXPECT_TRUE(throws_error([&] { ++old; }, {"dropped when another began"}));
  EXPECT_TRUE(throws_error([&] { *old; }, {"dropped when another began"}));
  EXPECT_NO_THROW(++fresh);
  while (fresh != loader.end()) ++fresh;
  EXPECT_TRUE(throws_error([&] { *fresh; }, {"one that ended"}));
}

// Modes of the consumer's thread must not show in batches, whoever makes them.
TEST(DataLoader, ModesOfTheCallerDoNotReachBatches) {
  const Numbers data(4);
  for (const int workers : {0, 1}) {
    DataLoader loader(data, {.batch_size = 4, .workers = workers});
    Tensor kept;
    {
      const InferenceMode inference;
      const Autocast amp(Dtype::bf16);
      for (auto& [x, y] : loader) kept = x;
    }
    EXPECT_EQ(kept.dtype(), Dtype::f32);
    EXPECT_FALSE(kept.requires_grad());
    EXPECT_NO_THROW(kept.set_requires_grad());  // refused for tensors of inference mode
  }
  EXPECT_TRUE(grad_enabled());
}

TEST(DataLoader, ShardsShareOneOrder) {
  const Numbers data(10);
  for (const bool drop_last : {false, true}) {
    std::map<std::int64_t, int> seen;
    std::set<std::int64_t> sizes;
    for (int shard = 0; shard < 4; ++shard) {
      DataLoader loader(data, {.batch_size = 2,
                               .shuffle = true,
                               .drop_last = drop_last,
                               .shard = shard,
                               .shard_count = 4});
      const auto labels = flat(pass(loader));
      sizes.insert(static_cast<std::int64_t>(labels.size()));
      for (const std::int64_t label : labels) ++seen[label];
    }
    EXPECT_EQ(sizes, std::set<std::int64_t>{drop_last ? 2 : 3});
    EXPECT_EQ(seen.size(), drop_last ? 8u : 10u);
    const auto most = std::max_element(seen.begin(), seen.end(),
                                       [](auto& a, auto& b) { return a.second < b.second; });
    EXPECT_EQ(most->second, drop_last ? 1 : 2);
  }
  std::multiset<std::int64_t> uneven;
  for (int shard = 0; shard < 4; ++shard) {
    DataLoader loader(
        data,
        {.batch_size = 2, .shuffle = true, .shard = shard, .shard_count = 4, .even_shards = false});
    const auto labels = flat(pass(loader));
    EXPECT_EQ(labels.size(), shard < 2 ? 3u : 2u);
    uneven.insert(labels.begin(), labels.end());
  }
  EXPECT_EQ(uneven, (std::multiset<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  DataLoader nothing(data, {.shard = 24, .shard_count = 25, .even_shards = false});
  EXPECT_EQ(pass(nothing), Labels{});
  DataLoader more_shards_than_samples(data, {.shard = 24, .shard_count = 25});
  EXPECT_EQ(pass(more_shards_than_samples), Labels{{4}});
}

TEST(DataLoader, BadOptionsAreNamed) {
  const Numbers data(4);
  const auto refused = [&](DataLoaderOptions o, std::string_view got) {
    return throws_error([&] { DataLoader loader(data, o); }, {"DataLoader", got});
  };
  EXPECT_TRUE(refused({.batch_size = 0}, "batch size of at least 1, got 0"));
  EXPECT_TRUE(refused({.workers = -1}, "workers, got -1"));
  EXPECT_TRUE(refused({.prefetch = 0}, "prefetch of at least 1, got 0"));
  EXPECT_TRUE(refused({.shard = 2, .shard_count = 2}, "got 2 of 2"));
  EXPECT_TRUE(throws_error([] { DataLoader loader(std::shared_ptr<const Dataset>(), {}); },
                           {"null pointer"}));
  if (cuda_device_count() == 0) {
    EXPECT_TRUE(refused({.device = Device::cuda()}, "cannot use cuda:0"));
  }
}

TEST(DataLoader, SharedDataSetLivesAsLongAsTheLoader) {
  auto data = std::make_shared<Numbers>(4);
  const std::weak_ptr<Numbers> alive = data;
  {
    DataLoader loader(std::move(data), {.batch_size = 2});
    EXPECT_EQ(pass(loader).size(), 2u);
    EXPECT_FALSE(alive.expired());
  }
  EXPECT_TRUE(alive.expired());
}

TEST(DataLoader, PinnedBatches) {
  const Numbers data(4);
  DataLoader loader(data, {.batch_size = 2, .pin_memory = true});
  for (auto& [x, y] : loader) {
    EXPECT_TRUE(x.is_pinned());
    EXPECT_TRUE(y.is_pinned());
  }
  EXPECT_EQ(pass(loader), (Labels{{0, 1}, {2, 3}}));
}

// Workers are threads and do not exist in a forked child: an error, not a wait for ever.
TEST(DataLoader, Case100UseInAForkedChildIsAnError) {
  const Numbers data(100);
  DataLoader loader(data, {.batch_size = 2});
  auto it = loader.begin();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20);
    const bool named = static_cast<bool>(throws_error([&] { ++it; }, {"fork"})) &&
                       static_cast<bool>(throws_error([&] { loader.begin(); }, {"fork"}));
    ::_exit(named ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_NO_THROW(++it);
}

}  // namespace
}  // namespace mixtape::io
