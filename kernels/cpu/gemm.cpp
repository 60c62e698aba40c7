#include "kernels/cpu/gemm.h"

#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>
#include <algorithm>

#if defined(MIXTAPE_WITH_ONEDNN)
#include <dnnl.h>

#include "engine/check.h"
#include "kernels/cpu/onednn.h"
#endif

namespace mixtape::kernels::cpu {
namespace {

constexpr int kDynamic = Eigen::Dynamic;
template <class C, int Order>
using Matrix = Eigen::Map<const Eigen::Matrix<C, kDynamic, kDynamic, Order>, Eigen::Unaligned,
                          Eigen::OuterStride<>>;
template <class C>
using Output = Eigen::Map<Eigen::Matrix<C, kDynamic, kDynamic, Eigen::RowMajor>, Eigen::Unaligned,
                          Eigen::OuterStride<>>;

/// Calls f with `x` (rows, cols) as an Eigen map in its own storage order.
template <class C, class F>
void with_map(const GemmOperand<C>& x, std::int64_t rows, std::int64_t cols, F&& f) {
  const Eigen::OuterStride<> ld(x.ld);
  if (x.transposed)
    f(Matrix<C, Eigen::ColMajor>(x.data, rows, cols, ld));
  else
    f(Matrix<C, Eigen::RowMajor>(x.data, rows, cols, ld));
}

template <class C>
void scale(std::int64_t m, std::int64_t n, C beta, C* c, std::int64_t ldc) {
  if (beta == 1) return;
  for (std::int64_t i = 0; i < m; ++i) {
    C* const row = c + i * ldc;
    if (beta == 0)
      std::fill(row, row + n, C(0));
    else
      for (std::int64_t j = 0; j < n; ++j) row[j] *= beta;
  }
}

template <class C>
void eigen_gemm(std::int64_t m, std::int64_t n, std::int64_t k, C alpha, const GemmOperand<C>& a,
                const GemmOperand<C>& b, C beta, C* c, std::int64_t ldc) {
  Output<C> out(c, m, n, Eigen::OuterStride<>(ldc));
  scale(m, n, beta, c, ldc);
  with_map(a, m, k, [&](const auto& lhs) {
    with_map(b, k, n, [&](const auto& rhs) { out.noalias() += alpha * lhs * rhs; });
  });
}

#if defined(MIXTAPE_WITH_ONEDNN)
void onednn_sgemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                  const GemmOperand<float>& a, const GemmOperand<float>& b, float beta, float* c,
                  std::int64_t ldc) {
  const SingleOpenMpThread single;
  const dnnl_status_t status = dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', m, n,
                                          k, alpha, a.data, a.ld, b.data, b.ld, beta, c, ldc);
  MT_CHECK(status == dnnl_success, "dnnl_sgemm: expected success, got status ",
           static_cast<int>(status), " for m, n, k = ", m, ", ", n, ", ", k);
}
#endif

}  // namespace

template <class C>
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, C alpha, GemmOperand<C> a,
          GemmOperand<C> b, C beta, C* c, std::int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0 || alpha == 0) return scale(m, n, beta, c, ldc);
#if defined(MIXTAPE_WITH_ONEDNN)
  if constexpr (sizeof(C) == sizeof(float)) return onednn_sgemm(m, n, k, alpha, a, b, beta, c, ldc);
#endif
  eigen_gemm(m, n, k, alpha, a, b, beta, c, ldc);
}

template void gemm<float>(std::int64_t, std::int64_t, std::int64_t, float, GemmOperand<float>,
                          GemmOperand<float>, float, float*, std::int64_t);
template void gemm<double>(std::int64_t, std::int64_t, std::int64_t, double, GemmOperand<double>,
                           GemmOperand<double>, double, double*, std::int64_t);

}  // namespace mixtape::kernels::cpu
