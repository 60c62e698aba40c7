// Times short pieces of queued work with a pair of CUDA events.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda_check.h"

namespace mixtape::kernels::cuda {

class TrialTimer {
 public:
  explicit TrialTimer(cudaStream_t stream) : stream_(stream) {
    MT_CUDA_CHECK(cudaEventCreate(&start_));
    const cudaError_t error = cudaEventCreate(&stop_);
    if (error != cudaSuccess) cudaEventDestroy(start_);
    MT_CUDA_CHECK(error);
  }
  ~TrialTimer() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  TrialTimer(const TrialTimer&) = delete;
  TrialTimer& operator=(const TrialTimer&) = delete;

  void start() { MT_CUDA_CHECK(cudaEventRecord(start_, stream_)); }
  /// Waits for the work since start() and returns its time in milliseconds.
  float stop() {
    MT_CUDA_CHECK(cudaEventRecord(stop_, stream_));
    MT_CUDA_CHECK(cudaEventSynchronize(stop_));
    float ms = 0;
    MT_CUDA_CHECK(cudaEventElapsedTime(&ms, start_, stop_));
    return ms;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

}  // namespace mixtape::kernels::cuda
