// A float whose transcendental functions are short and of about 20 bits, for results that are
// stored in 16 bits: with the library's functions an activation of a 16-bit tensor would be bound
// by arithmetic, not by memory. It is an instance of T for elementwise_functors.h, so this header
// has to be included before that one. Which functors use it: kApproximate in
// elementwise_formulas.cuh.
//
// Errors before the final rounding: exp 2^-22 |x| relative; log and tanh 2^-20 relative; erf 2^-23
// absolute (1 + erf(x), as GELU needs it); a / b 2 ulp, 0 where |b| >= 2^126.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/approx_functions.cuh"

namespace mixtape::kernels::cuda {

struct Approx {
  float v;
  Approx() = default;
  __device__ explicit Approx(float x) : v(x) {}
};

__device__ __forceinline__ Approx operator+(Approx a, Approx b) { return Approx(a.v + b.v); }
__device__ __forceinline__ Approx operator-(Approx a, Approx b) { return Approx(a.v - b.v); }
__device__ __forceinline__ Approx operator*(Approx a, Approx b) { return Approx(a.v * b.v); }
__device__ __forceinline__ Approx operator-(Approx a) { return Approx(-a.v); }
__device__ __forceinline__ Approx operator/(Approx a, Approx b) {
  return Approx(a.v * approx_reciprocal(b.v));
}

}  // namespace mixtape::kernels::cuda

namespace mixtape::math {

using kernels::cuda::Approx;

__device__ __forceinline__ Approx constant(Approx, double value) {
  return Approx(static_cast<float>(value));
}
__device__ __forceinline__ Approx select(bool mask, Approx a, Approx b) { return mask ? a : b; }
__device__ __forceinline__ bool gt(Approx a, Approx b) { return a.v > b.v; }
__device__ __forceinline__ bool lt(Approx a, Approx b) { return a.v < b.v; }
__device__ __forceinline__ bool eq(Approx a, Approx b) { return a.v == b.v; }

__device__ __forceinline__ Approx exp(Approx x) {
  return Approx(kernels::cuda::approx_exp2(x.v * 1.44269504f));
}
/// Where x is within 1/4 of 1 a minimax polynomial of log1p, else from the hardware's log2.
__device__ __forceinline__ Approx log(Approx x) {
  const float far = kernels::cuda::approx_log2(x.v);
  const float f = x.v - 1.0f;
  float p = fmaf(f, 1.573355517e-1f, -1.811953822e-1f);
  p = fmaf(p, f, 1.994536696e-1f);
  p = fmaf(p, f, -2.495403971e-1f);
  p = fmaf(p, f, 3.333392335e-1f);
  p = fmaf(p, f, -5.000035470e-1f);
  const float near = fmaf(f * f, p, f);
  return Approx(fabsf(f) < 0.25f ? near : far * 0.693147181f);
}
/// Where |x| < 0.2 a Taylor polynomial, else 1 - 2 / (1 + exp(2x)).
__device__ __forceinline__ Approx tanh(Approx x) {
  const float e = kernels::cuda::approx_exp2(x.v * 2.88539008f);
  const float large = fmaf(-2.0f, kernels::cuda::approx_reciprocal(1.0f + e), 1.0f);
  const float z = x.v * x.v;
  const float p = fmaf(fmaf(z, -5.3968254e-2f, 1.33333333e-1f), z, -3.33333333e-1f);
  const float small = fmaf(p * z, x.v, x.v);
  return Approx(fabsf(x.v) < 0.2f ? small : large);
}
/// 1 - 2^q(|x|) with q a minimax fit of log2(erfc) on [0, 4], weighted by erfc.
__device__ __forceinline__ Approx erf(Approx x) {
  const float z = kernels::cuda::min_nan(fabsf(x.v), 4.0f);
  float q = fmaf(z, -4.53543316017e-5f, 4.45475602443e-4f);
  q = fmaf(q, z, -1.48934996745e-3f);
  q = fmaf(q, z, -7.74755343002e-4f);
  q = fmaf(q, z, 2.82537651578e-2f);
  q = fmaf(q, z, -1.48481637102e-1f);
  q = fmaf(q, z, -9.18416394816e-1f);
  q = fmaf(q, z, -1.62790859216f);
  const float magnitude = 1.0f - kernels::cuda::approx_exp2(q * z);
  return Approx(copysignf(magnitude, x.v));
}
/// 2^(b log2 |a|) with the sign and the special cases of C's pow, except that pow(1, NaN) is NaN.
__device__ __forceinline__ Approx pow(Approx a, Approx b) {
  const float magnitude = fabsf(a.v);
  const float log2 = log(Approx(magnitude)).v * 1.44269504f;
  float r = kernels::cuda::approx_exp2(b.v * log2);
  if (b.v == 0.0f || (magnitude == 1.0f && b.v == b.v)) r = 1.0f;  // not 0 * inf
  if (a.v <= 0.0f) {
    const float half = b.v * 0.5f;
    const bool integer = truncf(b.v) == b.v, odd = integer && truncf(half) != half;
    if (odd && signbit(a.v)) r = -r;
    if (!integer && a.v < 0.0f && magnitude < INFINITY) r = NAN;
  }
  return Approx(r);
}

}  // namespace mixtape::math
