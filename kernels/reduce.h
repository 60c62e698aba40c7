// Reductions over any set of dimensions. `out` has x's dimensions with size 1 in each reduced one
// (keepdim form); the op layer squeezes. Accumulation is float (double for f64, int64 for integers)
// whatever the storage type, in a tree whose shape depends on the sizes alone: deterministic.
// An empty reduction gives 0 for sum, NaN for mean and var; for max and min the op layer refuses
// it.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

enum class ReduceOp : std::uint8_t { sum, mean, max, min, any, all };

/// Scratch for reduce/var/arg_reduce of x into out on a CUDA device (split reductions); 0 for the
/// CPU.
std::size_t reduce_workspace_bytes(const View& out, const View& x);

#define MT_DECLARE_REDUCE                                                                         \
  /* out = op over the dimensions in which out has size 1 and x more. Any dtypes (converted on */ \
  /* load and store); max and min propagate NaN; any/all write b8. */                             \
  void reduce(const Stream&, ReduceOp op, View out, View x, Workspace workspace);                 \
  /* Variance with divisor n - correction, computed about the mean (two passes or Welford, never  \
   */                                                                                             \
  /* E[x^2] - E[x]^2). `mean` is optional. n - correction <= 0 gives NaN. */                      \
  void var(const Stream&, View out, View mean, View x, double correction, Workspace workspace);   \
  /* Largest (or smallest) value along dimension `dim` and its first index. `values` is optional; \
   */                                                                                             \
  /* `indices` is i64. A NaN counts as largest and smallest. */                                   \
  void arg_reduce(const Stream&, bool largest, View values, View indices, View x, int dim);

namespace cpu {
MT_DECLARE_REDUCE
}
namespace cuda {
MT_DECLARE_REDUCE
std::size_t reduce_workspace_bytes(const View& out, const View& x);
}  // namespace cuda
#undef MT_DECLARE_REDUCE

inline constexpr Kernel reduce{"reduce", cpu::reduce, MT_CUDA(cuda::reduce)};
inline constexpr Kernel var{"var", cpu::var, MT_CUDA(cuda::var)};
inline constexpr Kernel arg_reduce{"arg_reduce", cpu::arg_reduce, MT_CUDA(cuda::arg_reduce)};

}  // namespace mixtape::kernels
