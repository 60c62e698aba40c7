// The dense product under matmul and convolution: one thread, one arithmetic type, row-major
// output. Eigen's blocked product, or oneDNN's sgemm for float where the build has oneDNN.
#pragma once

#include <cstdint>

namespace mixtape::kernels::cpu {

/// Element (i, j) is data[i * ld + j], or data[j * ld + i] if transposed.
template <class C>
struct GemmOperand {
  const C* data;
  std::int64_t ld;
  bool transposed;
};

/// c (m, n) = alpha * a b + beta * c, with row i of c at c + i * ldc. beta 0 never reads c, and
/// k = 0 gives beta * c. Sums are in C; their order depends on the sizes alone. Runs on the calling
/// thread only. C is float or double.
template <class C>
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, C alpha, GemmOperand<C> a,
          GemmOperand<C> b, C beta, C* c, std::int64_t ldc);

}  // namespace mixtape::kernels::cpu
