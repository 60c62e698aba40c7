// Variance by running means (Welford 1962), merged by the formula of Chan, Golub and LeVeque
// (1979): one pass over x, and nothing cancels however large the mean.
#include "kernels/cuda/approx_functions.cuh"
#include "kernels/cuda/reduce.cuh"

namespace mixtape::kernels::cuda {

namespace {

template <class C>
struct Moments {
  C n, mean, low, m2;  // mean + low: the mean to twice the precision, so that values much smaller
                       // than it keep their variance; m2: sum of squared differences from it
};

template <class C>
struct VarianceReducer {
  using Value = C;
  using State = Moments<C>;
  void* out;
  Dtype dtype;
  void* mean;  // may be nullptr
  Dtype mean_dtype;
  double divisor;  // n - correction
  std::int64_t length;

  static __device__ __forceinline__ State identity() { return {C(0), C(0), C(0), C(0)}; }
  static __device__ __forceinline__ void add(State& s, C x, std::int64_t) {
    s.n += C(1);
    const C delta = (x - s.mean) - s.low;
    if constexpr (std::is_same_v<C, float>)
      move_mean(s, delta * approx_reciprocal(s.n));
    else
      move_mean(s, delta / s.n);
    s.m2 += delta * ((x - s.mean) - s.low);
  }
  static __device__ __forceinline__ void move_mean(State& s, C by) {
    const C step = s.low + by, moved = s.mean + step;
    s.low = step - (moved - s.mean);
    s.mean = moved;
  }
  static __device__ __forceinline__ State combine(const State& a, const State& b) {
    if (b.n == C(0)) return a;
    if (a.n == C(0)) return b;
    const C n = a.n + b.n;
    const C share = b.n / n, delta = (b.mean - a.mean) + (b.low - a.low);
    State s{n, a.mean, a.low, a.m2 + b.m2 + delta * delta * (a.n * share)};
    move_mean(s, delta * share);
    return s;
  }
  __device__ __forceinline__ void write(const std::int64_t (&offsets)[DimMap::kOperands],
                                        const State& s) const {
    const C nan = C(NAN);
    store_as(out, dtype, offsets[1], divisor > 0 ? s.m2 / static_cast<C>(divisor) : nan);
    if (mean != nullptr) store_as(mean, mean_dtype, offsets[2], length > 0 ? s.mean : nan);
  }
};

template <class C>
VarianceReducer<C> reducer_for(const View& out, const View& mean, std::int64_t length,
                               double correction) {
  return {out.data,
          out.dtype,
          mean ? mean.data : nullptr,
          mean.dtype,
          static_cast<double>(length) - correction,
          length};
}

}  // namespace

void var(const Stream& stream, View out, View mean, View x, double correction,
         Workspace workspace) {
  const ReductionPlan plan = plan_reduction("var", out, mean, x);
  if (plan.outputs == 0) return;
  if (compute_dtype(x.dtype) == Dtype::f32)
    run_reduction<true>("var", stream, reducer_for<float>(out, mean, plan.length, correction), plan,
                        x, workspace);
  else
    run_reduction<false>("var", stream, reducer_for<double>(out, mean, plan.length, correction),
                         plan, x, workspace);
}

}  // namespace mixtape::kernels::cuda
