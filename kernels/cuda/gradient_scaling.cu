// Loss-scaling and clipping kernels on CUDA: unscale and look for inf and NaN, norm, scale, and the
// GradScaler's state machine. Norms sum in double, per chunk and then in one block in a fixed tree.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/chunks.cuh"
#include "kernels/optimizer_math.h"

namespace mixtape::kernels::cuda {
namespace {

cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.native()); }

/// Calls f(value) -> new value on the elements of one chunk and writes back if kWrite.
template <bool kWrite, class F>
__device__ __forceinline__ void for_chunk(const GradientRange& r, std::int64_t start, F&& f) {
  const std::int64_t count = min(kChunk, r.numel - start);
  const bool four = fits_four(r.data, r.dtype);
  const std::int64_t whole = four ? count / 4 * 4 : 0;
#pragma unroll 4
  for (std::int64_t k = 4 * threadIdx.x; k < whole; k += 4 * kChunkThreads) {
    float4 v = load4(r.data, r.dtype, start + k);
    v.x = f(v.x);
    v.y = f(v.y);
    v.z = f(v.z);
    v.w = f(v.w);
    if (kWrite) store4(r.data, r.dtype, start + k, v);
  }
  for (std::int64_t k = whole + threadIdx.x; k < count; k += kChunkThreads) {
    if (r.dtype == Dtype::f64) {
      double* p = static_cast<double*>(r.data) + start + k;
      const double v = f(*p);
      if (kWrite) *p = v;
    } else {
      const float v = f(load_as<float>(r.data, r.dtype, start + k));
      if (kWrite) store_as<float>(r.data, r.dtype, start + k, v);
    }
  }
}

template <bool kWrite>
__global__ void __launch_bounds__(kChunkThreads)
    gradient_unscale_kernel(const GradientRange* ranges, std::int64_t count, float* found_inf,
                            const float* inv_scale, float* per_range) {
  const std::int64_t chunk = blockIdx.x, index = entry_of_chunk(ranges, count, chunk);
  const GradientRange r = ranges[index];
  const float factor = kWrite ? *inv_scale : 1.0f;
  int bad = 0;
  for_chunk<kWrite>(r, (chunk - r.first_chunk) * kChunk, [&](auto v) {
    bad |= v - v != 0;  // inf - inf is NaN
    return v * factor;
  });
  if (!__syncthreads_or(bad) || threadIdx.x != 0) return;
  *found_inf = 1.0f;  // blocks that find one all write the same
  if (per_range != nullptr) per_range[index] = 1.0f;
}

__global__ void __launch_bounds__(kChunkThreads)
    gradient_scale_kernel(const GradientRange* ranges, std::int64_t count, const float* factor) {
  const std::int64_t chunk = blockIdx.x;
  const GradientRange r = ranges[entry_of_chunk(ranges, count, chunk)];
  const float by = *factor;
  if (by == 1.0f) return;
  for_chunk<true>(r, (chunk - r.first_chunk) * kChunk, [&](auto v) { return v * by; });
}

__global__ void __launch_bounds__(kChunkThreads)
    sum_of_squares_kernel(const GradientRange* ranges, std::int64_t count, double* partial) {
  const std::int64_t chunk = blockIdx.x;
  const GradientRange r = ranges[entry_of_chunk(ranges, count, chunk)];
  double total = 0;
  for_chunk<false>(r, (chunk - r.first_chunk) * kChunk, [&](auto v) {
    total += static_cast<double>(v) * static_cast<double>(v);
    return v;
  });
  total = block_sum(total);
  if (threadIdx.x == 0) partial[chunk] = total;
}

__global__ void gradient_norm_kernel(const double* partial, std::int64_t chunks,
                                     const float* inv_scale, float* norm) {
  double total = 0;
  for (std::int64_t i = threadIdx.x; i < chunks; i += blockDim.x) total += partial[i];
  total = block_sum(total);
  if (threadIdx.x == 0) {
    *norm = static_cast<float>(sqrt(total) * (inv_scale != nullptr ? *inv_scale : 1.0f));
  }
}

__global__ void clip_factor_kernel(float* factor, const float* norm, float max_norm) {
  *factor = optimizer_math::clip_factor(*norm, max_norm);
}

__global__ void scaler_update_kernel(ScalerState* state, ScalerPolicy policy) {
  *state = optimizer_math::next_scaler_state(*state, policy);
}

template <class T>
__global__ void set_value_kernel(T* target, T value) {
  *target = value;
}

}  // namespace

void gradient_unscale(const Stream& stream, const GradientTable& table, float* found_inf,
                      const float* inv_scale, float* per_range) {
  const CudaDeviceGuard guard(stream.device());
  if (per_range != nullptr && table.count > 0) {
    MT_CUDA_CHECK(cudaMemsetAsync(
        per_range, 0, static_cast<std::size_t>(table.count) * sizeof(float), native(stream)));
  }
  if (table.chunks == 0) return;
  launch(inv_scale != nullptr ? gradient_unscale_kernel<true> : gradient_unscale_kernel<false>,
         dim3(blocks_for(table.chunks, 1)), dim3(kChunkThreads), 0, native(stream), table.device,
         table.count, found_inf, inv_scale, per_range);
}

void gradient_norm(const Stream& stream, const GradientTable& table, float* norm,
                   const float* inv_scale, Workspace workspace) {
  MT_CHECK(workspace.bytes >= static_cast<std::size_t>(table.chunks) * sizeof(double),
           "gradient_norm: expected a workspace of ", table.chunks * sizeof(double), " bytes, got ",
           workspace.bytes);
  const CudaDeviceGuard guard(stream.device());
  double* partial = static_cast<double*>(workspace.data);
  if (table.chunks > 0) {
    launch(sum_of_squares_kernel, dim3(blocks_for(table.chunks, 1)), dim3(kChunkThreads), 0,
           native(stream), table.device, table.count, partial);
  }
  launch(gradient_norm_kernel, dim3(1), dim3(1024), 0, native(stream), partial, table.chunks,
         inv_scale, norm);
}

void clip_factor(const Stream& stream, float* factor, const float* norm, float max_norm) {
  const CudaDeviceGuard guard(stream.device());
  launch(clip_factor_kernel, dim3(1), dim3(1), 0, native(stream), factor, norm, max_norm);
}

void gradient_scale(const Stream& stream, const GradientTable& table, const float* factor) {
  if (table.chunks == 0) return;
  const CudaDeviceGuard guard(stream.device());
  launch(gradient_scale_kernel, dim3(blocks_for(table.chunks, 1)), dim3(kChunkThreads), 0,
         native(stream), table.device, table.count, factor);
}

void scaler_update(const Stream& stream, ScalerState* state, const ScalerPolicy& policy) {
  const CudaDeviceGuard guard(stream.device());
  launch(scaler_update_kernel, dim3(1), dim3(1), 0, native(stream), state, policy);
}

void set_scalars(const Stream& stream, OptimizerScalars* target, const OptimizerScalars& values) {
  const CudaDeviceGuard guard(stream.device());
  launch(set_value_kernel<OptimizerScalars>, dim3(1), dim3(1), 0, native(stream), target, values);
}

void set_scaler(const Stream& stream, ScalerState* target, const ScalerState& values) {
  const CudaDeviceGuard guard(stream.device());
  launch(set_value_kernel<ScalerState>, dim3(1), dim3(1), 0, native(stream), target, values);
}

}  // namespace mixtape::kernels::cuda
