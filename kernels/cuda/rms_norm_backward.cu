// Backward of root-mean-square normalisation: x and dy (and dsum) are read once, dx is written
// once.
//
// As in layer_norm_backward.cu a group of threads works on the same columns of every row that it
// takes, so that the sums for dweight stay in its registers; blocks walk over the rows with a grid
// that fits the device at once, each leaves one partial sum per column in the workspace, and
// column_sums adds those up in a fixed order: no atomics, the same bits on every run on one model
// of device. Rows too long for that, f64 and mixed dtypes take a plain kernel that keeps its
// partial sums in the workspace itself.
//
// With g = dy * weight and xh = x * rstd: dx = rstd (g - xh mean(g xh)) + dsum.
#include <algorithm>

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/row_walk.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kMaxBlocksPerMultiprocessor = 4;

std::int64_t max_blocks(std::int64_t rows) {
  return std::min<std::int64_t>(rows, kMaxBlocksPerMultiprocessor * multiprocessors());
}

template <class T>
struct Operands {
  T* dx;                   // null if not wanted
  const T *dy, *dsum, *x;  // (N, C); dsum may be null
  AnyVector weight;        // optional; float or T
  const float* rstd;
  float* partial;  // (blocks, C): sums for dweight; null if not wanted
  int rows;
};

/// Adds the sums of a block's groups in order and writes them to the block's place in `partial`.
/// `shared` holds `columns` floats a group; owner: this thread's sums count (one lane of those that
/// hold the same columns of a warp).
template <int kUnits, int kWidth>
__device__ __forceinline__ void write_partial(float* partial, float* shared, int columns, int units,
                                              int lane, int lanes, bool owner, int group,
                                              int groups, const float (&dweight)[kUnits][kWidth]) {
  __syncthreads();  // the stages that were here are used up; rows past the end are not fetched
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int u = lane + i * lanes;
    if (!owner || u >= units) continue;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) shared[group * columns + u * kWidth + k] = dweight[i][k];
  }
  __syncthreads();
  partial += static_cast<std::int64_t>(blockIdx.x) * columns;
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    float sum = shared[c];
    for (int g = 1; g < groups; ++g) sum += shared[g * columns + c];
    partial[c] = sum;
  }
}

/// Threads of a block, at most: a thread needs about three registers for each element it holds.
template <bool kVector>
constexpr int max_threads(int elements) {
  return !kVector ? 768 : elements > 24 ? 384 : 512;
}

/// `lanes` threads share a row; a thread owns units lane, lane + lanes, ... (kUnits of them). The
/// rows that a thread will need next are on their way to shared memory while it works on one, each
/// thread fetching for itself, so that no barrier is needed for them.
template <class T, bool kVector, int kUnits, bool kWide>
__global__ void __launch_bounds__(max_threads<kVector>(kUnits* kUnitWidth<T, kVector>))
    rms_norm_backward_kernel(Operands<T> o, int units, int lanes, int stages) {
  using Packed = Unit<T, kVector>;
  constexpr int kWidth = kUnitWidth<T, kVector>;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2][1][kWarp];
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  const int columns = units * kWidth, threads = blockDim.x;
  float weight[kUnits][kWidth], dweight[kUnits][kWidth] = {};
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    if (lane + i * lanes < units)
      read_vector<T, kVector>(o.weight, (lane + i * lanes) * kWidth, 1.0f, weight[i]);

  // A stage holds, for each thread, kUnits units of x, then of dy, then of dsum.
  Packed* const mine = reinterpret_cast<Packed*>(shared) + threadIdx.x;
  const int stage_size = (o.dsum != nullptr ? 3 : 2) * kUnits * threads;
  const auto fetch = [&](int row, Packed* to) {
    if (row < o.rows) {
      const std::int64_t offset = static_cast<std::int64_t>(row) * columns + lane * kWidth;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (lane + i * lanes >= units) continue;
        const int ahead = i * lanes * kWidth;
        fetch_unit<T, kVector>(to + i * threads, o.x + offset + ahead);
        fetch_unit<T, kVector>(to + (kUnits + i) * threads, o.dy + offset + ahead);
        if (o.dsum != nullptr)
          fetch_unit<T, kVector>(to + (2 * kUnits + i) * threads, o.dsum + offset + ahead);
      }
    }
    commit_fetches();
  };
  const auto statistic = [&](int row) { return row < o.rows ? __ldg(o.rstd + row) : 0.0f; };

  const int step = gridDim.x * groups;
  int row = blockIdx.x * groups + group;
  for (int s = 0; s < stages - 1; ++s) fetch(row + s * step, mine + s * stage_size);
  float next_rstd = statistic(row);
  // Every thread of a block makes the same number of turns: a group past the end works on nothing.
  for (int stage = 0, half = 0; row - group < o.rows; row += step, half ^= 1) {
    const int last = stage == 0 ? stages - 1 : stage - 1;
    fetch(row + (stages - 1) * step, mine + last * stage_size);
    wait_for_fetches(stages - 1);
    const float rstd = next_rstd;
    next_rstd = statistic(row + step);
    const Packed* const now = mine + stage * stage_size;

    float sum[1] = {0};  // of g * xh
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (row >= o.rows || lane + i * lanes >= units) continue;
      float vx[kWidth], vdy[kWidth];
      unpack<T>(now[i * threads], vx);
      unpack<T>(now[(kUnits + i) * threads], vdy);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[0] += vdy[k] * weight[i][k] * (vx[k] * rstd);
    }
    group_sums<kWide>(sum, lanes, group, scratch[half]);
    const float minus_gx = -sum[0] / static_cast<float>(columns) * rstd;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (row >= o.rows || lane + i * lanes >= units) continue;
      Packed x = now[i * threads], dy = now[(kUnits + i) * threads];
      keep_packed(x);
      keep_packed(dy);
      float vx[kWidth], vdy[kWidth];
      unpack<T>(x, vx);
      unpack<T>(dy, vdy);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float xh = vx[k] * rstd;
        dweight[i][k] += vdy[k] * xh;
        vx[k] = fmaf(vdy[k] * weight[i][k], rstd, xh * minus_gx);
      }
      if (o.dsum != nullptr) {
        unpack<T>(now[(2 * kUnits + i) * threads], vdy);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) vx[k] += vdy[k];
      }
      if (o.dx != nullptr)
        store_unit<T, kVector>(o.dx + static_cast<std::int64_t>(row) * columns, lane + i * lanes,
                               pack<T>(vx));
    }
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
  if (o.partial == nullptr) return;
  if constexpr (!kWide)
    for (int offset = lanes; offset < kWarp; offset *= 2)  // groups that share a warp
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
#pragma unroll
        for (int k = 0; k < kWidth; ++k) dweight[i][k] += shuffle_xor(dweight[i][k], offset);
  const int span = kWide ? lanes : kWarp;  // threads that now hold one set of sums
  write_partial(o.partial, reinterpret_cast<float*>(shared), columns, units, lane, lanes,
                static_cast<int>(threadIdx.x) % span < lanes, threadIdx.x / span, blockDim.x / span,
                dweight);
}

struct AnyOperands {
  AnyRows dx, dy, dsum, x;
  AnyVector weight, rstd;
  void* partial;
  std::int64_t rows, columns;
};

/// A block takes rows in turn; its partial sums (C) of type C lie in the workspace, each entry
/// touched by one thread only.
template <class C>
__global__ void rms_norm_backward_any_dtype_kernel(AnyOperands o) {
  __shared__ C scratch[kWarp];
  C* const dweight =
      o.partial == nullptr ? nullptr : static_cast<C*>(o.partial) + blockIdx.x * o.columns;
  if (dweight != nullptr)
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) dweight[c] = 0;
  const auto weighted = [&](std::int64_t row, std::int64_t c) {
    return o.dy.load<C>(row, c) * (o.weight ? o.weight.load<C>(c) : C(1));
  };
  for (std::int64_t row = blockIdx.x; row < o.rows; row += gridDim.x) {
    const C rstd = o.rstd.load<C>(row);
    C sum[1] = {0};
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x)
      sum[0] += weighted(row, c) * (o.x.load<C>(row, c) * rstd);
    block_sums(sum, scratch);
    const C mean_gx = sum[0] / static_cast<C>(o.columns);
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) {
      const C xh = o.x.load<C>(row, c) * rstd;
      if (dweight != nullptr) dweight[c] += o.dy.load<C>(row, c) * xh;
      const C extra = o.dsum ? o.dsum.load<C>(row, c) : C(0);
      if (o.dx) o.dx.store(row, c, (weighted(row, c) - xh * mean_gx) * rstd + extra);
    }
  }
}

/// Returns the number of blocks, or -1 if the row is too long.
template <class T>
std::int64_t launch_rows(cudaStream_t stream, const Operands<T>& o, std::int64_t columns,
                         bool aligned) {
  std::int64_t blocks = -1;
  dispatch_row_walk<T>(columns, aligned, [&](auto vector, auto held, auto wide, int lanes) {
    constexpr bool kVector = decltype(vector)::value;
    constexpr int kUnits = decltype(held)::value, kWidth = kUnitWidth<T, kVector>;
    constexpr int kElements = kUnits * kWidth;
    const auto kernel = rms_norm_backward_kernel<T, kVector, kUnits, decltype(wide)::value>;
    const RowWalk walk =
        row_walk(kernel, o.rows, lanes,
                 {.threads = max_threads<kVector>(kElements),
                  .wanted_threads = kElements > 24 ? 384 : 256,
                  .blocks = kMaxBlocksPerMultiprocessor,
                  .bytes_per_thread = (o.dsum != nullptr ? 3 : 2) * kElements * sizeof(T),
                  .bytes_per_row = o.partial != nullptr ? sizeof(float) * columns : 0});
    if (walk.blocks == 0) return;
    cuda::launch(kernel, dim3(walk.blocks), dim3(walk.threads), walk.shared_bytes, stream, o,
                 static_cast<int>(columns) / kWidth, lanes, walk.stages);
    blocks = walk.blocks;
  });
  return blocks;
}

/// Number of partial sums, or -1 if the operands need the kernel for any dtype.
template <class T>
std::int64_t launch_typed(cudaStream_t stream, const RmsNormBackward& a, RowShape shape,
                          float* partial) {
  const auto same = [&](const View& v) { return !v || v.dtype == a.x.dtype; };
  const auto is_float = [](const View& v) { return !v || v.dtype == Dtype::f32; };
  const bool vector = aligned16(a.dx) && aligned16(a.dy) && aligned16(a.dsum) && aligned16(a.x) &&
                      aligned16(a.weight) && shape.columns % kPerVector<T> == 0;
  if (!all_contiguous(a.dx, a.dy, a.dsum, a.x) || !same(a.dx) || !same(a.dy) || !same(a.dsum) ||
      !is_float(a.rstd) || !(is_float(a.weight) || same(a.weight)) ||
      shape.rows > (std::int64_t{1} << 30))
    return -1;
  const Operands<T> o{
      a.dx.ptr<T>(),       a.dy.ptr<T>(),       a.dsum.ptr<T>(), a.x.ptr<T>(),
      AnyVector(a.weight), a.rstd.ptr<float>(), partial,         static_cast<int>(shape.rows)};
  return launch_rows<T>(stream, o, shape.columns, vector);
}

template <class C>
std::int64_t launch_any_dtype(cudaStream_t stream, const RmsNormBackward& args, RowShape shape,
                              void* partial) {
  const std::int64_t blocks = max_blocks(shape.rows);
  const AnyOperands o{AnyRows(args.dx),
                      AnyRows(args.dy),
                      AnyRows(args.dsum),
                      AnyRows(args.x),
                      AnyVector(args.weight),
                      AnyVector(args.rstd),
                      partial,
                      shape.rows,
                      shape.columns};
  cuda::launch(rms_norm_backward_any_dtype_kernel<C>, dim3(static_cast<unsigned>(blocks)),
               dim3(any_dtype_grid(shape).threads), 0, stream, o);
  return blocks;
}

void check_operands(const char* op, const RmsNormBackward& args, RowShape shape) {
  check_rows(op, "x", args.x, shape);
  check_rows(op, "dy", args.dy, shape);
  if (args.dx) check_rows(op, "dx", args.dx, shape);
  if (args.dsum) check_rows(op, "dsum", args.dsum, shape);
  check_vector(op, "weight", args.weight, shape.columns);
  check_vector(op, "dweight", args.dweight, shape.columns);
  MT_CHECK(static_cast<bool>(args.rstd), op, ": expected rstd, got none");
  check_vector(op, "rstd", args.rstd, shape.rows);
}

}  // namespace

std::size_t rms_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(max_blocks(rows) * columns) * sizeof(double);
}

void rms_norm_backward(const Stream& stream, const RmsNormBackward& args, Workspace workspace) {
  const char* const op = "rms_norm_backward";
  const RowShape shape = row_shape(op, args.x);
  check_operands(op, args, shape);
  if (shape.columns == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  const bool wanted = static_cast<bool>(args.dweight);
  const std::size_t needed = rms_norm_backward_workspace_bytes(shape.rows, shape.columns);
  MT_CHECK(!wanted || workspace.bytes >= needed, op, ": expected a workspace of ", needed,
           " bytes, got ", workspace.bytes);
  void* const partial = wanted ? workspace.data : nullptr;
  const bool wide = args.x.dtype == Dtype::f64 || args.dy.dtype == Dtype::f64;
  std::int64_t parts = shape.rows == 0 ? 0 : -1;
  bool in_double = wide && parts == 0;
  if (parts < 0)
    dispatch_row_type(args.x.dtype, [&](auto tag) {
      parts = launch_typed<typename decltype(tag)::type>(queue, args, shape,
                                                         static_cast<float*>(partial));
    });
  if (parts < 0) {
    in_double = wide;
    parts = wide ? launch_any_dtype<double>(queue, args, shape, partial)
                 : launch_any_dtype<float>(queue, args, shape, partial);
  }
  if (wanted) column_sums(stream, args.dweight, args.beta_weight, partial, in_double, parts);
}

}  // namespace mixtape::kernels::cuda
