// A copy on the device, timed by events; memory straight from the driver, so that the caching
// allocator's statistics and peaks stay what the program made them.
#include "engine/cuda/copy_rate.h"

#include <algorithm>

#include "engine/cuda/cuda_check.h"

namespace mixtape::cudart {
namespace {

struct DriverMemory {
  void* data = nullptr;
  ~DriverMemory() {
    if (data != nullptr) cudaFree(data);
  }
  bool allocate(std::size_t bytes) {
    const cudaError_t error = cudaMalloc(&data, bytes);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return false;
    }
    MT_CUDA_CHECK(error);
    return true;
  }
};

}  // namespace

double copy_rate(int device) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const CudaDeviceGuard guard(Device::cuda(device));
  DriverMemory from, to;
  if (!from.allocate(kBytes) || !to.allocate(kBytes)) return 0;
  const Stream stream = Stream::default_stream(Device::cuda(device));
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const Event begin(stream, true);
    MT_CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, kBytes, cudaMemcpyDeviceToDevice,
                                  native_stream(stream)));
    const Event end(stream, true);
    best = std::max(best, 2e3 * static_cast<double>(kBytes) / begin.elapsed_ms(end));
  }
  return best;
}

}  // namespace mixtape::cudart
