// Allocation from the caches against what they replace: cudaMalloc with cudaFree (the column
// `ratio` says how many times slower that is; the aim is 50 or more), and the C library with the
// page faults of memory that was just mapped. Also the latency of handing work to the thread pool.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdlib>

#include "engine/allocator.h"
#include "engine/thread_pool.h"
#if defined(MIXTAPE_WITH_CUDA)
#include "engine/cuda/cuda_check.h"
#endif

namespace mixtape {
namespace {

constexpr std::int64_t kKiB = 1 << 10, kMiB = 1 << 20;

template <class F>
double nanoseconds_of(int repeats, F&& f) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) f();
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
  return time.count() / repeats;
}

void touch(void* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 4096) static_cast<volatile char*>(data)[i] = 1;
}

void cpu_allocate_and_free(benchmark::State& state) {
  Allocator& allocator = allocator_of(Device::cpu());
  const auto bytes = static_cast<std::size_t>(state.range(0));
  for (auto _ : state) allocator.release(allocator.allocate(bytes, {}));
}
BENCHMARK(cpu_allocate_and_free)->Arg(256)->Arg(64 * kKiB)->Arg(16 * kMiB);

void cpu_allocate_touch_and_free(benchmark::State& state) {
  Allocator& allocator = allocator_of(Device::cpu());
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const double library = nanoseconds_of(20, [&] {
    void* data = std::aligned_alloc(64, bytes);
    touch(data, bytes);
    std::free(data);
  });
  double total = 0;
  for (auto _ : state) {
    total += nanoseconds_of(1, [&] {
      const Block block = allocator.allocate(bytes, {});
      touch(block.data, bytes);
      allocator.release(block);
    });
  }
  state.counters["library_ns"] = library;
  state.counters["ratio"] = library / (total / static_cast<double>(state.iterations()));
}
BENCHMARK(cpu_allocate_touch_and_free)->Arg(256)->Arg(64 * kKiB)->Arg(64 * kMiB);

// One item a thread: the time to hand out the ranges, run them and wait.
void parallel_for_latency(benchmark::State& state) {
  for (auto _ : state)
    parallel_for(0, num_threads(), 1,
                 [](std::int64_t b, std::int64_t) { benchmark::DoNotOptimize(b); });
  state.counters["threads"] = num_threads();
}
BENCHMARK(parallel_for_latency)->UseRealTime();

#if defined(MIXTAPE_WITH_CUDA)
void cuda_allocate_and_free(benchmark::State& state) {
  if (cuda_device_count() == 0) {
    state.SkipWithError("no usable CUDA device on this machine");
    return;
  }
  const Device device = Device::cuda();
  const Stream stream = Stream::current(device);
  Allocator& allocator = allocator_of(device);
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const auto from_driver = [&] {
    void* data = nullptr;
    MT_CUDA_CHECK(cudaMalloc(&data, bytes));
    MT_CUDA_CHECK(cudaFree(data));
  };
  from_driver();
  const double driver = nanoseconds_of(100, from_driver);
  allocator.release(allocator.allocate(bytes, stream));
  const double cached =
      nanoseconds_of(100000, [&] { allocator.release(allocator.allocate(bytes, stream)); });
  for (auto _ : state) allocator.release(allocator.allocate(bytes, stream));
  state.counters["driver_ns"] = driver;
  state.counters["ratio"] = driver / cached;
}
BENCHMARK(cuda_allocate_and_free)->Arg(4 * kKiB)->Arg(kMiB)->Arg(16 * kMiB)->Arg(256 * kMiB);

void pinned_allocate_and_free(benchmark::State& state) {
  if (cuda_device_count() == 0) {
    state.SkipWithError("no usable CUDA device on this machine");
    return;
  }
  Allocator& allocator = pinned_allocator();
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const auto from_driver = [&] {
    void* data = nullptr;
    MT_CUDA_CHECK(cudaHostAlloc(&data, bytes, cudaHostAllocPortable));
    MT_CUDA_CHECK(cudaFreeHost(data));
  };
  from_driver();
  const double driver = nanoseconds_of(20, from_driver);
  allocator.release(allocator.allocate(bytes, {}));
  const double cached =
      nanoseconds_of(100000, [&] { allocator.release(allocator.allocate(bytes, {})); });
  for (auto _ : state) allocator.release(allocator.allocate(bytes, {}));
  state.counters["driver_ns"] = driver;
  state.counters["ratio"] = driver / cached;
}
BENCHMARK(pinned_allocate_and_free)->Arg(4 * kKiB)->Arg(16 * kMiB);
#endif

}  // namespace
}  // namespace mixtape
