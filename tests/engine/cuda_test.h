// What the CUDA tests of the leaf layer share: device memory as bytes, and a way to hold a stream's
// work back, so that orders which are a matter of luck otherwise are certain.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/allocator.h"
#include "engine/caching_allocator.h"
#include "engine/cuda/cuda_check.h"
#include "engine/stream.h"
#include "engine/transfer.h"

namespace mixtape::testing {

/// Work queued on `stream` after this waits until open() or the end of the scope (and for 10 s at
/// most, so that a wrong test fails instead of hanging). Host functions of several streams may run
/// on one thread: have one of these at a time.
class StreamBlock {
 public:
  explicit StreamBlock(const Stream& stream) : state_(std::make_shared<State>()) {
    auto* shared = new std::shared_ptr<State>(state_);
    MT_CUDA_CHECK(cudaLaunchHostFunc(native_stream(stream), &wait, shared));
  }
  ~StreamBlock() { open(); }
  StreamBlock(const StreamBlock&) = delete;
  StreamBlock& operator=(const StreamBlock&) = delete;

  void open() {
    const std::lock_guard lock(state_->mutex);
    state_->open = true;
    state_->changed.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  static void wait(void* argument) {
    const std::unique_ptr<std::shared_ptr<State>> owner(
        static_cast<std::shared_ptr<State>*>(argument));
    State& state = **owner;
    std::unique_lock lock(state.mutex);
    state.changed.wait_for(lock, std::chrono::seconds(10), [&] { return state.open; });
  }
  std::shared_ptr<State> state_;
};

/// A test on the first CUDA device with two streams and empty caches.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no usable CUDA device on this machine";
    if (!detail::caching_enabled()) GTEST_SKIP() << "the caches are off";
    device = Device::cuda();
    s0 = Stream::create(device);
    s1 = Stream::create(device);
    synchronize(device);
    empty_cache(device);
    empty_pinned_cache();
  }
  void TearDown() override {
    if (IsSkipped()) return;
    synchronize(device);
    set_memory_limit(device, 0);
  }

  Allocator& memory() { return allocator_of(device); }
  MemoryStats stats() { return memory_stats(device); }

  /// The first `n` bytes at `data`, after all work of the device.
  std::vector<unsigned char> read(const void* data, std::size_t n) {
    synchronize(device);
    std::vector<unsigned char> bytes(n);
    MT_CUDA_CHECK(cudaMemcpy(bytes.data(), data, n, cudaMemcpyDeviceToHost));
    return bytes;
  }

  Device device;
  Stream s0, s1;
};

inline std::vector<unsigned char> filled(std::size_t n, unsigned char value) {
  return std::vector<unsigned char>(n, value);
}

}  // namespace mixtape::testing
