// The host allocator: alignment, reuse, bounds of the cache, statistics, limits, threads.
#include "engine/allocator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "engine/caching_allocator.h"
#include "engine/check.h"
#include "engine/op_scope.h"

namespace mixtape {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

Allocator& cpu() { return allocator_of(Device::cpu()); }
MemoryStats stats() { return memory_stats(Device::cpu()); }

class CpuAllocator : public ::testing::Test {
 protected:
  void SetUp() override { empty_cache(Device::cpu()); }
  void TearDown() override { set_memory_limit(Device::cpu(), 0); }
};

TEST_F(CpuAllocator, BlocksAreAlignedDisjointAndWritable) {
  std::vector<Block> blocks;
  for (std::size_t n = 1; n <= 3 * kMiB; n = n * 5 / 4 + 1) {
    blocks.push_back(cpu().allocate(n, {}));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().data) % 64, 0u) << n;
    EXPECT_EQ(blocks.back().bytes, n);
    std::memset(blocks.back().data, static_cast<int>(blocks.size()), n);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(blocks[i].data);
    EXPECT_EQ(bytes[0], i + 1);
    EXPECT_EQ(bytes[blocks[i].bytes - 1], i + 1);
    cpu().release(blocks[i]);
  }
}

TEST_F(CpuAllocator, NoBytesIsANullBlock) {
  const Block none = cpu().allocate(0, {});
  EXPECT_EQ(none.data, nullptr);
  cpu().release(none);
  cpu().release({});
}

TEST_F(CpuAllocator, CountsWhatIsLiveAndReserved) {
  const MemoryStats before = stats();
  reset_peak_memory_stats(Device::cpu());
  const Block a = cpu().allocate(1000, {}), b = cpu().allocate(5 * kMiB, {});
  EXPECT_EQ(stats().allocated - before.allocated, 1000 + 5 * kMiB);
  EXPECT_GE(stats().reserved - before.reserved, 1000 + 5 * kMiB);
  cpu().release(b);
  EXPECT_EQ(stats().allocated - before.allocated, 1000u);
  EXPECT_EQ(stats().allocated_peak - before.allocated, 1000 + 5 * kMiB);
  cpu().release(a);
  EXPECT_EQ(stats().allocated, before.allocated);
  EXPECT_EQ(stats().allocations - before.allocations, 2u);
  EXPECT_EQ(stats().frees - before.frees, 2u);
  empty_cache(Device::cpu());
  EXPECT_EQ(stats().reserved, before.reserved);
  EXPECT_EQ(stats().largest_free_block, 0u);
}

TEST_F(CpuAllocator, FreedBlocksAreReusedWithoutTheSystem) {
  if (!detail::caching_enabled()) GTEST_SKIP() << "the cache is off";
  for (const std::size_t n : {std::size_t{100}, std::size_t{40000}, 3 * kMiB, 70 * kMiB}) {
    const Block first = cpu().allocate(n, {});
    cpu().release(first);
    EXPECT_GE(stats().largest_free_block, n);
    const std::uint64_t calls = stats().driver_allocations;
    const Block second = cpu().allocate(n, {});
    EXPECT_EQ(second.data, first.data) << n;
    EXPECT_EQ(stats().driver_allocations, calls) << n;
    cpu().release(second);
  }
}

TEST_F(CpuAllocator, ClassesWasteAtMostAnEighth) {
  if (!detail::caching_enabled()) GTEST_SKIP() << "the cache is off";
  for (std::size_t n = 64; n < 64 * kMiB; n = n * 9 / 8 + 1) {
    const std::size_t before = stats().reserved;
    const Block block = cpu().allocate(n, {});
    const std::size_t size = stats().reserved - before;
    EXPECT_GE(size, n);
    EXPECT_LE(size, n + n / 8 + 64) << n;
    cpu().release(block);
    empty_cache(Device::cpu());
  }
}

// Every step needs another size, as with sequences of varying length: what was freed in one class
// must not pile up beside the others.
TEST_F(CpuAllocator, CacheStaysNearTheLivePeak) {
  if (!detail::caching_enabled()) GTEST_SKIP() << "the cache is off";
  reset_peak_memory_stats(Device::cpu());
  const std::size_t base = stats().allocated;
  const std::size_t peak = 512 * kMiB;
  for (std::size_t n = 16 * kMiB; n <= peak; n += 16 * kMiB) cpu().release(cpu().allocate(n, {}));
  const std::size_t sum_of_classes = 16 * kMiB * 32 * 33 / 2;
  EXPECT_LE(stats().reserved_peak, (base + peak) * 5 / 4 + 64 * kMiB);
  EXPECT_LT(stats().reserved_peak, sum_of_classes / 4);
}

TEST_F(CpuAllocator, StepsOfTheSameSizesNeverReachTheSystemAgain) {
  if (!detail::caching_enabled()) GTEST_SKIP() << "the cache is off";
  std::mt19937 random(3);
  std::vector<std::size_t> sizes(200);
  for (std::size_t& n : sizes) n = 1 + random() % (2 * kMiB);
  std::uint64_t calls = 0;
  for (int step = 0; step < 5; ++step) {
    std::vector<Block> live;
    for (const std::size_t n : sizes) live.push_back(cpu().allocate(n, {}));
    for (const Block& block : live) cpu().release(block);
    if (step == 0) calls = stats().driver_allocations;
    EXPECT_EQ(stats().driver_allocations, calls) << "step " << step;
  }
}

TEST_F(CpuAllocator, OverTheLimitIsAnErrorThatNamesTheOp) {
  const MemoryStats before = stats();
  set_memory_limit(Device::cpu(), before.reserved + 32 * kMiB);
  const Block fits = cpu().allocate(20 * kMiB, {});
  const OpScope op("conv2d", true);
  try {
    cpu().release(cpu().allocate(24 * kMiB, {}));
    FAIL() << "the limit was passed";
  } catch (const OutOfMemory& error) {
    const std::string what = error.what();
    EXPECT_TRUE(what.starts_with("conv2d (backward): out of memory on cpu: requested 24.00 MiB"))
        << what;
    for (const char* part : {"allocated ", "reserved ", "largest free block ", "the limit is "})
      EXPECT_NE(what.find(part), std::string::npos) << what;
  }
  cpu().release(fits);
  // The freed block does not fit the next size, so it has to make room for it.
  const Block next = cpu().allocate(30 * kMiB, {});
  EXPECT_NE(next.data, nullptr);
  cpu().release(next);
}

TEST_F(CpuAllocator, ImpossibleSizesAreOutOfMemory) {
  EXPECT_THROW(cpu().allocate(~std::size_t{0}, {}), OutOfMemory);
  EXPECT_THROW(cpu().allocate(std::size_t{1} << 60, {}), OutOfMemory);
}

TEST_F(CpuAllocator, SummaryPrintsEveryFigure) {
  const std::string text = memory_summary(Device::cpu());
  for (const char* part : {"memory of cpu", "allocated", "reserved", "largest free block", "peak"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_EQ(detail::format_bytes(0), "0 B");
  EXPECT_EQ(detail::format_bytes(1023), "1023 B");
  EXPECT_EQ(detail::format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(detail::format_bytes(std::size_t{3} << 40), "3.00 TiB");
}

TEST_F(CpuAllocator, PinnedFallsBackToHostMemory) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "this machine pins memory";
  const Block block = pinned_allocator().allocate(4096, {});
  std::memset(block.data, 1, 4096);
  pinned_allocator().record_stream(block, {});
  pinned_allocator().release(block);
  EXPECT_GE(pinned_memory_stats().allocations, 1u);
  EXPECT_NO_THROW(empty_pinned_cache());
}

TEST_F(CpuAllocator, RefusesDevicesThatAreNotThere) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_THROW(allocator_of(Device::cuda()), Error);
  EXPECT_THROW(memory_stats(Device::cuda()), Error);
  EXPECT_THROW(empty_cache(Device::cuda()), Error);
}

// Blocks pass between threads; each carries a pattern that its next owner checks.
TEST(CpuAllocatorThreads, ThreadsShareTheCacheSafely) {
  constexpr int kThreads = 4, kRounds = 5000;
  std::mutex mutex;
  std::vector<std::pair<Block, unsigned char>> handed_over;
  const std::size_t before = stats().allocated;
  const auto check_and_release = [](const Block& block, unsigned char pattern) {
    const auto* bytes = static_cast<const unsigned char*>(block.data);
    for (std::size_t i = 0; i < block.bytes; ++i) ASSERT_EQ(bytes[i], pattern);
    cpu().release(block);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < kRounds; ++i) {
        const Block block = cpu().allocate(1 + random() % 2000, {});
        const auto pattern = static_cast<unsigned char>(random());
        std::memset(block.data, pattern, block.bytes);
        std::pair<Block, unsigned char> other{block, pattern};
        {
          const std::lock_guard lock(mutex);
          handed_over.push_back(other);
          std::swap(handed_over[random() % handed_over.size()], handed_over.back());
          if (handed_over.size() < 20) continue;
          other = handed_over.back();
          handed_over.pop_back();
        }
        check_and_release(other.first, other.second);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& [block, pattern] : handed_over) check_and_release(block, pattern);
  EXPECT_EQ(stats().allocated, before);
}

}  // namespace
}  // namespace mixtape
