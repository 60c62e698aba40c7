#include "kernels/cuda/column_sums.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kLanes = 32, kGroups = 32;

struct Sums {
  void* out;
  std::int64_t out_stride, columns, chunks;
  Dtype out_dtype;
  float beta;
};

/// 32 columns a block; each of 32 groups adds every 32nd chunk, then one adds the groups.
template <class C>
__global__ void column_sums_kernel(Sums x, const C* partials) {
  __shared__ C shared[kGroups][kLanes + 1];
  const std::int64_t column = std::int64_t{blockIdx.x} * kLanes + threadIdx.x;
  C sum = 0;
  if (column < x.columns) {
#pragma unroll 4
    for (std::int64_t chunk = threadIdx.y; chunk < x.chunks; chunk += kGroups)
      sum += partials[chunk * x.columns + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= x.columns) return;
  sum = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) sum += shared[g][threadIdx.x];
  const std::int64_t i = column * x.out_stride;
  if (x.beta != 0) sum += static_cast<C>(x.beta) * load_as<C>(x.out, x.out_dtype, i);
  store_as(x.out, x.out_dtype, i, sum);
}

}  // namespace

void column_sums(const Stream& stream, View out, float beta, const void* partials, bool is_double,
                 std::int64_t chunks) {
  const Sums x{out.data, out.stride(0), out.size(0), chunks, out.dtype, beta};
  const unsigned blocks = blocks_for(x.columns, kLanes);
  const dim3 threads(kLanes, kGroups);
  if (is_double)
    launch(column_sums_kernel<double>, blocks, threads, 0, native_stream(stream), x,
           static_cast<const double*>(partials));
  else
    launch(column_sums_kernel<float>, blocks, threads, 0, native_stream(stream), x,
           static_cast<const float*>(partials));
}

}  // namespace mixtape::kernels::cuda
