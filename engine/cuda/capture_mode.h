// Lets this thread make calls (allocation, event queries) that a stream capture under way in the
// process would otherwise forbid; they are not part of the captured work.
#pragma once

#include <cuda_runtime_api.h>

namespace mixtape::cudart {

class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace mixtape::cudart
