// A CUDA runtime without a GPU: two devices whose memory is host memory and whose streams are
// threads. Linked in place of the real runtime, it runs the tests of the allocators, streams and
// copies on any machine, with orders as loose as a real device's: work runs when its stream gets to
// it, reads host memory then and not at the call, and streams wait for each other only where told
// to. No kernels, no graphs.
#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr std::size_t kDeviceBytes = std::size_t{1} << 30;

// One occurrence of a recorded event.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point time;

  void set() {
    const std::lock_guard lock(mutex);
    done = true;
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
  bool is_done() {
    const std::lock_guard lock(mutex);
    return done;
  }
};

class Queue {
 public:
  Queue() {
    std::thread([this] { run(); }).detach();
  }

  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  std::shared_ptr<Mark> mark() {
    auto mark = std::make_shared<Mark>();
    push([mark] { mark->set(); });
    return mark;
  }

 private:
  [[noreturn]] void run() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !work_.empty(); });
        next = std::move(work_.front());
        work_.pop_front();
      }
      next();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
};

struct Allocation {
  std::size_t bytes;
  int device;  // -1: pinned host memory
};

// Never destroyed: its queues' threads run until the process ends.
struct Runtime {
  std::mutex mutex;
  std::array<std::deque<Queue*>, kDevices> queues;  // [0] is the default stream's
  std::array<std::size_t, kDevices> used{};
  std::map<const char*, Allocation> allocations;

  Runtime() {
    for (auto& of_device : queues) of_device.push_back(new Queue);
  }
};

Runtime& runtime() {
  static auto& instance = *new Runtime;
  return instance;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

Queue& queue_of(cudaStream_t stream) {
  if (stream != nullptr) return *reinterpret_cast<Queue*>(stream);
  return *runtime().queues[static_cast<std::size_t>(current_device)].front();
}

void wait_for_device(int device) {
  Runtime& r = runtime();
  std::vector<std::shared_ptr<Mark>> marks;
  {
    const std::lock_guard lock(r.mutex);
    for (Queue* queue : r.queues[static_cast<std::size_t>(device)]) marks.push_back(queue->mark());
  }
  for (const auto& mark : marks) mark->wait();
}

struct Event {
  std::shared_ptr<Mark> mark;
  bool timing;
};
Event& event_of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

cudaError_t allocate(void** data, std::size_t bytes, int device) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  if (device >= 0) {
    std::size_t& used = r.used[static_cast<std::size_t>(device)];
    if (bytes > kDeviceBytes - used) return result(cudaErrorMemoryAllocation);
    used += bytes;
  }
  *data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (*data == nullptr) return result(cudaErrorMemoryAllocation);
  r.allocations[static_cast<char*>(*data)] = {bytes, device};
  return cudaSuccess;
}

cudaError_t release(void* data) {
  for (int device = 0; device < kDevices; ++device) wait_for_device(device);
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  const auto found = r.allocations.find(static_cast<char*>(data));
  if (found == r.allocations.end()) return result(cudaErrorInvalidValue);
  if (found->second.device >= 0)
    r.used[static_cast<std::size_t>(found->second.device)] -= found->second.bytes;
  r.allocations.erase(found);
  std::free(data);
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    default: return "cudaErrorInvalidValue";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  return allocate(data, bytes, current_device);
}
cudaError_t cudaFree(void* data) { return release(data); }
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  return allocate(data, bytes, -1);
}
cudaError_t cudaFreeHost(void* data) { return release(data); }
cudaError_t cudaHostGetDevicePointer(void** seen, void* host, unsigned) {
  *seen = host;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  *total = kDeviceBytes;
  *free = kDeviceBytes - r.used[static_cast<std::size_t>(current_device)];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  *attributes = {};
  const char* at = static_cast<const char*>(data);
  auto after = r.allocations.upper_bound(at);
  if (after == r.allocations.begin()) return cudaSuccess;
  const auto& [begin, allocation] = *std::prev(after);
  if (at < begin + allocation.bytes)
    attributes->type = allocation.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  auto* queue = new Queue;
  r.queues[static_cast<std::size_t>(current_device)].push_back(queue);
  *stream = reinterpret_cast<cudaStream_t>(queue);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  queue_of(stream).mark()->wait();
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  wait_for_device(current_device);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{nullptr, (flags & cudaEventDisableTiming) == 0});
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event_of(event).mark = queue_of(stream).mark();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto& mark = event_of(event).mark;
  return mark == nullptr || mark->is_done() ? cudaSuccess : result(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto mark = event_of(event).mark) mark->wait();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const auto mark = event_of(event).mark) queue_of(stream).push([mark] { mark->wait(); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  if (!event_of(from).timing || !event_of(to).timing) return result(cudaErrorInvalidValue);
  const auto time = event_of(to).mark->time - event_of(from).mark->time;
  *ms = std::chrono::duration<float, std::milli>(time).count();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t n, cudaMemcpyKind,
                            cudaStream_t stream) {
  queue_of(stream).push([=] { std::memcpy(dst, src, n); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, std::size_t n,
                                cudaStream_t stream) {
  queue_of(stream).push([=] { std::memcpy(dst, src, n); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, std::size_t n, cudaMemcpyKind kind) {
  cudaMemcpyAsync(dst, src, n, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* dst, int value, std::size_t n, cudaStream_t stream) {
  queue_of(stream).push([=] { std::memset(dst, value, n); });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  queue_of(stream).push([=] { function(argument); });
  return cudaSuccess;
}

}  // extern "C"
