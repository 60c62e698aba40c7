// CUDA streams, events, copies, pinned memory and the device-error slot.
#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>

#include "engine/check.h"
#include "engine/device_error.h"
#include "kernels/kernel.h"
#include "tests/engine/cuda_test.h"

namespace mixtape {
namespace {

using testing::filled;
using testing::StreamBlock;

constexpr std::size_t kMiB = std::size_t{1} << 20;

class CudaStream : public testing::CudaTest {};
class CudaTransfer : public testing::CudaTest {};

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_F(CudaStream, PoolHandsOutThirtyTwoOfEachPriority) {
  std::set<void*> streams;
  for (int i = 0; i < 40; ++i) {
    streams.insert(Stream::create(device).native());
    streams.insert(Stream::create(device, true).native());
  }
  EXPECT_EQ(streams.size(), 64u);
  EXPECT_FALSE(streams.contains(nullptr));
}

TEST_F(CudaStream, GuardsNestAndAreThreadLocal) {
  EXPECT_EQ(Stream::current(device), Stream::default_stream(device));
  {
    const StreamGuard outer(s0);
    EXPECT_EQ(Stream::current(device), s0);
    {
      const StreamGuard inner(s1);
      EXPECT_EQ(Stream::current(device), s1);
      std::thread other(
          [&] { EXPECT_EQ(Stream::current(device), Stream::default_stream(device)); });
      other.join();
    }
    EXPECT_EQ(Stream::current(device), s0);
  }
  EXPECT_EQ(Stream::current(device), Stream::default_stream(device));
}

TEST_F(CudaStream, GuardMakesItsDeviceCurrent) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "needs two devices";
  const auto current = [] {
    int index = -1;
    MT_CUDA_CHECK(cudaGetDevice(&index));
    return index;
  };
  MT_CUDA_CHECK(cudaSetDevice(0));
  {
    const StreamGuard guard(Stream::create(Device::cuda(1)));
    EXPECT_EQ(current(), 1);
    EXPECT_EQ(Device::best(), Device::cuda(1));
  }
  EXPECT_EQ(current(), 0);
}

TEST_F(CudaStream, EventsFollowTheirStream) {
  StreamBlock hold(s0);
  const Event event(s0);
  EXPECT_FALSE(event.done());
  hold.open();
  event.synchronize();
  EXPECT_TRUE(event.done());
}

TEST_F(CudaStream, WaitOrdersWorkAcrossStreams) {
  const Block block = memory().allocate(kMiB, s0);
  set_bytes(block.data, 0, kMiB, s0);
  s0.synchronize();
  StreamBlock hold(s0);
  set_bytes(block.data, 1, kMiB, s0);
  s1.wait(Event(s0));
  set_bytes(block.data, 2, kMiB, s1);
  EXPECT_FALSE(Event(s1).done());
  hold.open();
  EXPECT_EQ(read(block.data, kMiB), filled(kMiB, 2));
  memory().release(block);
}

TEST_F(CudaStream, EventsMeasureTimeWhenAsked) {
  const Event begin(s0, true);
  {
    StreamBlock hold(s0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const Event end(s0, true);
  const double ms = begin.elapsed_ms(end);
  EXPECT_GT(ms, 10.0);
  EXPECT_LT(ms, 5000.0);
  EXPECT_THROW(begin.elapsed_ms(Event(s0)), Error);
  EXPECT_THROW(begin.elapsed_ms(Event(Stream(), true)), Error);
}

TEST_F(CudaStream, FailedCallsNameExpressionAndDevice) {
  const std::string what = message_of([] { MT_CUDA_CHECK(cudaSetDevice(9999)); });
  EXPECT_NE(what.find("cudaSetDevice(9999) failed on cuda:"), std::string::npos) << what;
  EXPECT_NE(what.find("cudaErrorInvalidDevice"), std::string::npos) << what;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaStream, LaunchErrorsAreTheKernelsOwn) {
  EXPECT_NO_THROW(detail::check_after_kernel("fine", s0));
  cudaSetDevice(9999);  // leaves an error, as a launch with a bad configuration does
  const std::string what = message_of([&] { detail::check_after_kernel("softmax_forward", s0); });
  EXPECT_TRUE(what.starts_with("softmax_forward: failed on cuda:0: ")) << what;
  EXPECT_NO_THROW(detail::check_after_kernel("next", s0)) << "reported once";
}

// What a kernel does on the device, done here by the host: the slot is mapped memory.
TEST_F(CudaStream, DeviceErrorsAreThrownAtTheNextSynchronisation) {
  DeviceError* slot = device_error_slot(device);
  const auto report = [&] {
    slot->op = device_error_op_id("cross_entropy");
    slot->value = 17;
    slot->bound = 10;
    slot->reported = slot->taken + 1;
  };
  const std::string expected =
      "cross_entropy: expected an index in [0, 10), got 17 (found on cuda:0)";
  report();
  EXPECT_TRUE(message_of([&] { s0.synchronize(); }).starts_with(expected));
  EXPECT_NO_THROW(s0.synchronize()) << "thrown once";
  report();
  EXPECT_TRUE(message_of([&] { synchronize(device); }).starts_with(expected));
  EXPECT_FALSE(is_pending(*slot));
}

std::vector<unsigned char> pattern(std::size_t n, unsigned seed) {
  std::vector<unsigned char> bytes(n);
  for (std::size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<unsigned char>(((i + seed) * 0x9E3779B97F4A7C15u) >> 56);
  return bytes;
}

TEST_F(CudaTransfer, PageableMemoryMakesTheRoundTrip) {
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{5000}, 4 * kMiB,
                              4 * kMiB + 1, 8 * kMiB, 13 * kMiB + 3}) {
    const auto source = pattern(n, 3);
    auto host = source;
    const Block a = memory().allocate(n, s0), b = memory().allocate(n, s0);
    copy_bytes(a.data, device, host.data(), Device::cpu(), n, s0);
    std::fill(host.begin(), host.end(), 0xEE);  // the copy has let go of it
    copy_bytes(b.data, device, a.data, device, n, s0);
    copy_bytes(host.data(), Device::cpu(), b.data, device, n, s0);
    EXPECT_TRUE(host == source) << n << " bytes";  // readable at once, CASES 94
    memory().release(a);
    memory().release(b);
  }
}

TEST_F(CudaTransfer, PageableSourcesMayChangeBeforeTheTransferRuns) {
  constexpr std::size_t kBytes = 100000;
  pinned_allocator().release(pinned_allocator().allocate(kBytes, s0));  // staging is there
  const Block block = memory().allocate(kBytes, s0);
  auto host = filled(kBytes, 1);
  StreamBlock hold(s0);
  copy_bytes(block.data, device, host.data(), Device::cpu(), kBytes, s0);
  std::fill(host.begin(), host.end(), 2);
  hold.open();
  EXPECT_EQ(read(block.data, kBytes), filled(kBytes, 1));
  memory().release(block);
}

TEST_F(CudaTransfer, LargeCopiesWaitForTheirStaging) {
  const std::size_t n = 13 * kMiB + 5;
  const auto source = pattern(n, 8);
  const Block block = memory().allocate(n, s0);
  {  // staging is there
    copy_bytes(block.data, device, source.data(), Device::cpu(), n, s0);
    set_bytes(block.data, 0, n, s0);
    s0.synchronize();
  }
  StreamBlock hold(s0);
  std::jthread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    hold.open();
  });
  copy_bytes(block.data, device, source.data(), Device::cpu(), n, s0);
  EXPECT_TRUE(read(block.data, n) == source);
  memory().release(block);
}

// CASES 94: the pinned source of a copy that has not run yet is freed, and its place asked for.
TEST_F(CudaTransfer, PinnedBlocksAreNotReusedUnderACopy) {
  constexpr std::size_t kBytes = 1 << 16;
  {  // two blocks in the cache, so that nothing below waits in the driver
    const Block x = pinned_allocator().allocate(kBytes, s0);
    const Block y = pinned_allocator().allocate(kBytes, s0);
    pinned_allocator().release(x);
    pinned_allocator().release(y);
  }
  const Block target = memory().allocate(kBytes, s0);
  const Block a = pinned_allocator().allocate(kBytes, s0);
  std::memset(a.data, 1, kBytes);
  StreamBlock hold(s0);
  copy_bytes(target.data, device, a.data, Device::cpu(), kBytes, s0);
  pinned_allocator().release(a);
  const Block b = pinned_allocator().allocate(kBytes, s0);
  EXPECT_NE(b.data, a.data);
  std::memset(b.data, 2, kBytes);
  hold.open();
  EXPECT_EQ(read(target.data, kBytes), filled(kBytes, 1));
  const Block c = pinned_allocator().allocate(kBytes, s0);
  EXPECT_EQ(c.data, a.data) << "with the copy done, the block comes back";
  pinned_allocator().release(b);
  pinned_allocator().release(c);
  memory().release(target);
}

// The middle of a pinned block is as pinned as its start: the copy returns before it has run.
TEST_F(CudaTransfer, PinnedCopiesDoNotBlockTheHost) {
  constexpr std::size_t kBytes = 1 << 16;
  const Block host = pinned_allocator().allocate(2 * kBytes, s0);
  const Block block = memory().allocate(kBytes, s0);
  set_bytes(block.data, 9, kBytes, s0);
  std::memset(host.data, 0, 2 * kBytes);
  s0.synchronize();
  StreamBlock hold(s0);
  char* middle = static_cast<char*>(host.data) + kBytes / 2;
  copy_bytes(middle, Device::cpu(), block.data, device, kBytes, s0);
  const Event copied(s0);
  EXPECT_FALSE(copied.done());
  EXPECT_EQ(middle[0], 0);
  hold.open();
  copied.synchronize();
  EXPECT_EQ(middle[0], 9);
  EXPECT_EQ(middle[kBytes - 1], 9);
  EXPECT_EQ(middle[kBytes], 0);
  EXPECT_EQ(middle[-1], 0);
  pinned_allocator().release(host);
  memory().release(block);
}

TEST_F(CudaTransfer, PinnedCacheCountsAndEmpties) {
  const MemoryStats before = pinned_memory_stats();
  const Block a = pinned_allocator().allocate(5000, s0);
  EXPECT_EQ(pinned_memory_stats().allocated - before.allocated, 5000u);
  EXPECT_EQ(pinned_memory_stats().reserved - before.reserved, 8192u);
  pinned_allocator().release(a);
  const Block b = pinned_allocator().allocate(8192, s0);
  EXPECT_EQ(b.data, a.data);
  pinned_allocator().release(b);
  empty_pinned_cache();
  EXPECT_EQ(pinned_memory_stats().reserved, before.reserved);
}

TEST_F(CudaTransfer, RefusesAStreamOfAnotherDevice) {
  char byte = 0;
  const Block block = memory().allocate(1, s0);
  EXPECT_THROW(copy_bytes(block.data, device, &byte, Device::cpu(), 1, Stream()), Error);
  memory().release(block);
}

TEST_F(CudaTransfer, CopiesBetweenDevices) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "needs two devices";
  const Device other = Device::cuda(1);
  const Stream here = Stream::current(device), there = Stream::current(other);
  const Block a = memory().allocate(kMiB, here), b = allocator_of(other).allocate(kMiB, there);
  set_bytes(b.data, 0, kMiB, there);
  {
    StreamBlock hold(here);
    set_bytes(a.data, 5, kMiB, here);
    copy_bytes(b.data, other, a.data, device, kMiB, there);
    set_bytes(a.data, 6, kMiB, here);  // later work of the source's stream
  }
  synchronize(other);
  EXPECT_EQ(read(b.data, kMiB), filled(kMiB, 5));
  memory().release(a);
  allocator_of(other).release(b);
}

}  // namespace
}  // namespace mixtape
