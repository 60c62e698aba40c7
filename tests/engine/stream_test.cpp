// Streams, events and copies where they need no GPU: the CPU's one stream, and clear refusals.
#include "engine/stream.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "engine/check.h"
#include "engine/memory_pool.h"
#include "engine/transfer.h"
#include "kernels/kernel.h"

namespace mixtape {
namespace {

TEST(CpuStream, IsAlwaysDone) {
  const Stream stream = Stream::current(Device::cpu());
  EXPECT_EQ(stream, Stream::default_stream(Device::cpu()));
  EXPECT_EQ(stream, Stream::create(Device::cpu()));
  EXPECT_EQ(stream.native(), nullptr);
  const StreamGuard guard(stream);
  const Event event(stream);
  EXPECT_TRUE(event.done());
  event.synchronize();
  stream.wait(event);
  stream.synchronize();
  synchronize(Device::cpu());
}

TEST(CpuStream, EventsMeasureTimeWhenAsked) {
  const Event begin({}, true);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const Event end({}, true);
  EXPECT_GE(begin.elapsed_ms(end), 5.0);
  EXPECT_THROW(begin.elapsed_ms(Event(Stream{})), Error);
}

TEST(CpuStream, RefusesDevicesThatAreNotThere) {
  const Device absent = Device::cuda(cuda_device_count());
  EXPECT_THROW(Stream::current(absent), Error);
  EXPECT_THROW(Stream::default_stream(absent), Error);
  EXPECT_THROW(Stream::create(absent), Error);
  EXPECT_THROW(synchronize(absent), Error);
  EXPECT_THROW(MemoryPool{absent}, Error);
  char byte = 0;
  EXPECT_THROW(copy_bytes(&byte, absent, &byte, Device::cpu(), 1, {}), Error);
}

TEST(CpuTransfer, CopiesAndSets) {
  std::vector<int> a(1000), b(1000, -1);
  for (int i = 0; i < 1000; ++i) a[static_cast<std::size_t>(i)] = i;
  copy_bytes(b.data(), Device::cpu(), a.data(), Device::cpu(), 4000, {});
  EXPECT_EQ(a, b);
  set_bytes(b.data(), 0, 4000, {});
  EXPECT_EQ(b, std::vector<int>(1000, 0));
  copy_bytes(nullptr, Device::cpu(), nullptr, Device::cpu(), 0, {});
  set_bytes(nullptr, 0, 0, {});
}

TEST(MemoryPool, DoesNothingOnTheCpu) {
  const MemoryPool pool(Device::cpu());
  const MemoryPoolScope scope(pool);
  EXPECT_EQ(pool.device(), Device::cpu());
}

void cpu_only(const Stream&, int* out) { *out = 1; }

TEST(KernelDispatch, NamesAKernelWithoutABackend) {
  constexpr Kernel kernel{"cpu_only", cpu_only, nullptr};
  int ran = 0;
  kernel(Stream{}, &ran);
  EXPECT_EQ(ran, 1);
  try {
    kernel(make_stream(Device::cuda(), nullptr), &ran);
    FAIL() << "a kernel without a CUDA function ran on cuda:0";
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("cpu_only: ")) << error.what();
  }
}

}  // namespace
}  // namespace mixtape
