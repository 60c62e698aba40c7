// The CUDA caching allocator: sizes, stream order, events, limits, pools, capture, fork.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "engine/check.h"
#include "engine/memory_pool.h"
#include "engine/op_scope.h"
#include "tests/engine/cuda_test.h"

namespace mixtape {
namespace {

using testing::filled;
using testing::StreamBlock;

constexpr std::size_t kMiB = std::size_t{1} << 20;

class CudaAllocator : public testing::CudaTest {};

TEST_F(CudaAllocator, ReusesOnTheSameStreamOnly) {
  const Block a = memory().allocate(4096, s0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data) % 256, 0u);
  memory().release(a);
  const Block other = memory().allocate(4096, s1);
  EXPECT_NE(other.data, a.data) << "work on s0 may still use it";
  const std::uint64_t calls = stats().driver_allocations;
  const Block again = memory().allocate(4000, s0);
  EXPECT_EQ(again.data, a.data);
  EXPECT_EQ(stats().driver_allocations, calls);
  memory().release(other);
  memory().release(again);
}

TEST_F(CudaAllocator, NoBytesIsANullBlock) {
  const Block none = memory().allocate(0, s0);
  EXPECT_EQ(none.data, nullptr);
  memory().record_stream(none, s1);
  memory().release(none);
}

TEST_F(CudaAllocator, SmallBlocksShareASegmentAndMergeAgain) {
  const std::size_t reserved = stats().reserved;
  std::vector<Block> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(memory().allocate(100 * 1024, s0));
  EXPECT_EQ(stats().reserved - reserved, 2 * kMiB);
  std::mt19937 random(5);
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (const Block& block : blocks) memory().release(block);
  EXPECT_EQ(stats().largest_free_block, 2 * kMiB);
  const Block whole = memory().allocate(kMiB, s0), rest = memory().allocate(kMiB, s0);
  EXPECT_EQ(stats().reserved - reserved, 2 * kMiB);
  memory().release(whole);
  memory().release(rest);
}

TEST_F(CudaAllocator, SegmentsAreThoseOfPyTorch) {
  const struct {
    std::size_t bytes, segment;
  } cases[] = {{1, 2 * kMiB},          {kMiB, 2 * kMiB},
               {kMiB + 1, 20 * kMiB},  {10 * kMiB - 512, 20 * kMiB},
               {10 * kMiB, 10 * kMiB}, {10 * kMiB + 1, 12 * kMiB},
               {33 * kMiB, 34 * kMiB}};
  for (const auto& c : cases) {
    empty_cache(device);
    const std::size_t reserved = stats().reserved;
    const Block block = memory().allocate(c.bytes, s0);
    EXPECT_EQ(stats().reserved - reserved, c.segment) << c.bytes;
    memory().release(block);
  }
}

TEST_F(CudaAllocator, CountsLiveReservedAndPeaks) {
  const MemoryStats before = stats();
  reset_peak_memory_stats(device);
  const Block a = memory().allocate(1000, s0), b = memory().allocate(30 * kMiB, s0);
  memory().release(b);
  const MemoryStats now = stats();
  EXPECT_EQ(now.allocated - before.allocated, 1000u);
  EXPECT_EQ(now.allocated_peak - before.allocated, 1000 + 30 * kMiB);
  EXPECT_EQ(now.reserved - before.reserved, 32 * kMiB);
  EXPECT_EQ(now.allocations - before.allocations, 2u);
  EXPECT_EQ(now.frees - before.frees, 1u);
  memory().release(a);
  empty_cache(device);
  EXPECT_EQ(stats().reserved, before.reserved);
  EXPECT_EQ(stats().reserved_peak - before.reserved, 32 * kMiB);
}

// CASES 92: a block that a side stream still writes to must not come back from the cache.
TEST_F(CudaAllocator, RecordedStreamsDelayReuse) {
  constexpr std::size_t kBytes = 64 * 1024;
  {  // a segment of s0 with room for both, so that nothing below waits in the driver
    const Block warm = memory().allocate(kMiB, s0);
    memory().release(warm);
  }
  const Block a = memory().allocate(kBytes, s0);
  set_bytes(a.data, 1, kBytes, s0);
  s1.wait(Event(s0));
  StreamBlock hold(s1);
  set_bytes(a.data, 2, kBytes, s1);
  memory().record_stream(a, s1);
  memory().release(a);
  const Block b = memory().allocate(kBytes, s0);
  EXPECT_NE(b.data, a.data);
  set_bytes(b.data, 1, kBytes, s0);
  hold.open();
  EXPECT_EQ(read(b.data, kBytes), filled(kBytes, 1));
  // With the side stream done, the first block is free again.
  const Block c = memory().allocate(kBytes, s0);
  EXPECT_EQ(c.data, a.data);
  memory().release(b);
  memory().release(c);
}

TEST_F(CudaAllocator, RecordingTheOwnStreamDelaysNothing) {
  const Block a = memory().allocate(4096, s0);
  memory().record_stream(a, s0);
  StreamBlock hold(s0);
  memory().release(a);
  const Block b = memory().allocate(4096, s0);
  EXPECT_EQ(b.data, a.data);
  memory().release(b);
}

// CASES 93: threads on the default stream share its blocks, each block with one owner.
TEST_F(CudaAllocator, ThreadsNeverShareABlock) {
  constexpr int kThreads = 4;
  constexpr std::size_t kBytes = 3000;
  const Stream stream = Stream::default_stream(device);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<unsigned char> host(kBytes);
      for (int i = 0; i < 200; ++i) {
        const auto value = static_cast<unsigned char>(t * 50 + i % 50);
        const Block block = memory().allocate(kBytes, stream);
        set_bytes(block.data, value, kBytes, stream);
        copy_bytes(host.data(), Device::cpu(), block.data, device, kBytes, stream);
        if (host != filled(kBytes, value)) ++wrong;
        memory().release(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// CASES 95: no room, but a block that only waits for another stream: it must be found after the
// wait, without emptying the cache.
TEST_F(CudaAllocator, WaitsForPendingBlocksBeforeGivingUp) {
  constexpr std::size_t kBytes = 64 * kMiB;
  const Block a = memory().allocate(kBytes, s0);
  set_memory_limit(device, stats().reserved + kBytes / 2);
  StreamBlock hold(s1);
  memory().record_stream(a, s1);
  memory().release(a);
  std::jthread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    hold.open();
  });
  const std::uint64_t retries = stats().retries;
  const Block b = memory().allocate(kBytes, s0);
  opener.join();
  EXPECT_EQ(b.data, a.data);
  EXPECT_EQ(stats().retries, retries);
  memory().release(b);
}

TEST_F(CudaAllocator, EmptiesTheCacheWhenThereIsNoRoom) {
  const std::size_t reserved = stats().reserved;
  memory().release(memory().allocate(64 * kMiB, s0));
  set_memory_limit(device, reserved + 100 * kMiB);
  const std::uint64_t retries = stats().retries;
  const Block b = memory().allocate(80 * kMiB, s1);  // the cached block is s0's
  EXPECT_EQ(stats().retries, retries + 1);
  EXPECT_EQ(stats().reserved, reserved + 80 * kMiB);
  memory().release(b);
}

// A request under 10 MiB usually reserves 20; where only less is left, its own size must do.
TEST_F(CudaAllocator, TakesASmallerSegmentRatherThanFail) {
  set_memory_limit(device, stats().reserved + 8 * kMiB);
  const Block a = memory().allocate(5 * kMiB, s0);
  EXPECT_NE(a.data, nullptr);
  memory().release(a);
}

TEST_F(CudaAllocator, OutOfMemoryReportsTheOpAndTheFigures) {
  const Block live = memory().allocate(10 * kMiB, s0);
  set_memory_limit(device, stats().reserved + 16 * kMiB);
  {
    const OpScope op("matmul");
    try {
      memory().release(memory().allocate(100 * kMiB, s0));
      FAIL() << "the limit was passed";
    } catch (const OutOfMemory& error) {
      const std::string what = error.what();
      EXPECT_TRUE(
          what.starts_with("matmul: out of memory on cuda:0: requested 100.00 MiB, "
                           "allocated 10.00 MiB, reserved 10.00 MiB"))
          << what;
      for (const char* part : {"largest free block", "the device has", "the limit is"})
        EXPECT_NE(what.find(part), std::string::npos) << what;
    }
  }
  const Block next = memory().allocate(12 * kMiB, s0);
  EXPECT_NE(next.data, nullptr);
  memory().release(next);
  memory().release(live);
  EXPECT_THROW(memory().allocate(~std::size_t{0}, s0), OutOfMemory);
}

TEST_F(CudaAllocator, TheDevicesOwnLimitIsOutOfMemoryToo) {
  std::size_t free = 0, total = 0;
  MT_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  EXPECT_THROW(memory().allocate(total + 64 * kMiB, s0), OutOfMemory);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the failure must not surface at the next launch";
  const Block next = memory().allocate(kMiB, s0);
  EXPECT_NE(next.data, nullptr);
  memory().release(next);
}

TEST_F(CudaAllocator, RefusesAStreamOfAnotherDevice) {
  EXPECT_THROW(memory().allocate(100, Stream()), Error);
}

// Random requests on two streams with random cross-stream uses: live blocks never overlap, and in
// the end everything merges into whole segments that go back to the driver.
TEST_F(CudaAllocator, LiveBlocksNeverOverlap) {
  const MemoryStats before = stats();
  std::mt19937 random(11);
  std::map<const char*, Block> live;
  const auto release_one = [&] {
    auto it = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
    memory().release(it->second);
    live.erase(it);
  };
  for (int i = 0; i < 20000; ++i) {
    const std::size_t bytes = random() % 8 == 0 ? 1 + random() % (6 * kMiB) : 1 + random() % 70000;
    const Block block = memory().allocate(bytes, random() % 2 ? s0 : s1);
    const char* begin = static_cast<const char*>(block.data);
    auto after = live.lower_bound(begin);
    if (after != live.end()) {
      ASSERT_LE(begin + bytes, after->first);
    }
    if (after != live.begin()) {
      const Block& previous = std::prev(after)->second;
      ASSERT_LE(static_cast<const char*>(previous.data) + previous.bytes, begin);
    }
    if (random() % 4 == 0) memory().record_stream(block, random() % 2 ? s0 : s1);
    live.emplace(begin, block);
    while (live.size() > 60) release_one();
  }
  while (!live.empty()) release_one();
  empty_cache(device);
  EXPECT_EQ(stats().allocated, before.allocated);
  EXPECT_EQ(stats().reserved, before.reserved);
}

TEST_F(CudaAllocator, PrivatePoolsKeepTheirMemory) {
  const std::size_t reserved = stats().reserved;
  std::set<void*> inside;
  {
    MemoryPool pool(device);
    {
      const MemoryPoolScope scope(pool);
      const Block a = memory().allocate(4096, s0), b = memory().allocate(4096, s0);
      inside = {a.data, b.data};
      memory().release(a);
      memory().release(b);
      const Block c = memory().allocate(4096, s0);
      EXPECT_TRUE(inside.contains(c.data)) << "the pool reuses its own blocks";
      memory().release(c);
    }
    std::vector<Block> outside;
    for (int i = 0; i < 600; ++i) outside.push_back(memory().allocate(4096, s0));
    for (const Block& block : outside) {
      EXPECT_FALSE(inside.contains(block.data)) << "a block of the pool left it";
      memory().release(block);
    }
    empty_cache(device);
    EXPECT_EQ(stats().reserved, reserved + 2 * kMiB) << "emptying the cache must spare the pool";
  }
  EXPECT_EQ(stats().reserved, reserved) << "the pool's end gives its memory back";
}

TEST_F(CudaAllocator, BlocksMayOutliveTheirPool) {
  const std::size_t reserved = stats().reserved;
  Block survivor;
  {
    MemoryPool pool(device);
    const MemoryPoolScope scope(pool);
    survivor = memory().allocate(4096, s0);
  }
  EXPECT_EQ(stats().reserved, reserved + 2 * kMiB);
  memory().release(survivor);
  empty_cache(device);
  EXPECT_EQ(stats().reserved, reserved);
}

// CASES 100.
TEST_F(CudaAllocator, AForkedChildGetsAClearError) {
  const Block live = memory().allocate(4096, s0);
  const pid_t child = fork();
  if (child == 0) {
    memory().release(live);  // what the parent's objects do when the child ends
    int failures = 0;
    const auto refused = [&](auto&& f) {
      try {
        f();
        ++failures;
      } catch (const Error& error) {
        if (std::strstr(error.what(), "forked after CUDA was initialised") == nullptr) ++failures;
      }
    };
    refused([&] { memory().allocate(4096, s0); });
    refused([&] { Stream::current(device); });
    refused([&] { synchronize(device); });
    refused([&] { pinned_allocator().allocate(4096, {}); });
    _exit(failures);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "uses of CUDA in the child that were not refused";
  memory().release(live);
}

#if !defined(MIXTAPE_SIMULATED_CUDA)

// Allocation, cross-stream frees and new segments inside a capture neither break it nor hand a
// block out twice; a replay writes what was captured.
TEST_F(CudaAllocator, AllocatesDuringACapture) {
  const std::size_t reserved = stats().reserved;
  {
    MemoryPool pool(device);
    cudaGraph_t graph = nullptr;
    Block kept;
    {
      const MemoryPoolScope scope(pool);
      const StreamGuard guard(s0);
      MT_CUDA_CHECK(cudaStreamBeginCapture(native_stream(s0), cudaStreamCaptureModeGlobal));
      kept = memory().allocate(3 * kMiB, s0);
      set_bytes(kept.data, 7, kept.bytes, s0);
      const Block side = memory().allocate(4096, s0);
      s1.wait(Event(s0));
      set_bytes(side.data, 1, side.bytes, s1);
      memory().record_stream(side, s1);
      s0.wait(Event(s1));
      memory().release(side);
      const Block next = memory().allocate(4096, s0);
      EXPECT_NE(next.data, side.data);
      set_bytes(next.data, 2, next.bytes, s0);
      memory().release(next);
      MT_CUDA_CHECK(cudaStreamEndCapture(native_stream(s0), &graph));
    }
    cudaGraphExec_t executable = nullptr;
    MT_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int replay = 0; replay < 3; ++replay) {
      set_bytes(kept.data, 0, kept.bytes, s0);
      MT_CUDA_CHECK(cudaGraphLaunch(executable, native_stream(s0)));
      EXPECT_EQ(read(kept.data, kept.bytes), filled(kept.bytes, 7));
    }
    MT_CUDA_CHECK(cudaGraphExecDestroy(executable));
    MT_CUDA_CHECK(cudaGraphDestroy(graph));
    memory().release(kept);
  }
  empty_cache(device);
  EXPECT_EQ(stats().reserved, reserved);
}

// CASES 99: a capture that fails gives its memory back.
TEST_F(CudaAllocator, AFailedCaptureLeavesNothingBehind) {
  const MemoryStats before = stats();
  try {
    MemoryPool pool(device);
    const MemoryPoolScope scope(pool);
    struct EndCapture {
      Stream stream;
      ~EndCapture() {
        cudaGraph_t graph = nullptr;
        cudaStreamEndCapture(native_stream(stream), &graph);
        if (graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();
      }
    };
    MT_CUDA_CHECK(cudaStreamBeginCapture(native_stream(s0), cudaStreamCaptureModeGlobal));
    const EndCapture end{s0};
    const Block block = memory().allocate(5 * kMiB, s0);
    set_bytes(block.data, 1, block.bytes, s0);
    memory().release(block);
    std::vector<char> pageable(100);
    copy_bytes(pageable.data(), Device::cpu(), block.data, device, 100, s0);
    FAIL() << "a copy to pageable memory was captured";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("pinned host memory"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(stats().allocated, before.allocated);
  EXPECT_EQ(stats().reserved, before.reserved);
  const Block after = memory().allocate(4096, s0);
  set_bytes(after.data, 3, 4096, s0);
  EXPECT_EQ(read(after.data, 4096), filled(4096, 3));
  memory().release(after);
}

#endif

}  // namespace
}  // namespace mixtape
