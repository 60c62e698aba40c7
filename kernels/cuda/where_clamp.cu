// Selection by a condition and by bounds. Formulas whose parameters are numbers carry them in each
// arithmetic type, converted on the host.
#include <algorithm>
#include <limits>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/elementwise_formulas.cuh"

namespace mixtape::kernels::cuda {

namespace {

struct Bounds {
  float lo_f32, hi_f32;
  double lo_f64, hi_f64;
  std::int64_t lo_i64, hi_i64;

  Bounds(const Scalar& lo, const Scalar& hi)
      : lo_f32(lo.to<float>()),
        hi_f32(hi.to<float>()),
        lo_f64(lo.to<double>()),
        hi_f64(hi.to<double>()),
        lo_i64(integer(lo, /*up=*/true)),
        hi_i64(integer(hi, /*up=*/false)) {}

  /// The nearest integer inside the bound; infinities saturate.
  static std::int64_t integer(const Scalar& s, bool up) {
    if (s.kind() != Dtype::f64) return s.to<std::int64_t>();
    const double v = up ? std::ceil(s.to<double>()) : std::floor(s.to<double>());
    if (v >= 0x1p63) return std::numeric_limits<std::int64_t>::max();
    if (v <= -0x1p63) return std::numeric_limits<std::int64_t>::min();
    return static_cast<std::int64_t>(v);
  }
  template <class C>
  __device__ __forceinline__ C lo() const {
    if constexpr (std::is_same_v<C, float>) return lo_f32;
    if constexpr (std::is_same_v<C, double>) return lo_f64;
    if constexpr (std::is_same_v<C, std::int64_t>) return lo_i64;
  }
  template <class C>
  __device__ __forceinline__ C hi() const {
    if constexpr (std::is_same_v<C, float>) return hi_f32;
    if constexpr (std::is_same_v<C, double>) return hi_f64;
    if constexpr (std::is_same_v<C, std::int64_t>) return hi_i64;
  }
};

struct Where {  // (condition, a, b); never contiguous with one dtype
  static constexpr int kInputs = 3;
  static constexpr bool kIntegral = true;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[3]) const {
    return x[0] != C(0) ? x[1] : x[2];
  }
};

struct ClampForward {
  static constexpr int kInputs = 1;
  static constexpr bool kIntegral = true;
  Bounds bounds;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[1]) const {
    return math::minimum(math::maximum(x[0], bounds.lo<C>()), bounds.hi<C>());
  }
};

struct ClampBackward {  // (dy, x)
  static constexpr int kInputs = 2;
  static constexpr bool kIntegral = false;
  Bounds bounds;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[2]) const {
    return x[1] >= bounds.lo<C>() && x[1] <= bounds.hi<C>() ? x[0] : C(0);
  }
};

}  // namespace

void where(const Stream& stream, Dtype compute, View out, View condition, const Operand& a,
           const Operand& b) {
  const Operand in[3] = {condition, a, b};
  elementwise<false>(stream, "where", compute, Where{}, out, in);
}

void clamp(const Stream& stream, Dtype compute, View out, View x, Scalar lo, Scalar hi) {
  const Operand in[1] = {x};
  elementwise(stream, "clamp", compute, ClampForward{Bounds(lo, hi)}, out, in);
}

void clamp_backward(const Stream& stream, View dx, View dy, View x, Scalar lo, Scalar hi) {
  const bool wide = dx.dtype == Dtype::f64 || dy.dtype == Dtype::f64 || x.dtype == Dtype::f64;
  const Operand in[2] = {dy, x};
  elementwise(stream, "clamp_backward", wide ? Dtype::f64 : Dtype::f32,
              ClampBackward{Bounds(lo, hi)}, dx, in);
}

}  // namespace mixtape::kernels::cuda
