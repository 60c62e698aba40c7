// Devices, the forked-child check, and the error slots. A machine without a driver or a GPU is an
// ordinary machine with no CUDA devices.
#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>

#include "engine/cuda/capture_mode.h"
#include "engine/cuda/cuda_check.h"

namespace mixtape::cudart {
namespace {

std::atomic<bool> forked{false};

struct Probe {
  int count = 0;
  std::string reason;
};

const Probe& probe() {
  static const Probe result = [] {
    Probe p;
    const cudaError_t error = cudaGetDeviceCount(&p.count);
    if (error != cudaSuccess) {
      p.count = 0;
      int driver = 0;
      const bool absent = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
      p.reason = absent ? "this machine has no NVIDIA driver"
                        : std::string("this machine has no usable CUDA device: ") +
                              cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
      cudaGetLastError();  // a missing driver is no error to find at the next launch
    } else if (p.count == 0) {
      p.reason = "this machine has no CUDA device";
    } else {
      // The driver is initialised now, and does not survive a fork.
      pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
    }
    if (p.count > kMaxDevices) p.count = kMaxDevices;
    return p;
  }();
  return result;
}

}  // namespace

int device_count() noexcept { return probe().count; }

std::string unavailable_reason() { return probe().reason; }

int current_device() {
  int device = 0;
  MT_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

void set_current_device(int device) { MT_CUDA_CHECK(cudaSetDevice(device)); }

void restore_current_device(int device) noexcept { cudaSetDevice(device); }

bool in_forked_child() noexcept { return forked.load(std::memory_order_relaxed); }

void check_not_forked() {
  MT_CHECK(!in_forked_child(),
           "cuda: this process was forked after CUDA was initialised, and CUDA cannot be used in "
           "such a child; start workers as threads, or fork before the first use of a device");
}

DeviceError* error_slot(int device) {
  static std::array<std::atomic<DeviceError*>, kMaxDevices> slots;
  static std::mutex mutex;
  auto& slot = slots[static_cast<std::size_t>(device)];
  if (DeviceError* ready = slot.load(std::memory_order_acquire)) return ready;
  const std::lock_guard lock(mutex);
  if (DeviceError* ready = slot.load(std::memory_order_acquire)) return ready;
  const CudaDeviceGuard guard(Device::cuda(device));
  const RelaxedCapture relaxed;
  void *host = nullptr, *seen = nullptr;
  MT_CUDA_CHECK(
      cudaHostAlloc(&host, sizeof(DeviceError), cudaHostAllocMapped | cudaHostAllocPortable));
  MT_CUDA_CHECK(cudaHostGetDevicePointer(&seen, host, 0));
  MT_CHECK(seen == host, "device_error_slot: ", Device::cuda(device),
           " has no unified addressing, which Mixtape needs");
  slot.store(new (host) DeviceError, std::memory_order_release);
  return static_cast<DeviceError*>(host);
}

void check_kernel(const char* kernel, int device, void* stream, bool wait) {
  cudaError_t error = cudaGetLastError();
  const bool synchronize = error == cudaSuccess && wait && !is_capturing(device, stream);
  if (synchronize) {
    const CudaDeviceGuard guard(Device::cuda(device));
    error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  }
  if (error != cudaSuccess) [[unlikely]] {
    cudaGetLastError();
    MT_THROW(kernel, ": failed on ", Device::cuda(device), ": ", cudaGetErrorString(error), " (",
             cudaGetErrorName(error), ')');
  }
  if (synchronize) throw_device_error(Device::cuda(device));
}

}  // namespace mixtape::cudart
