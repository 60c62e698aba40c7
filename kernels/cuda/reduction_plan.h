// How a reduction is laid out on the device: which dimensions are kept and which reduced, merged
// where they can be, which of three kernels runs, and into how many splits each output is cut so
// that there is work for a whole GPU. Everything follows from sizes, strides and dtypes alone,
// never from the device, so that the order of additions does not depend on where it runs.
#pragma once

#include "kernels/cuda/dim_map.h"
#include "kernels/reduce.h"

namespace mixtape::kernels::cuda {

inline constexpr int kReduceThreads = 256;
/// Bytes of the largest partial result (three doubles of a variance).
inline constexpr std::size_t kMaxStateBytes = 32;

enum class ReductionLayout : std::uint8_t {
  rows,     // the innermost dimension of x is reduced: vectors along it, lanes share an output
  columns,  // it is kept: vectors of outputs, lanes step through the reduced dimensions
  strided,  // neither is dense, or the dtype has no vectors: one element at a time
};

/// Operand 0 of the maps is x, 1 the output, 2 the second output (mean, values) if there is one.
struct ReductionPlan {
  ReductionLayout layout = ReductionLayout::strided;
  DimMap kept, reduced;
  std::int64_t outputs = 0, length = 0;  // elements per output
  int width = 1;                         // elements of a vector
  // rows: `group` threads share an output. columns: `group` threads side by side cover
  // group * width outputs. strided: `group` threads share an output, on neighbouring elements of it
  // if `along_reduced`, else on neighbouring outputs.
  int group = 1;
  bool along_reduced = true;
  std::int64_t steps = 0;   // along an output: vectors (rows) or elements
  std::int64_t splits = 1;  // parts of an output
  std::int64_t chunk = 0;   // steps of one part
};

struct PlanOptions {
  bool may_split = true;  // partial results can go to a workspace
  bool vectors = true;    // the reducer takes floats
};
/// x into out (sizes 1 where reduced); `second` may be absent. Throws "name: ..." for sizes that do
/// not fit.
ReductionPlan plan_reduction(const char* name, const View& out, const View& second, const View& x,
                             PlanOptions options = {});

/// Whether every vector of the plan's layout is whole and 16-byte aligned.
bool vectors_aligned(const ReductionPlan& plan, const View& x);

}  // namespace mixtape::kernels::cuda
