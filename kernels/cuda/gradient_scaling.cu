// Unscaling, norms and clipping of gradients over a table of ranges, and the loss-scale state
// machine. Each pass reads every gradient once, 16 bytes at a time where a range is aligned.
//
// The norm adds squares in a fixed order, the same for aligned and unaligned ranges: float within a
// thread's share of a chunk (at most 32 elements), double from there on.
#include <cfloat>

#include "kernels/cuda/chunks.cuh"

namespace mixtape::kernels::cuda {
namespace {

constexpr float kClipEpsilon = 1e-6f;  // PyTorch's

/// Elements of T that a thread takes at a time.
template <class T>
inline constexpr int kTake = 16 / static_cast<int>(sizeof(T));

/// Elements first .. first + kTake - 1 of a chunk of `count`; 0 past its end.
template <class T>
__device__ __forceinline__ void load_some(const T* data, int first, int count, bool vector,
                                          compute_t<T> (&v)[kTake<T>]) {
  if constexpr (!std::is_same_v<T, double>) {
    if (vector && first + kTake<T> <= count) {
      unpack<T>(*reinterpret_cast<const uint4*>(data + first), v);
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kTake<T>; ++k)
    v[k] = first + k < count ? convert<compute_t<T>>(data[first + k]) : compute_t<T>(0);
}
template <class T>
__device__ __forceinline__ void store_some(T* data, int first, int count, bool vector,
                                           const compute_t<T> (&v)[kTake<T>]) {
  if constexpr (!std::is_same_v<T, double>) {
    if (vector && first + kTake<T> <= count) {
      store_vector(data + first, pack<T>(v));
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kTake<T>; ++k)
    if (first + k < count) data[first + k] = convert<T>(v[k]);
}

/// Calls f(T* data, count, vector) for the chunk's elements with their storage type.
template <class F>
__device__ __forceinline__ void with_chunk(const GradientRange& range, std::int64_t chunk, F&& f) {
  const Chunk piece = chunk_of(range, chunk);
  const bool vector = (reinterpret_cast<std::uintptr_t>(range.data) & 15) == 0;
  switch (range.dtype) {
    case Dtype::f16: f(static_cast<Half*>(range.data) + piece.start, piece.count, vector); break;
    case Dtype::bf16:
      f(static_cast<BFloat16*>(range.data) + piece.start, piece.count, vector);
      break;
    case Dtype::f64: f(static_cast<double*>(range.data) + piece.start, piece.count, vector); break;
    default: f(static_cast<float*>(range.data) + piece.start, piece.count, vector);
  }
}

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= FLT_MAX; }
__device__ __forceinline__ bool is_finite(double v) { return fabs(v) <= DBL_MAX; }

/// Multiplies one chunk in place (not at all by 1) and says whether all of this thread's values
/// were finite before that.
template <class T>
__device__ __forceinline__ bool scale_chunk(T* data, int count, bool vector, float factor) {
  constexpr int kAtOnce = 4, kStep = kChunkThreads * kTake<T>;
  bool finite = true;
  for (int first = threadIdx.x * kTake<T>; first < count; first += kAtOnce * kStep) {
    compute_t<T> v[kAtOnce][kTake<T>];
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) load_some(data, first + b * kStep, count, vector, v[b]);
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b)
#pragma unroll
      for (int k = 0; k < kTake<T>; ++k) {
        finite = finite && is_finite(v[b][k]);
        v[b][k] *= static_cast<compute_t<T>>(factor);
      }
    if (factor == 1.0f) continue;
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) store_some(data, first + b * kStep, count, vector, v[b]);
  }
  return finite;
}

__global__ void __launch_bounds__(kChunkThreads)
    gradient_unscale_kernel(const GradientRange* ranges, std::int64_t count, float* found_inf,
                            const float* inv_scale, float* per_range) {
  const std::int64_t chunk = blockIdx.x;
  const int index = find_entry(ranges, count, chunk);
  const float factor = inv_scale != nullptr ? *inv_scale : 1.0f;
  bool finite = true;
  with_chunk(ranges[index], chunk, [&](auto* data, int n, bool vector) {
    finite = scale_chunk(data, n, vector, factor);
  });
  if (!__syncthreads_or(!finite) || threadIdx.x != 0) return;
  *found_inf = 1.0f;  // every block that writes it writes the same
  if (per_range != nullptr) per_range[index] = 1.0f;
}

__global__ void __launch_bounds__(kChunkThreads)
    gradient_scale_kernel(const GradientRange* ranges, std::int64_t count, const float* factor) {
  const float f = *factor;
  if (f == 1.0f) return;
  const std::int64_t chunk = blockIdx.x;
  with_chunk(ranges[find_entry(ranges, count, chunk)], chunk,
             [&](auto* data, int n, bool vector) { scale_chunk(data, n, vector, f); });
}

/// Sum of squares of each chunk.
__global__ void __launch_bounds__(kChunkThreads)
    gradient_norm_partial_kernel(const GradientRange* ranges, std::int64_t count, double* partial) {
  const std::int64_t chunk = blockIdx.x;
  double sum = 0;
  with_chunk(ranges[find_entry(ranges, count, chunk)], chunk,
             [&]<class T>(const T* data, int n, bool vector) {
               constexpr int kAtOnce = 4, kStep = kChunkThreads * kTake<T>;
               compute_t<T> squares = 0;
               for (int first = threadIdx.x * kTake<T>; first < n; first += kAtOnce * kStep) {
                 compute_t<T> v[kAtOnce][kTake<T>];
#pragma unroll
                 for (int b = 0; b < kAtOnce; ++b)
                   load_some(data, first + b * kStep, n, vector, v[b]);
#pragma unroll
                 for (int b = 0; b < kAtOnce; ++b)
#pragma unroll
                   for (int k = 0; k < kTake<T>; ++k) squares += v[b][k] * v[b][k];
               }
               sum = static_cast<double>(squares);
             });
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[chunk] = sum;
}

/// *norm = sqrt of the sum of `chunks` partial sums, times *inv_scale. One block.
__global__ void __launch_bounds__(1024)
    gradient_norm_finish_kernel(const double* partial, std::int64_t chunks, float* norm,
                                const float* inv_scale) {
  double sum = 0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < chunks; i += blockDim.x) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0)
    *norm = static_cast<float>(sqrt(sum) *
                               (inv_scale != nullptr ? static_cast<double>(*inv_scale) : 1));
}

__global__ void clip_factor_kernel(float* factor, const float* norm, float max_norm) {
  const float f = max_norm / (*norm + kClipEpsilon);
  *factor = f > 1.0f ? 1.0f : f;
}

__global__ void scaler_update_kernel(ScalerState* state, ScalerPolicy policy) {
  ScalerState s = *state;
  if (s.found_inf != 0) {
    s.scale *= policy.backoff_factor;
    s.growth_tracker = 0;
    s.skipped_in_a_row += 1;
  } else {
    s.skipped_in_a_row = 0;
    s.growth_tracker += 1;
    if (s.growth_tracker >= static_cast<float>(policy.growth_interval)) {
      s.scale *= policy.growth_factor;
      s.growth_tracker = 0;
    }
  }
  s.scale = fminf(fmaxf(s.scale, policy.min_scale), policy.max_scale);
  s.inv_scale = 1.0f / s.scale;
  s.found_inf = 0;
  *state = s;
}

__global__ void set_scaler_kernel(ScalerState* target, ScalerState values) { *target = values; }

}  // namespace

void gradient_unscale(const Stream& stream, const GradientTable& table, float* found_inf,
                      const float* inv_scale, float* per_range) {
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  if (per_range != nullptr && table.count > 0)
    MT_CUDA_CHECK(cudaMemsetAsync(per_range, 0,
                                  static_cast<std::size_t>(table.count) * sizeof(float), queue));
  if (table.chunks == 0) return;
  launch(gradient_unscale_kernel, blocks_for(table.chunks, 1), kChunkThreads, 0, queue,
         table.device, table.count, found_inf, inv_scale, per_range);
}

void gradient_norm(const Stream& stream, const GradientTable& table, float* norm,
                   const float* inv_scale, Workspace workspace) {
  const std::size_t needed = static_cast<std::size_t>(table.chunks) * sizeof(double);
  MT_CHECK(workspace.bytes >= needed, "gradient_norm: expected a workspace of ", needed,
           " bytes, got ", workspace.bytes);
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  double* const partial = static_cast<double*>(workspace.data);
  if (table.chunks > 0)
    launch(gradient_norm_partial_kernel, blocks_for(table.chunks, 1), kChunkThreads, 0, queue,
           table.device, table.count, partial);
  launch(gradient_norm_finish_kernel, 1, 1024, 0, queue, partial, table.chunks, norm, inv_scale);
}

void clip_factor(const Stream& stream, float* factor, const float* norm, float max_norm) {
  const CudaDeviceGuard guard(stream.device());
  launch(clip_factor_kernel, 1, 1, 0, native_stream(stream), factor, norm, max_norm);
}

void gradient_scale(const Stream& stream, const GradientTable& table, const float* factor) {
  if (table.chunks == 0) return;
  const CudaDeviceGuard guard(stream.device());
  launch(gradient_scale_kernel, blocks_for(table.chunks, 1), kChunkThreads, 0,
         native_stream(stream), table.device, table.count, factor);
}

void scaler_update(const Stream& stream, ScalerState* state, const ScalerPolicy& policy) {
  const CudaDeviceGuard guard(stream.device());
  launch(scaler_update_kernel, 1, 1, 0, native_stream(stream), state, policy);
}

void set_scaler(const Stream& stream, ScalerState* target, const ScalerState& values) {
  const CudaDeviceGuard guard(stream.device());
  launch(set_scaler_kernel, 1, 1, 0, native_stream(stream), target, values);
}

}  // namespace mixtape::kernels::cuda
