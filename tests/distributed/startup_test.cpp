// Which ranks may form a run (CASE 82), without any of them; seeds; a run of one rank.
#include "distributed/startup.h"

#include <gtest/gtest.h>

#include <set>

#include "engine/generator.h"
#include "ops/ops.h"
#include "tests/support/expect_error.h"

namespace mixtape::distributed {
namespace {

RankInfo gpu_rank(const char* host, int local_rank, const char* id, int gpus) {
  return {.host = host,
          .local_rank = local_rank,
          .device = "cuda:" + std::to_string(local_rank % gpus),
          .device_id = id,
          .gpus = gpus,
          .build = "Mixtape 1, 77",
          .mpi = "Open MPI v4",
          .nccl = "2.28.9"};
}

std::vector<RankInfo> two_hosts() {
  return {gpu_rank("a", 0, "GPU-1", 2), gpu_rank("a", 1, "GPU-2", 2), gpu_rank("b", 0, "GPU-3", 1)};
}

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << '"' << part << "\" in " << text;
}

TEST(Startup, AcceptsAGpuForEachRank) {
  EXPECT_EQ(refusal(two_hosts(), false), "");
  EXPECT_FALSE(shares_devices(two_hosts()));
}

TEST(Startup, AcceptsOneVisibleGpuForEachRank) {  // srun --gpus-per-task=1
  EXPECT_EQ(refusal({gpu_rank("a", 0, "GPU-1", 1), gpu_rank("a", 1, "GPU-2", 1)}, false), "");
}

TEST(Startup, RefusesMoreRanksThanGpus) {
  std::vector<RankInfo> ranks = two_hosts();
  ranks.push_back(gpu_rank("b", 1, "GPU-3", 1));
  const std::string why = refusal(ranks, false);
  expect_in(why, "init: expected at most one rank for each GPU, got 2 ranks on b with 1 GPU");
  expect_in(why, "\n  rank 0: a, local rank 0, cuda:0 (GPU-1)");
  expect_in(why, "\n  rank 3: b, local rank 1, cuda:0 (GPU-3)");
  EXPECT_EQ(refusal(ranks, true), "");
  EXPECT_TRUE(shares_devices(ranks));
}

TEST(Startup, RefusesOneGpuForTwoRanks) {
  std::vector<RankInfo> ranks = two_hosts();
  ranks[1].device_id = "GPU-1";
  ranks[1].device = "cuda:0";
  expect_in(refusal(ranks, false), "several ranks with GPU-1 on a; check LOCAL_RANK");
}

TEST(Startup, RefusesDifferentBuildsAndLibraries) {
  std::vector<RankInfo> ranks = two_hosts();
  ranks[2].build = "Mixtape 1, 78";
  expect_in(refusal(ranks, false),
            "expected the same build of Mixtape on all ranks, got \"Mixtape "
            "1, 77\" on rank 0 and \"Mixtape 1, 78\" on rank 2");
  ranks = two_hosts();
  ranks[1].nccl = "2.18.1";
  expect_in(refusal(ranks, true), "the same NCCL version on all ranks");
  ranks = two_hosts();
  ranks[1].mpi = "";
  expect_in(refusal(ranks, true), "and \"none\" on rank 1");
}

TEST(Startup, RefusesGpusBesideCpus) {
  std::vector<RankInfo> ranks = two_hosts();
  ranks[1].device = "cpu";
  ranks[1].device_id = ranks[1].nccl = "";
  expect_in(refusal(ranks, false),
            "expected all ranks on GPUs or all on CPUs, got cuda:0 on rank 0 "
            "and cpu on rank 1");
}

TEST(Startup, TellsOfItselfAsItIs) {
  const RankInfo info = two_hosts()[1];
  const RankInfo again = RankInfo::decode(info.encode());
  EXPECT_EQ(again.encode(), info.encode());
  EXPECT_EQ(device_map({again}), device_map({info}));
}

TEST(Startup, LongMapsAreCut) {
  expect_in(device_map(std::vector<RankInfo>(1000, two_hosts()[0])), "and 936 more");
}

TEST(Startup, RankSeedsDiffer) {
  std::set<std::uint64_t> seeds;
  for (int r = 0; r < 4096; ++r) seeds.insert(rank_seed(42, r));
  EXPECT_EQ(seeds.size(), 4096u);
  EXPECT_EQ(rank_seed(42, 0), 42u);
}

TEST(OneRank, NeedsNoLauncherAndNoLibrary) {
  testing::expect_error([] { world(); }, "call mixtape::distributed::init() first");
  init({.device = DeviceChoice::cpu});
  testing::expect_error([] { init(); }, "init: this process is in a run already");
  Communicator w = world();
  EXPECT_EQ(w.size(), 1);
  const Tensor x = full({4}, 3.0);
  w.all_reduce(x, ReduceOp::avg);
  w.broadcast(x);
  w.barrier();
  const Tensor y = zeros({4});
  Work work = w.all_gather_async(y, x);
  work.wait();
  EXPECT_TRUE(work.done());
  EXPECT_EQ(y.to_vector<float>(), x.to_vector<float>());
  w.reduce_scatter(y, x);
  w.all_to_all(y, x);
  EXPECT_EQ(w.split(3).size(), 1);
  EXPECT_FALSE(w.split(-1));
  check_same_on_all_ranks(w, "parameters", {});
  seed(5);
  const std::vector<float> seeded = rand({4}).to_vector<float>();
  manual_seed(5);
  EXPECT_EQ(rand({4}).to_vector<float>(), seeded);
  testing::expect_error([&] { w.send(x, 0); }, "send: expected another rank");
  finalize();
  EXPECT_FALSE(initialized());
}

}  // namespace
}  // namespace mixtape::distributed
