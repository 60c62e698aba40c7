// Layer normalisation: x (and the residual) are read once, y (and the sum) written once.
//
// A group of threads (part of a warp, a warp or a few) holds a row in registers, each thread the
// same columns of every row, so that weight and bias stay in its registers too. Blocks walk over
// the rows with a grid no larger than fits the device at once, and fetch rows ahead to shared
// memory. Rows too long for that take a block each, which keeps what fits in shared memory.
//
// The mean is found in two steps: m, the rounded mean of the row or of a part of it, and c, the
// mean of x - m; so rows whose mean is a million times their deviation come out to full precision.
// The mean of 1/n of a row is at most sqrt(n - 1) deviations from the row's, so that var(x) =
// mean((x - m)^2) - c^2 loses two bits with n = 4 and the sum for m takes a quarter of the adds.
// f64, mixed dtypes and unusual weights take a plain kernel. Reductions are trees of fixed shape:
// deterministic.
#include "kernels/cuda/row_walk.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;  // of a block that walks over rows

template <class T>
struct Operands {
  T *y, *sum;          // (N, C); sum is null without a residual
  float *mean, *rstd;  // (N); null if not wanted
  const T *x, *residual;
  AnyVector weight, bias;  // (C), optional; float or T
  int rows;
  float eps;
};

/// A row's mean (first + correction) and 1 / sqrt(variance + eps).
template <class C>
struct Statistics {
  C first, correction, rstd;

  /// From the sums of d = x - first and of d * d. Variance that is NaN stays NaN.
  __device__ __forceinline__ void finish(C sum_d, C sum_d2, C one_over_columns, C eps) {
    correction = sum_d * one_over_columns;
    const C variance = sum_d2 * one_over_columns - correction * correction;
    rstd = rsqrt((variance < C(0) ? C(0) : variance) + eps);
  }
  __device__ __forceinline__ C normalise(C x) const { return ((x - first) - correction) * rstd; }
};

template <class T>
__device__ __forceinline__ void store_statistics(const Operands<T>& o, std::int64_t row,
                                                 const Statistics<float>& s) {
  if (o.mean != nullptr) o.mean[row] = s.first + s.correction;
  if (o.rstd != nullptr) o.rstd[row] = s.rstd;
}

/// `lanes` threads share a row; a thread owns units lane, lane + lanes, ... (kUnits of them), with
/// their weight and bias in registers throughout. The rows that a thread will need next are on
/// their way to shared memory while it works on one, each thread fetching for itself.
template <class T, bool kVector, int kUnits, bool kWide>
__global__ void __launch_bounds__(kMaxThreads)
    layer_norm_forward_kernel(Operands<T> o, int units, int lanes, int stages) {
  using Packed = Unit<T, kVector>;
  constexpr int kWidth = kUnitWidth<T, kVector>;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[3][kWarp];
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  const int columns = units * kWidth, threads = blockDim.x;
  const auto owns = [&](int i) { return owns_unit<kVector, kUnits>(i, lane, lanes, units); };
  const float one_over_columns = 1.0f / static_cast<float>(columns);
  const float one_over_first = 1.0f / static_cast<float>(min(lanes, units) * kWidth);
  float weight[kUnits][kWidth], bias[kUnits][kWidth];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (!owns(i)) continue;
    read_vector<T, kVector>(o.weight, (lane + i * lanes) * kWidth, 1.0f, weight[i]);
    read_vector<T, kVector>(o.bias, (lane + i * lanes) * kWidth, 0.0f, bias[i]);
  }

  // A stage holds, for each thread, kUnits units of x, then of the residual.
  Packed* const mine = reinterpret_cast<Packed*>(shared) + threadIdx.x;
  const int stage_size = (o.residual != nullptr ? 2 : 1) * kUnits * threads;
  const auto fetch = [&](int row, Packed* to) {
    if (row < o.rows) {
      const std::int64_t offset = static_cast<std::int64_t>(row) * columns + lane * kWidth;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (!owns(i)) continue;
        const int ahead = i * lanes * kWidth;
        fetch_unit<T, kVector>(to + i * threads, o.x + offset + ahead);
        if (o.residual != nullptr)
          fetch_unit<T, kVector>(to + (kUnits + i) * threads, o.residual + offset + ahead);
      }
    }
    commit_fetches();
  };

  const int step = gridDim.x * groups;
  int row = blockIdx.x * groups + group;
  for (int s = 0; s < stages - 1; ++s) fetch(row + s * step, mine + s * stage_size);
  // Every thread of a block makes the same number of turns: a group past the end stores nothing.
  for (int stage = 0; row - group < o.rows; row += step) {
    const int last = stage == 0 ? stages - 1 : stage - 1;
    fetch(row + (stages - 1) * step, mine + last * stage_size);
    wait_for_fetches(stages - 1);
    const Packed* const now = mine + stage * stage_size;
    const std::int64_t base = static_cast<std::int64_t>(row) * columns;
    const bool exists = row < o.rows;

    float v[kUnits][kWidth], sum[1] = {0};
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!owns(i)) continue;
      Packed unit = now[i * threads];
      if (o.residual != nullptr) {
        unit = add_units<T, kVector>(unit, now[(kUnits + i) * threads]);
        if (exists) store_unit<T, kVector>(o.sum + base, lane + i * lanes, unit);
      }
      unpack<T>(unit, v[i]);
      if (kVector && i != 0) continue;  // the threads' first units suffice for s.first
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[0] += v[i][k];
    }
    group_sums<kWide>(sum, lanes, group, scratch);
    Statistics<float> s;
    s.first = sum[0] * (kVector ? one_over_first : one_over_columns);
    float sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!owns(i)) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        v[i][k] -= s.first;
        sums[0] += v[i][k];
        sums[1] += v[i][k] * v[i][k];
      }
    }
    group_sums<kWide>(sums, lanes, group, scratch + 1);
    s.finish(sums[0], sums[1], one_over_columns, o.eps);
    if (lane == 0 && exists) store_statistics(o, row, s);
    const float shift = -s.correction * s.rstd;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (!owns(i)) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        v[i][k] = fmaf(fmaf(v[i][k], s.rstd, shift), weight[i][k], bias[i][k]);
      if (exists) store_unit<T, kVector>(o.y + base, lane + i * lanes, pack<T>(v[i]));
    }
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
}

/// One row a block; its first `cached` units stay in shared memory.
template <class T, bool kVector>
__global__ void __launch_bounds__(1024)
    layer_norm_forward_block_kernel(Operands<T> o, int units, int cached) {
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
  s.finish(sums[0], sums[1], 1.0f / static_cast<float>(columns), o.eps);
  if (threadIdx.x == 0) store_statistics(o, row, s);

  for (int u = threadIdx.x; u < units; u += step) {
    float weight[kWidth], bias[kWidth], v[kWidth];
    read_vector<T, kVector>(o.weight, u * kWidth, 1.0f, weight);
    read_vector<T, kVector>(o.bias, u * kWidth, 0.0f, bias);
    unpack<T>(u < cached ? cache[u] : load_unit<T, kVector>(again, u), v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[k] = s.normalise(v[k]) * weight[k] + bias[k];
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
    s.finish(sums[0], sums[1], C(1) / static_cast<C>(o.columns), static_cast<C>(o.eps));
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

template <class T, bool kVector>
void launch_block(cudaStream_t stream, const Operands<T>& o, std::int64_t columns) {
  const auto kernel = layer_norm_forward_block_kernel<T, kVector>;
  const BlockShape block = block_shape<T, kVector>(kernel, columns, 1);
  launch(kernel, static_cast<unsigned>(o.rows), block.threads, block.shared_bytes, stream, o,
         static_cast<int>(columns) / kUnitWidth<T, kVector>, block.cached_units);
}

template <class T>
void launch_rows(cudaStream_t stream, const LayerNormForward& args, RowShape shape) {
  const Operands<T> o{args.y.ptr<T>(),
                      args.sum.ptr<T>(),
                      args.mean.ptr<float>(),
                      args.rstd.ptr<float>(),
                      args.x.ptr<T>(),
                      args.residual.ptr<T>(),
                      AnyVector(args.weight),
                      AnyVector(args.bias),
                      static_cast<int>(shape.rows),
                      static_cast<float>(args.eps)};
  const bool aligned = aligned16(args.y) && aligned16(args.sum) && aligned16(args.x) &&
                       aligned16(args.residual) && aligned16(args.weight) && aligned16(args.bias) &&
                       shape.columns % kPerVector<T> == 0;
  dispatch_row_walk<T>(shape.columns, aligned, [&](auto vector, auto held, auto wide, int lanes) {
    constexpr bool kVector = decltype(vector)::value;
    constexpr int kUnits = decltype(held)::value, kWidth = kUnitWidth<T, kVector>;
    const auto kernel = layer_norm_forward_kernel<T, kVector, kUnits, decltype(wide)::value>;
    const RowWalk walk = row_walk(
        kernel, o.rows, lanes,
        {.threads = kMaxThreads,
         .wanted_threads = 256,
         .blocks = 8,
         .bytes_per_thread = (o.residual != nullptr ? 2 : 1) * kUnits * kWidth * sizeof(T)});
    if (walk.blocks == 0) return launch_block<T, kVector>(stream, o, shape.columns);
    launch(kernel, dim3(walk.blocks), dim3(walk.threads), walk.shared_bytes, stream, o,
           static_cast<int>(shape.columns) / kWidth, lanes, walk.stages);
  });
}

/// True if the kernels for one type of row and one of weight can take the operands.
bool one_row_type(const LayerNormForward& a, RowShape shape) {
  const auto same = [&](const View& v) { return !v || v.dtype == a.x.dtype; };
  const auto is_float = [](const View& v) { return !v || v.dtype == Dtype::f32; };
  const auto fits = [&](const View& v) { return same(v) || is_float(v); };
  return all_contiguous(a.x, a.y, a.sum, a.residual) && same(a.y) && same(a.sum) &&
         same(a.residual) && is_float(a.mean) && is_float(a.rstd) && fits(a.weight) &&
         fits(a.bias) && shape.columns <= (std::int64_t{1} << 30) &&
         shape.rows <= (std::int64_t{1} << 30);
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
  const bool typed = one_row_type(args, shape) && dispatch_row_type(args.x.dtype, [&](auto tag) {
                       launch_rows<typename decltype(tag)::type>(queue, args, shape);
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
