// Root-mean-square normalisation: x (and the residual) are read once, y (and the sum) written once.
//
// Rows are divided among threads as in layer_norm_forward.cu: a group of threads holds a row in
// registers with the weight of its columns, blocks walk over the rows with a grid that fits the
// device at once and fetch rows ahead to shared memory; rows too long for that take a block each,
// which keeps what fits in shared memory. f64 and mixed dtypes take a plain kernel. Squares are
// summed in float (double for f64) by trees of fixed shape: deterministic.
#include "kernels/cuda/row_walk.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;  // of a block that walks over rows

template <class T>
struct Operands {
  T *y, *sum;   // (N, C); sum is null without a residual
  float* rstd;  // (N); null if not wanted
  const T *x, *residual;
  AnyVector weight;  // (C), optional; float or T
  int rows;
  float eps;
};

template <class C>
__device__ __forceinline__ C reciprocal_rms(C sum_of_squares, C columns, C eps) {
  return C(1) / sqrt(sum_of_squares / columns + eps);
}

/// `lanes` threads share a row; a thread owns units lane, lane + lanes, ... (kUnits of them), with
/// their weight in registers throughout. The rows that a thread will need next are on their way to
/// shared memory while it works on one, each thread fetching for itself.
template <class T, bool kVector, int kUnits, bool kWide>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_forward_kernel(Operands<T> o, int units, int lanes, int stages) {
  using Packed = Unit<T, kVector>;
  constexpr int kWidth = kUnitWidth<T, kVector>;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2][1][kWarp];
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  const int columns = units * kWidth, threads = blockDim.x;
  float weight[kUnits][kWidth];
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    if (lane + i * lanes < units)
      read_vector<T, kVector>(o.weight, (lane + i * lanes) * kWidth, 1.0f, weight[i]);

  // A stage holds, for each thread, kUnits units of x, then of the residual.
  Packed* const mine = reinterpret_cast<Packed*>(shared) + threadIdx.x;
  const int stage_size = (o.residual != nullptr ? 2 : 1) * kUnits * threads;
  const auto fetch = [&](int row, Packed* to) {
    if (row < o.rows) {
      const std::int64_t offset = static_cast<std::int64_t>(row) * columns + lane * kWidth;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (lane + i * lanes >= units) continue;
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
  // Every thread of a block makes the same number of turns: a group past the end works on nothing.
  for (int stage = 0, half = 0; row - group < o.rows; row += step, half ^= 1) {
    const int last = stage == 0 ? stages - 1 : stage - 1;
    fetch(row + (stages - 1) * step, mine + last * stage_size);
    wait_for_fetches(stages - 1);
    const Packed* const now = mine + stage * stage_size;
    const std::int64_t base = static_cast<std::int64_t>(row) * columns;
    const int held = row < o.rows ? units : 0;

    float v[kUnits][kWidth], sum[1] = {0};
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (lane + i * lanes >= held) continue;
      Packed unit = now[i * threads];
      if (o.residual != nullptr) {
        unit = add_units<T, kVector>(unit, now[(kUnits + i) * threads]);
        store_unit<T, kVector>(o.sum + base, lane + i * lanes, unit);
      }
      unpack<T>(unit, v[i]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[0] += v[i][k] * v[i][k];
    }
    group_sums<kWide>(sum, lanes, group, scratch[half]);
    const float rstd = reciprocal_rms(sum[0], static_cast<float>(columns), o.eps);
    if (lane == 0 && held != 0 && o.rstd != nullptr) o.rstd[row] = rstd;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (lane + i * lanes >= held) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) v[i][k] = v[i][k] * rstd * weight[i][k];
      store_unit<T, kVector>(o.y + base, lane + i * lanes, pack<T>(v[i]));
    }
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
}

/// One row a block; its first `cached` units stay in shared memory.
template <class T, bool kVector>
__global__ void __launch_bounds__(1024)
    rms_norm_forward_block_kernel(Operands<T> o, int units, int cached) {
  constexpr int kWidth = kUnitWidth<T, kVector>, kInFlight = kVector ? 4 : 8;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[kWarp];
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
      for (int k = 0; k < kWidth; ++k) total[0] += v[k] * v[k];
    }
  }
  block_sums(total, scratch);
  const float rstd = reciprocal_rms(total[0], static_cast<float>(columns), o.eps);
  if (threadIdx.x == 0 && o.rstd != nullptr) o.rstd[row] = rstd;

  for (int u = threadIdx.x; u < units; u += step) {
    float weight[kWidth], v[kWidth];
    read_vector<T, kVector>(o.weight, u * kWidth, 1.0f, weight);
    unpack<T>(u < cached ? cache[u] : load_unit<T, kVector>(again, u), v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[k] = v[k] * rstd * weight[k];
    store_unit<T, kVector>(o.y + row * columns, u, pack<T>(v));
  }
}

struct AnyOperands {
  AnyRows y, sum, x, residual;
  AnyVector rstd, weight;
  std::int64_t rows, columns;
  double eps;
};

template <class C>
__global__ void rms_norm_forward_any_dtype_kernel(AnyOperands o) {
  __shared__ C scratch[kWarp];
  const AnyRows source = o.residual ? o.sum : o.x;
  for (std::int64_t row = blockIdx.x; row < o.rows; row += gridDim.x) {
    C total[1] = {0};
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) {
      if (o.residual) o.sum.store(row, c, o.x.load<C>(row, c) + o.residual.load<C>(row, c));
      const C v = source.load<C>(row, c);
      total[0] += v * v;
    }
    block_sums(total, scratch);
    const C rstd = reciprocal_rms(total[0], static_cast<C>(o.columns), static_cast<C>(o.eps));
    if (threadIdx.x == 0 && o.rstd) o.rstd.store(row, rstd);
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x)
      o.y.store(row, c, source.load<C>(row, c) * rstd * (o.weight ? o.weight.load<C>(c) : C(1)));
  }
}

template <class T, bool kVector>
void launch_block(cudaStream_t stream, const Operands<T>& o, std::int64_t columns) {
  const auto kernel = rms_norm_forward_block_kernel<T, kVector>;
  const BlockShape block = block_shape<T, kVector>(kernel, columns, 1);
  launch(kernel, static_cast<unsigned>(o.rows), block.threads, block.shared_bytes, stream, o,
         static_cast<int>(columns) / kUnitWidth<T, kVector>, block.cached_units);
}

template <class T>
void launch_rows(cudaStream_t stream, const RmsNormForward& args, RowShape shape) {
  const Operands<T> o{args.y.ptr<T>(),
                      args.sum.ptr<T>(),
                      args.rstd.ptr<float>(),
                      args.x.ptr<T>(),
                      args.residual.ptr<T>(),
                      AnyVector(args.weight),
                      static_cast<int>(shape.rows),
                      static_cast<float>(args.eps)};
  const bool aligned = aligned16(args.y) && aligned16(args.sum) && aligned16(args.x) &&
                       aligned16(args.residual) && aligned16(args.weight) &&
                       shape.columns % kPerVector<T> == 0;
  dispatch_row_walk<T>(shape.columns, aligned, [&](auto vector, auto held, auto wide, int lanes) {
    constexpr bool kVector = decltype(vector)::value;
    constexpr int kUnits = decltype(held)::value, kWidth = kUnitWidth<T, kVector>;
    const auto kernel = rms_norm_forward_kernel<T, kVector, kUnits, decltype(wide)::value>;
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
bool one_row_type(const RmsNormForward& a, RowShape shape) {
  const auto same = [&](const View& v) { return !v || v.dtype == a.x.dtype; };
  const auto is_float = [](const View& v) { return !v || v.dtype == Dtype::f32; };
  return all_contiguous(a.x, a.y, a.sum, a.residual) && same(a.y) && same(a.sum) &&
         same(a.residual) && is_float(a.rstd) && (same(a.weight) || is_float(a.weight)) &&
         shape.columns <= (std::int64_t{1} << 30) && shape.rows <= (std::int64_t{1} << 30);
}

}  // namespace

void rms_norm_forward(const Stream& stream, const RmsNormForward& args) {
  const char* const op = "rms_norm_forward";
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
  check_vector(op, "rstd", args.rstd, shape.rows);
  if (args.x.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  const bool typed = one_row_type(args, shape) && dispatch_row_type(args.x.dtype, [&](auto tag) {
                       launch_rows<typename decltype(tag)::type>(queue, args, shape);
                     });
  if (typed) return;
  const RowGrid grid = any_dtype_grid(shape);
  const AnyOperands o{AnyRows(args.y),
                      AnyRows(args.sum),
                      AnyRows(args.x),
                      AnyRows(args.residual),
                      AnyVector(args.rstd),
                      AnyVector(args.weight),
                      shape.rows,
                      shape.columns,
                      args.eps};
  const auto run = [&](auto* kernel) {
    launch(kernel, dim3(grid.blocks), dim3(grid.threads), 0, queue, o);
  };
  args.x.dtype == Dtype::f64 || args.y.dtype == Dtype::f64
      ? run(rms_norm_forward_any_dtype_kernel<double>)
      : run(rms_norm_forward_any_dtype_kernel<float>);
}

}  // namespace mixtape::kernels::cuda
