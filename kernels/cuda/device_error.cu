#include "kernels/cuda/device_error.cuh"

#include <array>
#include <atomic>

#include "engine/cuda/capture_mode.h"
#include "kernels/cuda/cuda_check.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kMaxDevices = 64;

__device__ std::uint32_t claimed_error;  // one per device, 0 when the module is loaded

std::uint32_t* claimed_on(Device device) {
  static std::array<std::atomic<std::uint32_t*>, kMaxDevices> words;
  MT_CHECK(device.index < kMaxDevices, "error_target: expected a device below ", kMaxDevices,
           ", got ", device);
  auto& word = words[static_cast<std::size_t>(device.index)];
  if (std::uint32_t* known = word.load(std::memory_order_acquire)) return known;
  const CudaDeviceGuard guard(device);
  const cudart::RelaxedCapture relaxed;
  void* address = nullptr;
  MT_CUDA_CHECK(cudaGetSymbolAddress(&address, claimed_error));
  word.store(static_cast<std::uint32_t*>(address), std::memory_order_release);
  return static_cast<std::uint32_t*>(address);
}

}  // namespace

ErrorTarget error_target(const Stream& stream, const char* op) {
  const Device device = stream.device();
  return {device_error_slot(device), claimed_on(device), device_error_op_id(op)};
}

}  // namespace mixtape::kernels::cuda
