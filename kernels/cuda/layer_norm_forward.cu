// Layer normalisation: x (and the residual) are read once, y (and the sum) written once.
//
// Up to 1024 columns a group of lanes keeps its row in registers; a longer row takes a block, which
// keeps it in shared memory and reads again only what does not fit. The mean is found in two steps:
// m, a rounded mean, and c, the mean of x - m, which is all that rounding took away; so rows whose
// mean is a million times their deviation come out to full precision. f64, mixed dtypes and unusual
// weights take a plain kernel. Reductions are trees of fixed shape: deterministic.
#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"

namespace mixtape::kernels::cuda {
namespace {

template <class T, class W>
struct Operands {
  T *y, *sum;          // (N, C); sum is null without a residual
  float *mean, *rstd;  // (N); null if not wanted
  const T *x, *residual;
  const W *weight, *bias;  // (C); null if absent
  std::int64_t rows;
  float eps;
};

/// A row's mean (first + correction) and 1 / sqrt(variance + eps).
template <class C>
struct Statistics {
  C first, correction, rstd;

  /// From the sums of d = x - first and of d * d. Variance that is NaN stays NaN.
  __device__ __forceinline__ void finish(C sum_d, C sum_d2, C columns, C eps) {
    correction = sum_d / columns;
    const C variance = sum_d2 / columns - correction * correction;
    rstd = C(1) / sqrt((variance < C(0) ? C(0) : variance) + eps);
  }
  __device__ __forceinline__ C normalise(C x) const { return ((x - first) - correction) * rstd; }
};

template <class T, class W>
__device__ __forceinline__ void store_statistics(const Operands<T, W>& o, std::int64_t row,
                                                 const Statistics<float>& s) {
  if (o.mean != nullptr) o.mean[row] = s.first + s.correction;
  if (o.rstd != nullptr) o.rstd[row] = s.rstd;
}

/// Adds the residual's unit to x's, rounded to T, and stores the sum.
template <class T, bool kVector>
__device__ __forceinline__ Unit<T, kVector> add_units(const Unit<T, kVector>& x,
                                                      const Unit<T, kVector>& residual) {
  constexpr int kWidth = kUnitWidth<T, kVector>;
  float a[kWidth], b[kWidth];
  unpack<T>(x, a);
  unpack<T>(residual, b);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) a[k] += b[k];
  return pack<T>(a);
}

/// Weight and bias of one unit; 1 and 0 where absent.
template <class W, bool kVector, int kWidth>
struct Affine {
  float weight[kWidth], bias[kWidth];

  __device__ __forceinline__ Affine(const W* w, const W* b, int unit) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      weight[k] = 1;
      bias[k] = 0;
    }
    if (w != nullptr) read_floats<W, kVector>(w, unit * kWidth, weight);
    if (b != nullptr) read_floats<W, kVector>(b, unit * kWidth, bias);
  }
};

template <class T, class W, bool kVector, int kUnits, int kRows>
__global__ void __launch_bounds__(kGroupThreads)
    layer_norm_forward_warp_kernel(Operands<T, W> o, int units, int group) {
  constexpr int kWidth = kUnitWidth<T, kVector>;
  const int lane = threadIdx.x & (group - 1), groups = kGroupThreads / group;
  const int columns = units * kWidth;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * groups * kRows + threadIdx.x / group;
  Unit<T, kVector> unit[kRows][kUnits];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t row = first + r * groups;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      if (row < o.rows && lane + i * group < units)
        unit[r][i] = read_unit<T, kVector>(o.x + row * columns, lane + i * group);
  }
  if (o.residual != nullptr) {
    Unit<T, kVector> other[kRows][kUnits];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * groups;
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        if (row < o.rows && lane + i * group < units)
          other[r][i] = read_unit<T, kVector>(o.residual + row * columns, lane + i * group);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * groups;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (row >= o.rows || lane + i * group >= units) continue;
        unit[r][i] = add_units<T, kVector>(unit[r][i], other[r][i]);
        store_unit<T, kVector>(o.sum + row * columns, lane + i * group, unit[r][i]);
      }
    }
  }

  Statistics<float> s[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool in_range = first + r * groups < o.rows;
    float v[kUnits][kWidth], sum = 0, sum_d = 0, sum_d2 = 0;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!in_range || lane + i * group >= units) continue;
      unpack<T>(unit[r][i], v[i]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum += v[i][k];
    }
    s[r].first = warp_reduce(sum, Sum{}, group) / static_cast<float>(columns);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!in_range || lane + i * group >= units) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float d = v[i][k] - s[r].first;
        sum_d += d;
        sum_d2 += d * d;
      }
    }
    s[r].finish(warp_reduce(sum_d, Sum{}, group), warp_reduce(sum_d2, Sum{}, group),
                static_cast<float>(columns), o.eps);
    if (lane == 0 && in_range) store_statistics(o, first + r * groups, s[r]);
  }

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int u = lane + i * group;
    if (u >= units) continue;
    const Affine<W, kVector, kWidth> affine(o.weight, o.bias, u);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = first + r * groups;
      if (row >= o.rows) continue;
      float v[kWidth];
      unpack<T>(unit[r][i], v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        v[k] = s[r].normalise(v[k]) * affine.weight[k] + affine.bias[k];
      store_unit<T, kVector>(o.y + row * columns, u, pack<T>(v));
    }
  }
}

/// One row a block; its first `cached` units stay in shared memory.
template <class T, class W, bool kVector>
__global__ void __launch_bounds__(1024)
    layer_norm_forward_block_kernel(Operands<T, W> o, int units, int cached) {
  constexpr int kWidth = kUnitWidth<T, kVector>, kInFlight = kVector ? 4 : 8;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2 * kWarp];
  Unit<T, kVector>* const cache = reinterpret_cast<Unit<T, kVector>*>(shared);
  const std::int64_t row = blockIdx.x;
  const int columns = units * kWidth, step = static_cast<int>(blockDim.x);
  const T* const x = o.x + row * columns;
  T* const sum_row = o.sum + row * columns;
  const T* const again = o.residual != nullptr ? sum_row : x;  // for units that are not cached

  float total[1] = {0};
  for (int first = threadIdx.x; first < units; first += kInFlight * step) {
    Unit<T, kVector> unit[kInFlight], other[kInFlight];
#pragma unroll
    for (int b = 0; b < kInFlight; ++b) {
      const int u = first + b * step;
      if (u >= units) continue;
      unit[b] = read_unit<T, kVector>(x, u);
      if (o.residual != nullptr) other[b] = read_unit<T, kVector>(o.residual + row * columns, u);
    }
#pragma unroll
    for (int b = 0; b < kInFlight; ++b) {
      const int u = first + b * step;
      if (u >= units) continue;
      if (o.residual != nullptr) {
        unit[b] = add_units<T, kVector>(unit[b], other[b]);
        store_unit<T, kVector>(sum_row, u, unit[b]);
      }
      if (u < cached) cache[u] = unit[b];
      float v[kWidth];
      unpack<T>(unit[b], v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) total[0] += v[k];
    }
  }
  block_sums(total, scratch);
  Statistics<float> s;
  s.first = total[0] / static_cast<float>(columns);

  float sums[2] = {0, 0};
  for (int u = threadIdx.x; u < units; u += step) {
    float v[kWidth];
    unpack<T>(u < cached ? cache[u] : load_unit<T, kVector>(again, u), v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float d = v[k] - s.first;
      sums[0] += d;
      sums[1] += d * d;
    }
  }
  block_sums(sums, scratch);
  s.finish(sums[0], sums[1], static_cast<float>(columns), o.eps);
  if (threadIdx.x == 0) store_statistics(o, row, s);

  for (int u = threadIdx.x; u < units; u += step) {
    const Affine<W, kVector, kWidth> affine(o.weight, o.bias, u);
    float v[kWidth];
    unpack<T>(u < cached ? cache[u] : load_unit<T, kVector>(again, u), v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[k] = s.normalise(v[k]) * affine.weight[k] + affine.bias[k];
    store_unit<T, kVector>(o.y + row * columns, u, pack<T>(v));
  }
}

struct AnyOperands {
  AnyRows y, sum, x, residual;
  AnyVector mean, rstd, weight, bias;
  std::int64_t rows, columns;
  double eps;
};

template <class C>
__global__ void layer_norm_forward_any_dtype_kernel(AnyOperands o) {
  __shared__ C scratch[2 * kWarp];
  const AnyRows source = o.residual ? o.sum : o.x;
  for (std::int64_t row = blockIdx.x; row < o.rows; row += gridDim.x) {
    C total[1] = {0};
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) {
      if (o.residual) o.sum.store(row, c, o.x.load<C>(row, c) + o.residual.load<C>(row, c));
      total[0] += source.load<C>(row, c);
    }
    block_sums(total, scratch);
    Statistics<C> s;
    s.first = total[0] / static_cast<C>(o.columns);
    C sums[2] = {0, 0};
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) {
      const C d = source.load<C>(row, c) - s.first;
      sums[0] += d;
      sums[1] += d * d;
    }
    block_sums(sums, scratch);
    s.finish(sums[0], sums[1], static_cast<C>(o.columns), static_cast<C>(o.eps));
    if (threadIdx.x == 0) {
      if (o.mean) o.mean.store(row, s.first + s.correction);
      if (o.rstd) o.rstd.store(row, s.rstd);
    }
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) {
      const C weight = o.weight ? o.weight.load<C>(c) : C(1);
      const C bias = o.bias ? o.bias.load<C>(c) : C(0);
      o.y.store(row, c, s.normalise(source.load<C>(row, c)) * weight + bias);
    }
  }
}

template <class T, class W, bool kVector, int kUnits>
void launch_warp(cudaStream_t stream, const Operands<T, W>& o, std::int64_t columns) {
  constexpr int kBytes = kUnits * static_cast<int>(sizeof(Unit<T, kVector>));
  constexpr int kRows = kBytes >= 32 ? 1 : kBytes >= 8 ? 2 : 4;
  const int units = static_cast<int>(columns) / kUnitWidth<T, kVector>, group = group_size(units);
  const unsigned blocks = blocks_for(o.rows, kGroupThreads / group * kRows);
  layer_norm_forward_warp_kernel<T, W, kVector, kUnits, kRows>
      <<<blocks, kGroupThreads, 0, stream>>>(o, units, group);
}

template <class T, class W, bool kVector>
void launch_block(cudaStream_t stream, const Operands<T, W>& o, std::int64_t columns) {
  const auto kernel = layer_norm_forward_block_kernel<T, W, kVector>;
  const BlockShape block = block_shape<T, kVector>(kernel, columns, 1);
  kernel<<<static_cast<unsigned>(o.rows), block.threads, block.shared_bytes, stream>>>(
      o, static_cast<int>(columns) / kUnitWidth<T, kVector>, block.cached_units);
}

template <class T, class W>
void launch_rows(cudaStream_t stream, const LayerNormForward& args, RowShape shape) {
  const Operands<T, W> o{
      args.y.ptr<T>(), args.sum.ptr<T>(),           args.mean.ptr<float>(), args.rstd.ptr<float>(),
      args.x.ptr<T>(), args.residual.ptr<T>(),      args.weight.ptr<W>(),   args.bias.ptr<W>(),
      shape.rows,      static_cast<float>(args.eps)};
  const bool aligned = aligned16(args.y) && aligned16(args.sum) && aligned16(args.x) &&
                       aligned16(args.residual) && aligned16(args.weight) && aligned16(args.bias);
  if (shape.columns <= kWarpColumns)
    dispatch_units<T>(shape.columns, aligned, [&](auto vector, auto units) {
      launch_warp<T, W, decltype(vector)::value, decltype(units)::value>(stream, o, shape.columns);
    });
  else if (aligned && shape.columns % kUnitWidth<T, true> == 0)
    launch_block<T, W, true>(stream, o, shape.columns);
  else
    launch_block<T, W, false>(stream, o, shape.columns);
}

/// True if the kernels for one type of row and one of weight can take the operands.
bool one_row_type(const LayerNormForward& a, RowShape shape) {
  const auto same = [&](const View& v) { return !v || v.dtype == a.x.dtype; };
  const auto is_float = [](const View& v) { return !v || v.dtype == Dtype::f32; };
  const bool weights = (same(a.weight) && same(a.bias)) || (is_float(a.weight) && is_float(a.bias));
  return all_contiguous(a.x, a.y, a.sum, a.residual) && same(a.y) && same(a.sum) &&
         same(a.residual) && is_float(a.mean) && is_float(a.rstd) && weights &&
         shape.columns <= (std::int64_t{1} << 30) && shape.rows <= 4 * kMaxGridX;
}

}  // namespace

void layer_norm_forward(const Stream& stream, const LayerNormForward& args) {
  const char* const op = "layer_norm_forward";
  const RowShape shape = row_shape(op, args.x);
  check_rows(op, "x", args.x, shape);
  check_rows(op, "y", args.y, shape);
  MT_CHECK(static_cast<bool>(args.residual) == static_cast<bool>(args.sum), op,
           ": expected a sum with a residual and none without");
  if (args.residual) {
    check_rows(op, "residual", args.residual, shape);
    check_rows(op, "sum", args.sum, shape);
  }
  check_vector(op, "weight", args.weight, shape.columns);
  check_vector(op, "bias", args.bias, shape.columns);
  check_vector(op, "mean", args.mean, shape.rows);
  check_vector(op, "rstd", args.rstd, shape.rows);
  if (args.x.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  const bool typed =
      one_row_type(args, shape) && dispatch_row_type(args.x.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        const View& any_weight = args.weight ? args.weight : args.bias;
        if (std::is_same_v<T, float> || !any_weight || any_weight.dtype == Dtype::f32)
          launch_rows<T, float>(queue, args, shape);
        else
          launch_rows<T, T>(queue, args, shape);
      });
  if (!typed) {
    const RowGrid grid = any_dtype_grid(shape);
    const AnyOperands o{AnyRows(args.y),
                        AnyRows(args.sum),
                        AnyRows(args.x),
                        AnyRows(args.residual),
                        AnyVector(args.mean),
                        AnyVector(args.rstd),
                        AnyVector(args.weight),
                        AnyVector(args.bias),
                        shape.rows,
                        shape.columns,
                        args.eps};
    const auto run = [&](auto* kernel) { kernel<<<grid.blocks, grid.threads, 0, queue>>>(o); };
    args.x.dtype == Dtype::f64 || args.y.dtype == Dtype::f64
        ? run(layer_norm_forward_any_dtype_kernel<double>)
        : run(layer_norm_forward_any_dtype_kernel<float>);
  }
  MT_CUDA_CHECK_LAUNCH();
}

}  // namespace mixtape::kernels::cuda
