// The cuBLASLt side of matmul: one plan for each distinct problem, found by its key.
//
// A plan holds ready descriptors and the algorithm to run, so that a call after the first only
// hashes the key, writes the pointers and launches. Candidates come from the library's heuristic,
// restricted to split-K partials in the compute type; the fastest is chosen by a short timed trial
// (see kernels/matmul.h, set_algorithm_trials) and shared by all threads.
// Everything here is in cuBLAS terms: column-major, d (m, n) = epilogue(alpha op(a) op(b) + beta
// d).
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/dtype.h"
#include "engine/stream.h"
#include "kernels/kernel.h"

namespace mixtape::kernels::cuda {

/// Everything an algorithm choice depends on. Compared and hashed by its bytes: no padding.
struct MatmulKey {
  std::int64_t m, n, k;
  std::int64_t lda, ldb, ldd, aux_ld;                     // elements
  std::int64_t stride_a, stride_b, stride_d, stride_aux;  // elements; 0 where batch is 1
  std::int32_t batch;
  std::int32_t device;
  std::uint32_t epilogue;       // cublasLtEpilogue_t
  std::uint32_t workspace_kib;  // scratch the algorithm may use
  Dtype dtype, out_dtype;       // of a and b; of d, the bias and the auxiliary output
  bool transpose_a, transpose_b;
  bool tf32;
  std::uint8_t align_a, align_b, align_d;  // log2 of bytes, at most 8 (alignment_log2)
  std::uint8_t align_bias, align_aux;
  std::uint8_t unused[6];
};

/// Alignment classes that algorithms tell apart: 256, 16, 8, 4, 2, 1 bytes.
std::uint8_t alignment_log2(const void* pointer);

struct MatmulOperands {
  const void *a, *b;
  void* d;
  const void* bias = nullptr;  // (m), where the epilogue has a bias
  void* aux = nullptr;         // where the epilogue has an auxiliary output
  double alpha = 1, beta = 0;
};

/// Queues the product. Returns false, having queued nothing, if the library has no algorithm for
/// the key (an epilogue that the types or layouts do not support).
bool run_matmul(const MatmulKey& key, const MatmulOperands& operands, Workspace workspace,
                const Stream& stream);

}  // namespace mixtape::kernels::cuda
