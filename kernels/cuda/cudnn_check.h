// Checked cuDNN calls: a status other than success throws mixtape::Error with the expression, the
// library's own text, the device and the op that was running.
#pragma once

#include <cudnn.h>

#include "kernels/cuda/cuda_check.h"

namespace mixtape {

/// The reason for the thread's last failure, which is more specific than its status.
inline std::string cudnn_reason() {
  char text[1024] = "";
  cudnnGetLastErrorString(text, sizeof(text));
  return text;
}

[[noreturn]] inline void throw_cudnn_error(cudnnStatus_t status, const char* expression,
                                           std::source_location where) {
  int device = -1;
  cudaGetDevice(&device);
  const char* op = OpScope::current();
  ::mixtape::detail::throw_error(
      ::mixtape::detail::concat(op ? op : "cudnn", ": ", expression, " failed on cuda:", device,
                                ": ", cudnnGetErrorString(status), ": ", cudnn_reason()),
      where);
}

}  // namespace mixtape

#define MT_CUDNN_CHECK(expression)                                                           \
  do {                                                                                       \
    const cudnnStatus_t mt_status = (expression);                                            \
    if (mt_status != CUDNN_STATUS_SUCCESS) [[unlikely]]                                      \
      ::mixtape::throw_cudnn_error(mt_status, #expression, std::source_location::current()); \
  } while (false)
