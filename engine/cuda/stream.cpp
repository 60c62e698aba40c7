// Pools of streams and events: creating either costs microseconds and may synchronise, so both are
// made once and never destroyed (the driver may be gone before our static objects are).
#include <array>
#include <mutex>
#include <vector>

#include "engine/cuda/capture_mode.h"
#include "engine/cuda/cuda_check.h"

namespace mixtape::cudart {
namespace {

constexpr std::size_t kStreamsPerPool = 32;

cudaStream_t native(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t native_event(void* event) { return static_cast<cudaEvent_t>(event); }

struct StreamPool {
  std::mutex mutex;
  std::vector<cudaStream_t> streams;
  std::size_t next = 0;
};

struct EventPool {
  std::mutex mutex;
  std::vector<cudaEvent_t> events;
};

// [device][high priority], [device][timing]
template <class T>
T& pool_of(int device, bool kind) {
  static auto& pools = *new std::array<std::array<T, 2>, kMaxDevices>;
  return pools[static_cast<std::size_t>(device)][kind ? 1 : 0];
}

}  // namespace

void* create_stream(int device, bool high_priority) {
  StreamPool& pool = pool_of<StreamPool>(device, high_priority);
  const std::lock_guard lock(pool.mutex);
  if (pool.streams.size() < kStreamsPerPool) {
    const CudaDeviceGuard guard(Device::cuda(device));
    const RelaxedCapture relaxed;
    int least = 0, greatest = 0;
    MT_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream = nullptr;
    MT_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                               high_priority ? greatest : least));
    pool.streams.push_back(stream);
    return stream;
  }
  return pool.streams[pool.next++ % kStreamsPerPool];
}

void synchronize_stream(int device, void* stream) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CUDA_CHECK(cudaStreamSynchronize(native(stream)));
}

void synchronize_device(int device) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CUDA_CHECK(cudaDeviceSynchronize());
}

void synchronize_beside_capture(int device, void* stream) {
  const RelaxedCapture relaxed;
  synchronize_stream(device, stream);
}

bool is_capturing(int device, void* stream) {
  const CudaDeviceGuard guard(Device::cuda(device));
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(native(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {  // the default stream, while another captures
    cudaGetLastError();
    return true;
  }
  MT_CUDA_CHECK(error);
  return status != cudaStreamCaptureStatusNone;
}

void* acquire_event(int device, bool timing) {
  EventPool& pool = pool_of<EventPool>(device, timing);
  {
    const std::lock_guard lock(pool.mutex);
    if (!pool.events.empty()) {
      cudaEvent_t event = pool.events.back();
      pool.events.pop_back();
      return event;
    }
  }
  const CudaDeviceGuard guard(Device::cuda(device));
  const RelaxedCapture relaxed;
  cudaEvent_t event = nullptr;
  MT_CUDA_CHECK(
      cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming));
  return event;
}

void release_event(int device, bool timing, void* event) noexcept {
  if (in_forked_child()) return;
  EventPool& pool = pool_of<EventPool>(device, timing);
  const std::lock_guard lock(pool.mutex);
  pool.events.push_back(native_event(event));
}

void record_event(int device, void* event, void* stream) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CUDA_CHECK(cudaEventRecord(native_event(event), native(stream)));
}

bool event_done(int device, void* event) {
  const CudaDeviceGuard guard(Device::cuda(device));
  const cudaError_t error = cudaEventQuery(native_event(event));
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  MT_CUDA_CHECK(error);
  return true;
}

void synchronize_event(int device, void* event) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CUDA_CHECK(cudaEventSynchronize(native_event(event)));
}

void wait_event(int device, void* stream, void* event) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CUDA_CHECK(cudaStreamWaitEvent(native(stream), native_event(event), 0));
}

double elapsed_ms(void* from, void* to) {
  float ms = 0;
  MT_CUDA_CHECK(cudaEventElapsedTime(&ms, native_event(from), native_event(to)));
  return ms;
}

}  // namespace mixtape::cudart
