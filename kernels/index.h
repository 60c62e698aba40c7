// Gathering and scattering by index tensors (i64 or i32).
//
// An index outside [0, bound) throws on the CPU ("op: expected an index in [0, B), got V") and is
// reported to the device's error slot on CUDA, where the element reads as 0 or is not added.
// Negative indices are out of range. `op` is the user-facing op's name, for those messages.
// Additions for repeated indices accumulate in float (double for f64) before one rounding, in an
// order that does not depend on scheduling: deterministic, nothing lost in 16-bit types.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

/// Scratch for scatter_add and index_add with `count` indices into `rows` rows of `width` elements.
std::size_t index_add_workspace_bytes(Device device, std::int64_t count, std::int64_t rows,
                                      std::int64_t width);

#define MT_DECLARE_INDEX                                                                           \
  /* out[i.., k, j..] = x[i.., index[k], j..]: rows of x along `dim`; index is 1-D. With dim 0     \
   * this */                                                                                       \
  /* is also embedding's forward (index flattened). Any strides; out may differ in float dtype. */ \
  void index_select(const Stream&, const char* op, View out, View x, int dim, View index);         \
  /* out[i.., index[k], j..] += src[i.., k, j..] * 1; out keeps its other values (beta 1) or       \
   * starts */                                                                                     \
  /* from 0 (beta 0). Rows whose index equals padding_index are skipped (-1: none). */             \
  void index_add(const Stream&, const char* op, View out, float beta, int dim, View index,         \
                 View src, std::int64_t padding_index, Workspace workspace);                       \
  /* out[p] = x[p with p[dim] = index[p]]; out has index's shape; x is at least as large           \
   * elsewhere. */                                                                                 \
  void gather(const Stream&, const char* op, View out, View x, int dim, View index);               \
  /* out[p with p[dim] = index[p]] += src[p], over index's shape; beta as in index_add. */         \
  void scatter_add(const Stream&, const char* op, View out, float beta, int dim, View index,       \
                   View src, Workspace workspace);

namespace cpu {
MT_DECLARE_INDEX
}
namespace cuda {
MT_DECLARE_INDEX
std::size_t index_add_workspace_bytes(std::int64_t count, std::int64_t rows, std::int64_t width);
}  // namespace cuda
#undef MT_DECLARE_INDEX

inline constexpr Kernel index_select{"index_select", cpu::index_select,
                                     MT_CUDA(cuda::index_select)};
inline constexpr Kernel index_add{"index_add", cpu::index_add, MT_CUDA(cuda::index_add)};
inline constexpr Kernel gather{"gather", cpu::gather, MT_CUDA(cuda::gather)};
inline constexpr Kernel scatter_add{"scatter_add", cpu::scatter_add, MT_CUDA(cuda::scatter_add)};

}  // namespace mixtape::kernels
