// Backward of softmax and log-softmax: y and dy are read once, dx is written once. Rows are divided
// as in softmax_forward.cu: among lanes, a block, or a cluster of blocks.
#include "kernels/cuda/online_softmax.cuh"
#include "kernels/cuda/row_cluster.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/softmax.h"

namespace mixtape::kernels::cuda {
namespace {

/// What a row contributes: sum(dy * y), or for the log form sum(dy), and whether any probability is
/// above 0 (then live is): a row without one, fully masked, has gradient 0 whatever dy is.
template <class C>
struct RowDot {
  C sum = 0, live = 0;

  __device__ __forceinline__ void add(C dy, C y, bool log) {
    sum += log ? dy : dy * y;
    if (y != (log ? C(-INFINITY) : C(0))) live = 1;
  }
};
template <class T, class C>
__device__ __forceinline__ C softmax_gradient(C dy, C y, const RowDot<C>& dot, bool log) {
  if (dot.live == C(0)) return C(0);
  if (!log) return y * (dy - dot.sum);
  if constexpr (std::is_same_v<C, float>)
    return dy - exp_for<T>(y) * dot.sum;
  else
    return dy - exp_of(y) * dot.sum;
}

template <class T, bool kVector, int kUnits, int kRows>
__global__ void __launch_bounds__(kGroupThreads)
    softmax_backward_warp_kernel(T* __restrict__ dx, const T* __restrict__ dy,
                                 const T* __restrict__ y, std::int64_t rows, int units, int group,
                                 bool log) {
  constexpr int kWidth = kUnitWidth<T, kVector>;
  const int lane = threadIdx.x & (group - 1), groups = kGroupThreads / group;
  const std::int64_t columns = static_cast<std::int64_t>(units) * kWidth;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * groups * kRows + threadIdx.x / group;
  Unit<T, kVector> y_unit[kRows][kUnits], dy_unit[kRows][kUnits];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      if (first + r * groups < rows && lane + i * group < units) {
        const std::int64_t base = (first + r * groups) * columns;
        y_unit[r][i] = load_unit<T, kVector>(y + base, lane + i * group);
        dy_unit[r][i] = load_unit<T, kVector>(dy + base, lane + i * group);
      }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t row = first + r * groups;
    RowDot<float> dot;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (row >= rows || lane + i * group >= units) continue;
      float vy[kWidth], vdy[kWidth];
      unpack<T>(y_unit[r][i], vy);
      unpack<T>(dy_unit[r][i], vdy);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) dot.add(vdy[k], vy[k], log);
    }
    dot.sum = warp_reduce(dot.sum, Sum{}, group);
    dot.live = warp_reduce(dot.live, Max{}, group);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (row >= rows || lane + i * group >= units) continue;
      float vy[kWidth], vdy[kWidth];
      unpack<T>(y_unit[r][i], vy);
      unpack<T>(dy_unit[r][i], vdy);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) vdy[k] = softmax_gradient<T>(vdy[k], vy[k], dot, log);
      store_unit<T, kVector>(dx + row * columns, lane + i * group, pack<T>(vdy));
    }
  }
}

/// One row a block; the first `cached` vectors of y and of dy stay in shared memory, and each
/// thread's last one in its registers. All pointers are equal modulo 16.
template <class T>
__global__ void __launch_bounds__(1024)
    softmax_backward_block_kernel(T* __restrict__ dx, const T* __restrict__ dy,
                                  const T* __restrict__ y, int columns, int cached, bool log) {
  constexpr int kWidth = kUnitWidth<T, true>;
  extern __shared__ uint4 cache[];
  __shared__ float scratch[2 * kWarp];
  uint4* const y_cache = cache;
  uint4* const dy_cache = cache + cached;
  const std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * columns;
  const RowParts parts = split_row(y + base, columns);
  const T* const y_body = y + base + parts.head;
  const T* const dy_body = dy + base + parts.head;
  const int edge = parts.edge_column(threadIdx.x);

  const int step = static_cast<int>(blockDim.x);
  RowDot<float> dot;
  uint4 y_last, dy_last;
  float edge_y = 0, edge_dy = 0;
  if (edge >= 0) {
    edge_y = static_cast<float>(y[base + edge]);
    edge_dy = static_cast<float>(dy[base + edge]);
    dot.add(edge_dy, edge_y, log);
  }
  for (int first = threadIdx.x; first < parts.units; first += kBatch * step) {
    uint4 y_unit[kBatch], dy_unit[kBatch];
    load_batch(y_unit, y_body, first, parts.units);
    load_batch(dy_unit, dy_body, first, parts.units);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int u = first + b * step;
      if (u >= parts.units) continue;
      if (u + step >= parts.units) {
        y_last = y_unit[b];
        dy_last = dy_unit[b];
      } else if (u < cached) {
        y_cache[u] = y_unit[b];
        dy_cache[u] = dy_unit[b];
      }
      float vy[kWidth], vdy[kWidth];
      unpack<T>(y_unit[b], vy);
      unpack<T>(dy_unit[b], vdy);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) dot.add(vdy[k], vy[k], log);
    }
  }
  float sums[2] = {dot.sum, dot.live};
  block_sums(sums, scratch);
  dot = {sums[0], sums[1]};

  for (int u = threadIdx.x; u < parts.units; u += step) {
    uint4 y_unit = y_last, dy_unit = dy_last;
    if (u + step < parts.units) {
      y_unit = u < cached ? y_cache[u] : load_unit<T, true>(y_body, u);
      dy_unit = u < cached ? dy_cache[u] : load_unit<T, true>(dy_body, u);
    }
    float vy[kWidth], vdy[kWidth];
    unpack<T>(y_unit, vy);
    unpack<T>(dy_unit, vdy);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) vdy[k] = softmax_gradient<T>(vdy[k], vy[k], dot, log);
    store_unit<T, true>(dx + base + parts.head, u, pack<T>(vdy));
  }
  if (edge >= 0) dx[base + edge] = T(softmax_gradient<T>(edge_dy, edge_y, dot, log));
}

/// One row a cluster; each thread keeps up to `held` units of y and of dy in shared memory, which
/// it alone reads. All three operands have the same address modulo 16.
template <class T>
__global__ void __launch_bounds__(kClusterThreads)
    softmax_backward_cluster_kernel(T* __restrict__ dx, const T* __restrict__ dy,
                                    const T* __restrict__ y, int columns, bool log, int held) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kWidth = kUnitWidth<T, true>;
  extern __shared__ uint4 cache[];
  __shared__ float scratch[2 * kWarp];
  __shared__ float2 dots[kMaxCluster];  // of the cluster's blocks: sum and live
  const RowCluster cluster;
  uint4* const y_cache = cache + threadIdx.x;
  uint4* const dy_cache = y_cache + held * kClusterThreads;
  const std::int64_t base = cluster.row * columns;
  const RowParts parts = split_row(y + base, columns);
  const std::int64_t body = base + parts.head;
  const int edge = parts.edge_column(cluster.thread);

  cluster.for_units(parts.units, held, [&](int u, int i) {
    fetch_unit<T, true>(y_cache + i * kClusterThreads, y + body + u * kWidth);
    fetch_unit<T, true>(dy_cache + i * kClusterThreads, dy + body + u * kWidth);
  });
  commit_fetches();
  RowDot<float> dot;
  float edge_y = 0, edge_dy = 0;
  if (edge >= 0) {
    edge_y = static_cast<float>(y[base + edge]);
    edge_dy = static_cast<float>(dy[base + edge]);
    dot.add(edge_dy, edge_y, log);
  }
  wait_for_fetches(0);
  cluster.for_units(parts.units, held, [&](int, int i) {
    float vy[kWidth], vdy[kWidth];
    unpack<T>(y_cache[i * kClusterThreads], vy);
    unpack<T>(dy_cache[i * kClusterThreads], vdy);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) dot.add(vdy[k], vy[k], log);
  });
  float sums[2] = {dot.sum, dot.live};
  block_sums(sums, scratch);
  cluster.exchange(dots, make_float2(sums[0], sums[1]));
  dot = {};
  for (int b = 0; b < cluster.blocks; ++b) {
    dot.sum += dots[b].x;
    dot.live += dots[b].y;
  }

  cluster.for_units(parts.units, held, [&](int u, int i) {
    float vy[kWidth], vdy[kWidth];
    unpack<T>(y_cache[i * kClusterThreads], vy);
    unpack<T>(dy_cache[i * kClusterThreads], vdy);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) vdy[k] = softmax_gradient<T>(vdy[k], vy[k], dot, log);
    store_unit<T, true>(dx + body, u, pack<T>(vdy));
  });
  if (edge >= 0) dx[base + edge] = T(softmax_gradient<T>(edge_dy, edge_y, dot, log));
#endif
}

template <class C>
__global__ void softmax_backward_any_dtype_kernel(AnyRows dx, AnyRows dy, AnyRows y,
                                                  std::int64_t rows, std::int64_t columns,
                                                  bool log) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    RowDot<C> dot;
    for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x)
      dot.add(dy.load<C>(row, c), y.load<C>(row, c), log);
    dot.sum = block_reduce(dot.sum, C(0), Sum{});
    dot.live = block_reduce(dot.live, C(0), Max{});
    for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x)
      dx.store(row, c, softmax_gradient<C>(dy.load<C>(row, c), y.load<C>(row, c), dot, log));
  }
}

template <class T>
struct Operands {
  T* dx;
  const T* dy;
  const T* y;
};

template <class T, bool kVector, int kUnits>
void launch_warp(cudaStream_t stream, Operands<T> o, RowShape shape, bool log) {
  constexpr int kBytes = kUnits * static_cast<int>(sizeof(Unit<T, kVector>));
  constexpr int kRows = kBytes >= 16 ? 1 : kBytes >= 8 ? 2 : 4;
  const int units = static_cast<int>(shape.columns) / kUnitWidth<T, kVector>;
  const int group = group_size(units);
  const unsigned blocks = blocks_for(shape.rows, kGroupThreads / group * kRows);
  softmax_backward_warp_kernel<T, kVector, kUnits, kRows>
      <<<blocks, kGroupThreads, 0, stream>>>(o.dx, o.dy, o.y, shape.rows, units, group, log);
}

template <class T>
void launch_rows(cudaStream_t stream, Operands<T> o, RowShape shape, bool log) {
  if (shape.columns > kWarpColumns) {
    const int columns = static_cast<int>(shape.columns);
    if (launch_clusters<softmax_backward_cluster_kernel<T>, T>(stream, shape, 2, o.dx, o.dy, o.y,
                                                               columns, log))
      return;
    const BlockShape block = block_shape<T>(softmax_backward_block_kernel<T>, columns, 2, true);
    softmax_backward_block_kernel<T>
        <<<static_cast<unsigned>(shape.rows), block.threads, block.shared_bytes, stream>>>(
            o.dx, o.dy, o.y, columns, block.cached_units, log);
    return;
  }
  dispatch_units<T>(shape.columns, aligned(o.dx, 16) && aligned(o.dy, 16) && aligned(o.y, 16),
                    [&](auto vector, auto units) {
                      launch_warp<T, decltype(vector)::value, decltype(units)::value>(stream, o,
                                                                                      shape, log);
                    });
}

}  // namespace

void softmax_backward(const Stream& stream, bool log, View dx, View dy, View y) {
  const RowShape shape = row_shape("softmax_backward", y);
  check_rows("softmax_backward", "y", y, shape);
  check_rows("softmax_backward", "dy", dy, shape);
  check_rows("softmax_backward", "dx", dx, shape);
  if (y.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  const bool typed = y.dtype == dy.dtype && y.dtype == dx.dtype && all_contiguous(dx, dy, y) &&
                     fits_row_kernels(shape, y, dy) && fits_row_kernels(shape, y, dx) &&
                     dispatch_row_type(y.dtype, [&](auto tag) {
                       using T = typename decltype(tag)::type;
                       launch_rows<T>(queue, {dx.ptr<T>(), dy.ptr<T>(), y.ptr<T>()}, shape, log);
                     });
  if (!typed) {
    const RowGrid grid = any_dtype_grid(shape);
    const auto run = [&](auto* kernel) {
      kernel<<<grid.blocks, grid.threads, 0, queue>>>(AnyRows(dx), AnyRows(dy), AnyRows(y),
                                                      shape.rows, shape.columns, log);
    };
    if (dx.dtype == Dtype::f64 || dy.dtype == Dtype::f64 || y.dtype == Dtype::f64)
      run(softmax_backward_any_dtype_kernel<double>);
    else
      run(softmax_backward_any_dtype_kernel<float>);
  }
  MT_CUDA_CHECK_LAUNCH();
}

}  // namespace mixtape::kernels::cuda
