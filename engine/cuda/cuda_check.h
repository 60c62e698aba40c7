// Checked CUDA calls. Every runtime call of the CUDA backend goes through MT_CUDA_CHECK, every
// kernel launch is followed by MT_CUDA_CHECK_LAUNCH(): a failure throws mixtape::Error with the
// expression, the runtime's own text, the device and the op that was running.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

#include "engine/check.h"
#include "engine/cuda/backend.h"
#include "engine/device.h"
#include "engine/op_scope.h"
#include "engine/stream.h"

#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
#error \
    "Mixtape: per-thread default streams share one handle, which the caching allocator and the \
stream guards cannot tell apart; build without --default-stream per-thread."
#endif

namespace mixtape {

[[noreturn]] inline void throw_cuda_error(cudaError_t error, const char* expression,
                                          std::source_location where) {
  cudart::check_not_forked();
  int device = -1;
  cudaGetDevice(&device);
  cudaGetLastError();  // an error that is not sticky must not show up again at the next launch
  const char* op = OpScope::current();
  ::mixtape::detail::throw_error(
      ::mixtape::detail::concat(op ? op : "cuda", ": ", expression, " failed on cuda:", device,
                                ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
                                ")"),
      where);
}

/// The queue behind a CUDA Stream.
inline cudaStream_t native_stream(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.native());
}

/// Makes a device current for a scope. Costs one thread-local read where it already is.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(Device device);
  ~CudaDeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int previous_ = -1;  // device to go back to, or -1
};

}  // namespace mixtape

#define MT_CUDA_CHECK(expression)                                                          \
  do {                                                                                     \
    const cudaError_t mt_error = (expression);                                             \
    if (mt_error != cudaSuccess) [[unlikely]]                                              \
      ::mixtape::throw_cuda_error(mt_error, #expression, std::source_location::current()); \
  } while (false)

/// After `kernel<<<...>>>(...)`: throws a bad launch configuration at once.
#define MT_CUDA_CHECK_LAUNCH()                                                                 \
  do {                                                                                         \
    const cudaError_t mt_error = cudaGetLastError();                                           \
    if (mt_error != cudaSuccess) [[unlikely]]                                                  \
      ::mixtape::throw_cuda_error(mt_error, "kernel launch", std::source_location::current()); \
  } while (false)

inline mixtape::CudaDeviceGuard::CudaDeviceGuard(Device device) {
  int current = 0;
  MT_CUDA_CHECK(cudaGetDevice(&current));
  if (current == device.index) return;
  MT_CUDA_CHECK(cudaSetDevice(device.index));
  previous_ = current;
}
