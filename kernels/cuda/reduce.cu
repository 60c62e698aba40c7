#include "kernels/reduce.h"

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/reduce_extrema.h"

namespace mixtape::kernels::cuda {

namespace {

/// Sum, or mean where `count` >= 0.
template <class C>
struct SumReducer {
  using Value = C;
  using State = C;
  void* out;
  Dtype dtype;
  std::int64_t count;

  static __device__ __forceinline__ C identity() { return C(0); }
  static __device__ __forceinline__ void add(C& state, C x, std::int64_t) { state += x; }
  static __device__ __forceinline__ C combine(C a, C b) { return a + b; }
  __device__ __forceinline__ void write(const std::int64_t (&offsets)[DimMap::kOperands],
                                        C state) const {
    if (count < 0)
      store_as(out, dtype, offsets[1], state);
    else if constexpr (std::is_same_v<C, std::int64_t>)
      store_as(out, dtype, offsets[1], static_cast<double>(state) / static_cast<double>(count));
    else
      store_as(out, dtype, offsets[1], state / static_cast<C>(count));
  }
};

/// Whether any (or every) element is not zero.
template <bool kAny>
struct TruthReducer {
  using Value = bool;
  using State = std::int32_t;
  void* out;
  Dtype dtype;

  static __device__ __forceinline__ State identity() { return kAny ? 0 : 1; }
  static __device__ __forceinline__ State combine(State a, State b) { return kAny ? a | b : a & b; }
  static __device__ __forceinline__ void add(State& state, bool x, std::int64_t) {
    state = combine(state, x ? 1 : 0);
  }
  __device__ __forceinline__ void write(const std::int64_t (&offsets)[DimMap::kOperands],
                                        State state) const {
    store_as(out, dtype, offsets[1], static_cast<std::int64_t>(state));
  }
};

}  // namespace

void reduce(const Stream& stream, ReduceOp op, View out, View x, Workspace workspace) {
  const bool truth = op == ReduceOp::any || op == ReduceOp::all;
  const ReductionPlan plan = plan_reduction("reduce", out, View(), x, {.vectors = !truth});
  if (plan.outputs == 0) return;
  if (op == ReduceOp::max || op == ReduceOp::min)
    return reduce_extrema(stream, op == ReduceOp::max, plan, out, x, workspace);
  const auto run = [&](auto vectors, const auto& reducer) {
    run_reduction<decltype(vectors)::value>("reduce", stream, reducer, plan, x, workspace);
  };
  if (op == ReduceOp::any) return run(std::false_type{}, TruthReducer<true>{out.data, out.dtype});
  if (op == ReduceOp::all) return run(std::false_type{}, TruthReducer<false>{out.data, out.dtype});
  const std::int64_t count = op == ReduceOp::mean ? plan.length : -1;
  switch (compute_dtype(x.dtype)) {
    case Dtype::f32: return run(std::true_type{}, SumReducer<float>{out.data, out.dtype, count});
    case Dtype::f64: return run(std::false_type{}, SumReducer<double>{out.data, out.dtype, count});
    default: return run(std::false_type{}, SumReducer<std::int64_t>{out.data, out.dtype, count});
  }
}

}  // namespace mixtape::kernels::cuda
