#include "kernels/cuda/reduce_extrema.h"

#include <limits>

#include "kernels/cuda/reduce.cuh"

namespace mixtape::kernels::cuda {

namespace {

template <class C, bool kLargest>
struct ExtremumReducer {  // NaN propagates
  using Value = C;
  using State = C;
  void* out;
  Dtype dtype;

  static __device__ __forceinline__ C identity() {
    using Limits = std::numeric_limits<C>;
    if constexpr (Limits::has_infinity) return kLargest ? -Limits::infinity() : Limits::infinity();
    return kLargest ? Limits::lowest() : Limits::max();
  }
  static __device__ __forceinline__ C combine(C a, C b) {
    return std::conditional_t<kLargest, Max, Min>{}(a, b);
  }
  static __device__ __forceinline__ void add(C& state, C x, std::int64_t) {
    state = combine(state, x);
  }
  __device__ __forceinline__ void write(const std::int64_t (&offsets)[DimMap::kOperands],
                                        C state) const {
    store_as(out, dtype, offsets[1], state);
  }
};

template <bool kLargest>
void run(const Stream& stream, const ReductionPlan& plan, const View& out, const View& x,
         Workspace workspace) {
  switch (compute_dtype(x.dtype)) {
    case Dtype::f32:
      return run_reduction<true>("reduce", stream,
                                 ExtremumReducer<float, kLargest>{out.data, out.dtype}, plan, x,
                                 workspace);
    case Dtype::f64:
      return run_reduction<false>("reduce", stream,
                                  ExtremumReducer<double, kLargest>{out.data, out.dtype}, plan, x,
                                  workspace);
    default:
      return run_reduction<false>("reduce", stream,
                                  ExtremumReducer<std::int64_t, kLargest>{out.data, out.dtype},
                                  plan, x, workspace);
  }
}

}  // namespace

void reduce_extrema(const Stream& stream, bool largest, const ReductionPlan& plan, const View& out,
                    const View& x, Workspace workspace) {
  MT_CHECK(plan.length > 0, "reduce: expected at least one element to reduce, got ", x.sizes);
  if (largest)
    run<true>(stream, plan, out, x, workspace);
  else
    run<false>(stream, plan, out, x, workspace);
}

}  // namespace mixtape::kernels::cuda
