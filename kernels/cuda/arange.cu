#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/elementwise.h"

namespace mixtape::kernels::cuda {

namespace {

constexpr int kThreads = 256, kItems = 4;

/// C is double (fused, as the CPU's) or int64.
template <class C>
__global__ void __launch_bounds__(kThreads)
    arange_kernel(void* out, Dtype dtype, C start, C step, std::int64_t n) {
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads * kItems) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= n) return;
    if constexpr (std::is_same_v<C, double>)
      store_as(out, dtype, i, fma(static_cast<double>(i), step, start));
    else
      store_as(out, dtype, i, start + i * step);
  }
}

}  // namespace

void arange(const Stream& stream, View out, Scalar start, Scalar step) {
  const std::int64_t n = out.numel();
  if (n == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const dim3 grid(blocks_for(n, kThreads * kItems)), block(kThreads);
  const bool real =
      is_floating(out.dtype) || start.kind() == Dtype::f64 || step.kind() == Dtype::f64;
  if (real)
    launch(arange_kernel<double>, grid, block, 0, native_stream(stream), out.data, out.dtype,
           start.to<double>(), step.to<double>(), n);
  else
    launch(arange_kernel<std::int64_t>, grid, block, 0, native_stream(stream), out.data, out.dtype,
           start.to<std::int64_t>(), step.to<std::int64_t>(), n);
}

}  // namespace mixtape::kernels::cuda
