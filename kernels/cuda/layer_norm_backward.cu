// Backward of layer normalisation: x and dy (and dsum) are read once, dx is written once.
//
// A group of threads works on a few rows at a time, each thread on the same columns throughout, so
// that the sums for dweight and dbias stay in its registers. Blocks walk over the rows with a grid
// no larger than fits the device at once; each leaves one partial sum per column in the workspace,
// and a second kernel adds those up in a fixed order: no atomics, the same bits on every run on one
// model of device. Rows too long for that, f64 and mixed dtypes take a plain kernel that keeps its
// partial sums in the workspace itself.
//
// With g = dy * weight and xh the normalised row: dx = rstd (g - mean(g) - xh mean(g xh)) + dsum.
// The saved mean is rounded; xh's own mean is what the rounding took away and is subtracted.
#include <algorithm>

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
  const float *mean, *rstd;
  float* partial;  // (blocks, 2, C): sums for dweight and dbias; null if not wanted
  int rows;
};

/// What is subtracted from a row's g and xh: means over the row.
template <class C>
struct RowMeans {
  C g, gx, shift;

  /// From the sums of g, g * xh and xh, with xh = (x - mean) * rstd before the shift.
  __device__ __forceinline__ RowMeans(C sum_g, C sum_gx, C sum_x, C one_over_columns)
      : g(sum_g * one_over_columns), shift(sum_x * one_over_columns) {
    gx = (sum_gx - shift * sum_g) * one_over_columns;
  }
};

/// Adds the sums of a block's groups in order and writes them to the block's place in `partial`.
/// `shared` holds 2 * columns floats a group; owner: this thread's sums count (one lane of those
/// that hold the same columns of a warp).
template <int kUnits, int kWidth>
__device__ __forceinline__ void write_partial(float* partial, float* shared, int columns, int units,
                                              int lane, int lanes, bool owner, int group,
                                              int groups, const float (&dweight)[kUnits][kWidth],
                                              const float (&dbias)[kUnits][kWidth]) {
  __syncthreads();  // the stages that were here are used up; rows past the end are not fetched
  float* const mine = shared + group * 2 * columns;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int u = lane + i * lanes;
    if (!owner || u >= units) continue;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      mine[u * kWidth + k] = dweight[i][k];
      mine[columns + u * kWidth + k] = dbias[i][k];
    }
  }
  __syncthreads();
  partial += static_cast<std::int64_t>(blockIdx.x) * 2 * columns;
  for (int c = threadIdx.x; c < 2 * columns; c += blockDim.x) {
    float sum = shared[c];
    for (int g = 1; g < groups; ++g) sum += shared[g * 2 * columns + c];
    partial[c] = sum;
  }
}

/// Threads of a block, at most: a thread needs about four registers for each element it holds.
template <bool kVector>
constexpr int max_threads(int elements) {
  return !kVector ? 768 : elements > 24 ? 384 : 512;
}

/// `lanes` threads share a row; a thread owns units lane, lane + lanes, ... (kUnits of them). The
/// rows that a thread will need next are on their way to shared memory while it works on one, each
/// thread fetching for itself, so that no barrier is needed for them.
template <class T, bool kVector, int kUnits, bool kWide>
__global__ void __launch_bounds__(max_threads<kVector>(kUnits* kUnitWidth<T, kVector>))
    layer_norm_backward_kernel(Operands<T> o, int units, int lanes, int stages) {
  using Packed = Unit<T, kVector>;
  constexpr int kWidth = kUnitWidth<T, kVector>;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2][3][kWarp];
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  const int columns = units * kWidth, threads = blockDim.x;
  const auto owns = [&](int i) { return owns_unit<kVector, kUnits>(i, lane, lanes, units); };
  const float one_over_columns = 1.0f / static_cast<float>(columns);
  float weight[kUnits][kWidth], dweight[kUnits][kWidth] = {}, dbias[kUnits][kWidth] = {};
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    if (owns(i)) read_vector<T, kVector>(o.weight, (lane + i * lanes) * kWidth, 1.0f, weight[i]);

  // A stage holds, for each thread, kUnits units of x, then of dy, then of dsum.
  Packed* const mine = reinterpret_cast<Packed*>(shared) + threadIdx.x;
  const int stage_size = (o.dsum != nullptr ? 3 : 2) * kUnits * threads;
  const auto fetch = [&](int row, Packed* to) {
    if (row < o.rows) {
      const std::int64_t offset = static_cast<std::int64_t>(row) * columns + lane * kWidth;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (!owns(i)) continue;
        const int ahead = i * lanes * kWidth;
        fetch_unit<T, kVector>(to + i * threads, o.x + offset + ahead);
        fetch_unit<T, kVector>(to + (kUnits + i) * threads, o.dy + offset + ahead);
        if (o.dsum != nullptr)
          fetch_unit<T, kVector>(to + (2 * kUnits + i) * threads, o.dsum + offset + ahead);
      }
    }
    commit_fetches();
  };
  const auto statistic = [&](const float* values, int row) {
    return row < o.rows ? __ldg(values + row) : 0.0f;
  };

  const int step = gridDim.x * groups;
  int row = blockIdx.x * groups + group;
  for (int s = 0; s < stages - 1; ++s) fetch(row + s * step, mine + s * stage_size);
  float next_mean = statistic(o.mean, row), next_rstd = statistic(o.rstd, row);
  // Every thread of a block makes the same number of turns: a group past the end works on nothing.
  for (int stage = 0, half = 0; row - group < o.rows; row += step, half ^= 1) {
    const int last = stage == 0 ? stages - 1 : stage - 1;
    fetch(row + (stages - 1) * step, mine + last * stage_size);
    wait_for_fetches(stages - 1);
    const float rstd = next_rstd, minus_mean = -next_mean * rstd;
    next_mean = statistic(o.mean, row + step);
    next_rstd = statistic(o.rstd, row + step);
    const Packed* const now = mine + stage * stage_size;

    const bool exists = row < o.rows;
    float sums[3] = {0, 0, 0};  // of g, g * xh and xh
    if (exists) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (!owns(i)) continue;
        float vx[kWidth], vdy[kWidth];
        unpack<T>(now[i * threads], vx);
        unpack<T>(now[(kUnits + i) * threads], vdy);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float xh = fmaf(vx[k], rstd, minus_mean), g = vdy[k] * weight[i][k];
          sums[0] += g;
          sums[1] += g * xh;
          sums[2] += xh;
        }
      }
    }
    group_sums<kWide>(sums, lanes, group, scratch[half]);
    const RowMeans<float> means(sums[0], sums[1], sums[2], one_over_columns);
    const float minus_g = -means.g * rstd, minus_gx = -means.gx * rstd;
    if (exists) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (!owns(i)) continue;
        Packed x = now[i * threads], dy = now[(kUnits + i) * threads];
        keep_packed(x);
        keep_packed(dy);
        float vx[kWidth], vdy[kWidth];
        unpack<T>(x, vx);
        unpack<T>(dy, vdy);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float xh = fmaf(vx[k], rstd, minus_mean) - means.shift;
          dweight[i][k] += vdy[k] * xh;
          dbias[i][k] += vdy[k];
          vx[k] = fmaf(vdy[k] * weight[i][k], rstd, fmaf(xh, minus_gx, minus_g));
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
    }
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
  if (o.partial == nullptr) return;
  if constexpr (!kWide)
    for (int offset = lanes; offset < kWarp; offset *= 2)  // groups that share a warp
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          dweight[i][k] += shuffle_xor(dweight[i][k], offset);
          dbias[i][k] += shuffle_xor(dbias[i][k], offset);
        }
  const int span = kWide ? lanes : kWarp;  // threads that now hold one set of sums
  write_partial(o.partial, reinterpret_cast<float*>(shared), columns, units, lane, lanes,
                static_cast<int>(threadIdx.x) % span < lanes, threadIdx.x / span, blockDim.x / span,
                dweight, dbias);
}

struct AnyOperands {
  AnyRows dx, dy, dsum, x;
  AnyVector weight, mean, rstd;
  void* partial;
  std::int64_t rows, columns;
};

/// A block takes rows in turn; its partial sums (2, C) of type C lie in the workspace, each entry
/// touched by one thread only.
template <class C>
__global__ void layer_norm_backward_any_dtype_kernel(AnyOperands o) {
  __shared__ C scratch[3 * kWarp];
  C* const dweight =
      o.partial == nullptr ? nullptr : static_cast<C*>(o.partial) + blockIdx.x * 2 * o.columns;
  C* const dbias = dweight + o.columns;
  if (dweight != nullptr)
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) dweight[c] = dbias[c] = 0;
  for (std::int64_t row = blockIdx.x; row < o.rows; row += gridDim.x) {
    const C mean = o.mean.load<C>(row), rstd = o.rstd.load<C>(row);
    C sums[3] = {0, 0, 0};
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) {
      const C xh = (o.x.load<C>(row, c) - mean) * rstd;
      const C g = o.dy.load<C>(row, c) * (o.weight ? o.weight.load<C>(c) : C(1));
      sums[0] += g;
      sums[1] += g * xh;
      sums[2] += xh;
    }
    block_sums(sums, scratch);
    const RowMeans<C> means(sums[0], sums[1], sums[2], C(1) / static_cast<C>(o.columns));
    for (std::int64_t c = threadIdx.x; c < o.columns; c += blockDim.x) {
      const C xh = (o.x.load<C>(row, c) - mean) * rstd - means.shift, dy = o.dy.load<C>(row, c);
      if (dweight != nullptr) {
        dweight[c] += dy * xh;
        dbias[c] += dy;
      }
      const C g = dy * (o.weight ? o.weight.load<C>(c) : C(1));
      const C extra = o.dsum ? o.dsum.load<C>(row, c) : C(0);
      if (o.dx) o.dx.store(row, c, (g - means.g - xh * means.gx) * rstd + extra);
    }
  }
}

/// dweight (blockIdx.y 0) or dbias (1) = sum of `parts` partial sums + beta * itself, 32 columns a
/// block of 32 x 32 threads; added in double.
template <class C>
__global__ void __launch_bounds__(1024)
    layer_norm_backward_finish_kernel(const C* partial, std::int64_t parts, std::int64_t columns,
                                      AnyVector dweight, AnyVector dbias, float beta_weight,
                                      float beta_bias) {
  __shared__ double tile[kWarp][kWarp + 1];
  const bool of_bias = blockIdx.y == 1;
  const AnyVector out = of_bias ? dbias : dweight;
  if (!out) return;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kWarp;
  const std::int64_t column = first + threadIdx.x;
  double sum = 0;
  if (column < columns)
    for (std::int64_t p = threadIdx.y; p < parts; p += kWarp)
      sum += static_cast<double>(partial[(2 * p + of_bias) * columns + column]);
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_reduce(tile[threadIdx.x][threadIdx.y], Sum{});
  const std::int64_t target = first + threadIdx.y;
  if (threadIdx.x != 0 || target >= columns) return;
  const float beta = of_bias ? beta_bias : beta_weight;
  if (beta != 0) sum += static_cast<double>(beta) * out.load<double>(target);
  out.store(target, sum);
}

template <class C>
void finish(cudaStream_t stream, const LayerNormBackward& args, Workspace workspace,
            std::int64_t parts, std::int64_t columns) {
  if (!args.dweight && !args.dbias) return;
  layer_norm_backward_finish_kernel<C>
      <<<dim3(blocks_for(columns, kWarp), 2), dim3(kWarp, kWarp), 0, stream>>>(
          static_cast<const C*>(workspace.data), parts, columns, AnyVector(args.dweight),
          AnyVector(args.dbias), args.beta_weight, args.beta_bias);
  MT_CUDA_CHECK_LAUNCH();
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
    const auto kernel = layer_norm_backward_kernel<T, kVector, kUnits, decltype(wide)::value>;
    const RowWalk walk =
        row_walk(kernel, o.rows, lanes,
                 {.threads = max_threads<kVector>(kElements),
                  .wanted_threads = kElements > 24 ? 384 : 256,
                  .blocks = kMaxBlocksPerMultiprocessor,
                  .bytes_per_thread = (o.dsum != nullptr ? 3 : 2) * kElements * sizeof(T),
                  .bytes_per_row = o.partial != nullptr ? 2 * sizeof(float) * columns : 0});
    if (walk.blocks == 0) return;
    cuda::launch(kernel, dim3(walk.blocks), dim3(walk.threads), walk.shared_bytes, stream, o,
                 static_cast<int>(columns) / kWidth, lanes, walk.stages);
    blocks = walk.blocks;
  });
  return blocks;
}

/// Number of partial sums, or -1 if the operands need the kernel for any dtype.
template <class T>
std::int64_t launch_typed(cudaStream_t stream, const LayerNormBackward& a, RowShape shape,
                          float* partial) {
  const auto same = [&](const View& v) { return !v || v.dtype == a.x.dtype; };
  const auto is_float = [](const View& v) { return !v || v.dtype == Dtype::f32; };
  const bool vector = aligned16(a.dx) && aligned16(a.dy) && aligned16(a.dsum) && aligned16(a.x) &&
                      aligned16(a.weight) && shape.columns % kPerVector<T> == 0;
  if (!all_contiguous(a.dx, a.dy, a.dsum, a.x) || !same(a.dx) || !same(a.dy) || !same(a.dsum) ||
      !is_float(a.mean) || !is_float(a.rstd) || !(is_float(a.weight) || same(a.weight)) ||
      shape.rows > (std::int64_t{1} << 30))
    return -1;
  const Operands<T> o{a.dx.ptr<T>(),
                      a.dy.ptr<T>(),
                      a.dsum.ptr<T>(),
                      a.x.ptr<T>(),
                      AnyVector(a.weight),
                      a.mean.ptr<float>(),
                      a.rstd.ptr<float>(),
                      partial,
                      static_cast<int>(shape.rows)};
  return launch_rows<T>(stream, o, shape.columns, vector);
}

template <class C>
void launch_any_dtype(cudaStream_t stream, const LayerNormBackward& args, RowShape shape,
                      Workspace workspace) {
  const std::int64_t blocks = max_blocks(shape.rows);
  const unsigned threads = any_dtype_grid(shape).threads;
  const bool wanted = args.dweight || args.dbias;
  const AnyOperands o{AnyRows(args.dx),
                      AnyRows(args.dy),
                      AnyRows(args.dsum),
                      AnyRows(args.x),
                      AnyVector(args.weight),
                      AnyVector(args.mean),
                      AnyVector(args.rstd),
                      wanted ? workspace.data : nullptr,
                      shape.rows,
                      shape.columns};
  cuda::launch(layer_norm_backward_any_dtype_kernel<C>, dim3(static_cast<unsigned>(blocks)),
               dim3(threads), 0, stream, o);
  finish<C>(stream, args, workspace, blocks, shape.columns);
}

void check_operands(const char* op, const LayerNormBackward& args, RowShape shape) {
  check_rows(op, "x", args.x, shape);
  check_rows(op, "dy", args.dy, shape);
  if (args.dx) check_rows(op, "dx", args.dx, shape);
  if (args.dsum) check_rows(op, "dsum", args.dsum, shape);
  check_vector(op, "weight", args.weight, shape.columns);
  check_vector(op, "dweight", args.dweight, shape.columns);
  check_vector(op, "dbias", args.dbias, shape.columns);
  MT_CHECK(args.mean && args.rstd, op, ": expected mean and rstd, got none");
  check_vector(op, "mean", args.mean, shape.rows);
  check_vector(op, "rstd", args.rstd, shape.rows);
}

}  // namespace

std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(max_blocks(rows) * 2 * columns) * sizeof(double);
}

void layer_norm_backward(const Stream& stream, const LayerNormBackward& args, Workspace workspace) {
  const char* const op = "layer_norm_backward";
  const RowShape shape = row_shape(op, args.x);
  check_operands(op, args, shape);
  if (shape.columns == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  if (shape.rows == 0) return finish<float>(queue, args, workspace, 0, shape.columns);
  const bool wanted = args.dweight || args.dbias;
  const std::size_t needed = layer_norm_backward_workspace_bytes(shape.rows, shape.columns);
  MT_CHECK(!wanted || workspace.bytes >= needed, op, ": expected a workspace of ", needed,
           " bytes, got ", workspace.bytes);
  float* const partial = wanted ? static_cast<float*>(workspace.data) : nullptr;
  std::int64_t parts = -1;
  dispatch_row_type(args.x.dtype, [&](auto tag) {
    parts = launch_typed<typename decltype(tag)::type>(queue, args, shape, partial);
  });
  if (parts >= 0) return finish<float>(queue, args, workspace, parts, shape.columns);
  if (args.x.dtype == Dtype::f64 || args.dy.dtype == Dtype::f64)
    launch_any_dtype<double>(queue, args, shape, workspace);
  else
    launch_any_dtype<float>(queue, args, shape, workspace);
}

}  // namespace mixtape::kernels::cuda
