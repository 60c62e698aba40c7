// The hardware's approximate functions, by the PTX instruction that each is.
#pragma once

#include <cuda_runtime.h>

namespace mixtape::kernels::cuda {

/// 1 / x to 1 ulp; subnormal x and results flush to zero.
__device__ __forceinline__ float approx_reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
/// 2^x to 2 ulp; subnormal results flush to zero.
__device__ __forceinline__ float approx_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
/// log2(x) to 2^-22, absolute for x in [0.5, 2] and relative outside.
__device__ __forceinline__ float approx_log2(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
/// The smaller; NaN where either is NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

}  // namespace mixtape::kernels::cuda
