// Checked cuBLASLt calls: a status other than success throws mixtape::Error with the expression,
// the library's own text, the device and the op that was running.
#pragma once

#include <cublasLt.h>

#include "kernels/cuda/cuda_check.h"

namespace mixtape {

[[noreturn]] inline void throw_cublas_error(cublasStatus_t status, const char* expression,
                                            std::source_location where) {
  int device = -1;
  cudaGetDevice(&device);
  const char* op = OpScope::current();
  ::mixtape::detail::throw_error(
      ::mixtape::detail::concat(op ? op : "cublas", ": ", expression, " failed on cuda:", device,
                                ": ", cublasLtGetStatusString(status), " (",
                                cublasLtGetStatusName(status), ")"),
      where);
}

}  // namespace mixtape

#define MT_CUBLAS_CHECK(expression)                                                           \
  do {                                                                                        \
    const cublasStatus_t mt_status = (expression);                                            \
    if (mt_status != CUBLAS_STATUS_SUCCESS) [[unlikely]]                                      \
      ::mixtape::throw_cublas_error(mt_status, #expression, std::source_location::current()); \
  } while (false)
