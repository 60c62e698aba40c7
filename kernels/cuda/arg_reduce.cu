#include <limits>

#include "kernels/cuda/reduce.cuh"

namespace mixtape::kernels::cuda {

namespace {

template <class C>
struct Best {
  C value;
  std::int64_t index;
};

/// The best value and its first index; a NaN is better than any number.
template <class C, bool kLargest>
struct ArgReducer {
  using Value = C;
  using State = Best<C>;
  std::int64_t* indices;
  void* values;  // may be nullptr
  Dtype dtype;

  static __device__ __forceinline__ State identity() {
    using Limits = std::numeric_limits<C>;
    C worst = kLargest ? Limits::lowest() : Limits::max();
    if constexpr (Limits::has_infinity) worst = kLargest ? -Limits::infinity() : Limits::infinity();
    return {worst, std::numeric_limits<std::int64_t>::max()};
  }
  static __device__ __forceinline__ State combine(const State& a, const State& b) {
    const bool beyond = kLargest ? b.value > a.value : b.value < a.value;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    const bool tie = b.value == a.value || (a_nan && b_nan);
    const bool take = tie ? b.index < a.index : beyond || (b_nan && !a_nan);
    return take ? b : a;
  }
  static __device__ __forceinline__ void add(State& state, C x, std::int64_t i) {
    state = combine(state, State{x, i});
  }
  __device__ __forceinline__ void write(const std::int64_t (&offsets)[DimMap::kOperands],
                                        const State& s) const {
    indices[offsets[1]] = s.index;
    if (values != nullptr) store_as(values, dtype, offsets[2], s.value);
  }
};

template <class C, bool kVectors>
void run(const Stream& stream, bool largest, const ReductionPlan& plan, const View& values,
         const View& indices, const View& x) {
  auto* const to = indices.ptr<std::int64_t>();
  void* const best = values ? values.data : nullptr;
  if (largest)
    run_reduction<kVectors>("arg_reduce", stream, ArgReducer<C, true>{to, best, values.dtype}, plan,
                            x, Workspace{});
  else
    run_reduction<kVectors>("arg_reduce", stream, ArgReducer<C, false>{to, best, values.dtype},
                            plan, x, Workspace{});
}

}  // namespace

void arg_reduce(const Stream& stream, bool largest, View values, View indices, View x, int dim) {
  MT_CHECK_EQ(indices.dtype, Dtype::i64, "arg_reduce: dtype of the indices");
  MT_CHECK_EQ(indices.dim(), x.dim(), "arg_reduce: dimensions of the indices");
  for (int d = 0; d < x.dim(); ++d)
    MT_CHECK(indices.sizes[d] == (d == dim ? 1 : x.sizes[d]), "arg_reduce: expected sizes ",
             x.sizes, " with 1 in dimension ", dim, " for the indices, got ", indices.sizes);
  const ReductionPlan plan = plan_reduction("arg_reduce", indices, values, x, {.may_split = false});
  if (plan.outputs == 0) return;
  MT_CHECK(plan.length > 0 && (x.dim() == 0 || x.sizes[dim] > 0),
           "arg_reduce: expected at least one element along dimension ", dim, ", got ", x.sizes);
  switch (compute_dtype(x.dtype)) {
    case Dtype::f32: return run<float, true>(stream, largest, plan, values, indices, x);
    case Dtype::f64: return run<double, false>(stream, largest, plan, values, indices, x);
    default: return run<std::int64_t, false>(stream, largest, plan, values, indices, x);
  }
}

}  // namespace mixtape::kernels::cuda
