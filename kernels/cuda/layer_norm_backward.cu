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

#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kMaxBlocksPerMultiprocessor = 4;

int multiprocessors() {
  int device = 0, count = 0;
  MT_CUDA_CHECK(cudaGetDevice(&device));
  MT_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}
std::int64_t max_blocks(std::int64_t rows) {
  return std::min<std::int64_t>(rows, kMaxBlocksPerMultiprocessor * multiprocessors());
}

template <class T, class W>
struct Operands {
  T* dx;                   // null if not wanted
  const T *dy, *dsum, *x;  // (N, C); dsum may be null
  const W* weight;         // may be null
  const float *mean, *rstd;
  float* partial;  // (blocks, 2, C): sums for dweight and dbias; null if not wanted
  int rows;
};

/// What is subtracted from a row's g and xh: means over the row.
template <class C>
struct RowMeans {
  C g, gx, shift;

  /// From the sums of g, g * xh and xh, with xh = (x - mean) * rstd before the shift.
  __device__ __forceinline__ RowMeans(C sum_g, C sum_gx, C sum_x, C columns)
      : g(sum_g / columns), shift(sum_x / columns) {
    gx = (sum_gx - shift * sum_g) / columns;
  }
};

/// The three sums over the threads that share a row: `lanes` of a warp, or with kWide whole warps,
/// whose sums meet in `scratch` (one entry a warp of the group). Calls alternate between two
/// scratches, so that one barrier a call is enough; other groups of the block go on meanwhile.
template <bool kWide>
__device__ __forceinline__ void group_sums(float& a, float& b, float& c, int lanes, int group,
                                           float4* scratch) {
  const int width = kWide ? kWarp : lanes;
  a = warp_reduce(a, Sum{}, width);
  b = warp_reduce(b, Sum{}, width);
  c = warp_reduce(c, Sum{}, width);
  if constexpr (kWide) {
    const int warps = lanes / kWarp;
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = make_float4(a, b, c, 0);
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
    a = b = c = 0;
#pragma unroll 4
    for (int w = group * warps; w < (group + 1) * warps; ++w) {
      const float4 part = scratch[w];
      a += part.x;
      b += part.y;
      c += part.z;
    }
  }
}

/// Adds the sums of a block's groups in order and writes them to the block's place in `partial`.
/// `shared` holds 2 * columns floats; owner: this thread's sums count (one lane of those that hold
/// the same columns of a warp).
template <int kUnits, int kWidth>
__device__ __forceinline__ void write_partial(float* partial, float* shared, int columns, int units,
                                              int lane, int lanes, bool owner, int group,
                                              int groups, const float (&dweight)[kUnits][kWidth],
                                              const float (&dbias)[kUnits][kWidth]) {
  for (int turn = 0; turn < groups; ++turn) {
    __syncthreads();
    if (turn != group || !owner) continue;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int u = lane + i * lanes;
      if (u >= units) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int c = u * kWidth + k;
        shared[c] = dweight[i][k] + (turn > 0 ? shared[c] : 0.0f);
        shared[columns + c] = dbias[i][k] + (turn > 0 ? shared[columns + c] : 0.0f);
      }
    }
  }
  __syncthreads();
  partial += static_cast<std::int64_t>(blockIdx.x) * 2 * columns;
  for (int c = threadIdx.x; c < 2 * columns; c += blockDim.x) partial[c] = shared[c];
}

/// One unit to shared memory: asynchronously (16 bytes), or at once.
template <class T, bool kVector>
__device__ __forceinline__ void fetch_unit(Unit<T, kVector>* to, const T* from) {
  if constexpr (kVector)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
  else
    *to = read_unit<T, kVector>(from, 0);
}
/// Ends this thread's group of fetches.
__device__ __forceinline__ void commit_fetches() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// `lanes` threads share a row; a thread owns units lane, lane + lanes, ... (kUnits of them). The
/// rows that a thread will need next are on their way to shared memory while it works on one, each
/// thread fetching for itself, so that no barrier is needed for them.
template <class T, class W, bool kVector, int kUnits, int kStages, bool kWide>
__global__ void __launch_bounds__(1024)
    layer_norm_backward_kernel(Operands<T, W> o, int units, int lanes) {
  using Packed = Unit<T, kVector>;
  constexpr int kWidth = kUnitWidth<T, kVector>;
  extern __shared__ uint4 shared[];
  __shared__ float4 scratch[2][kWarp];
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
  const int columns = units * kWidth, threads = blockDim.x;
  float weight[kUnits][kWidth], dweight[kUnits][kWidth], dbias[kUnits][kWidth];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      weight[i][k] = 1;
      dweight[i][k] = dbias[i][k] = 0;
    }
    if (o.weight != nullptr && lane + i * lanes < units)
      read_floats<W, kVector>(o.weight, (lane + i * lanes) * kWidth, weight[i]);
  }

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
  const auto statistic = [&](const float* values, int row) {
    return row < o.rows ? __ldg(values + row) : 0.0f;
  };

  const int step = gridDim.x * groups;
  int row = blockIdx.x * groups + group;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(row + s * step, mine + s * stage_size);
  float next_mean = statistic(o.mean, row), next_rstd = statistic(o.rstd, row);
  // Every thread of a block makes the same number of turns: a group past the end works on nothing.
  for (int stage = 0, half = 0; row - group < o.rows; row += step, half ^= 1) {
    fetch(row + (kStages - 1) * step, mine + (stage == 0 ? kStages - 1 : stage - 1) * stage_size);
    wait_for_fetches<kStages - 1>();
    const float mean = next_mean, rstd = next_rstd;
    next_mean = statistic(o.mean, row + step);
    next_rstd = statistic(o.rstd, row + step);
    const Packed* const now = mine + stage * stage_size;

    float sum_g = 0, sum_gx = 0, sum_x = 0;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (row >= o.rows || lane + i * lanes >= units) continue;
      float vx[kWidth], vdy[kWidth];
      unpack<T>(now[i * threads], vx);
      unpack<T>(now[(kUnits + i) * threads], vdy);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float xh = (vx[k] - mean) * rstd, g = vdy[k] * weight[i][k];
        sum_g += g;
        sum_gx += g * xh;
        sum_x += xh;
      }
    }
    group_sums<kWide>(sum_g, sum_gx, sum_x, lanes, group, scratch[half]);
    const RowMeans<float> means(sum_g, sum_gx, sum_x, static_cast<float>(columns));
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (row >= o.rows || lane + i * lanes >= units) continue;
      Packed x = now[i * threads], dy = now[(kUnits + i) * threads];
      keep_packed(x);
      keep_packed(dy);
      float vx[kWidth], vdy[kWidth], extra[kWidth] = {};
      unpack<T>(x, vx);
      unpack<T>(dy, vdy);
      if (o.dsum != nullptr) unpack<T>(now[(2 * kUnits + i) * threads], extra);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float xh = (vx[k] - mean) * rstd - means.shift;
        dweight[i][k] += vdy[k] * xh;
        dbias[i][k] += vdy[k];
        vx[k] = (vdy[k] * weight[i][k] - means.g - xh * means.gx) * rstd + extra[k];
      }
      if (o.dx != nullptr)
        store_unit<T, kVector>(o.dx + static_cast<std::int64_t>(row) * columns, lane + i * lanes,
                               pack<T>(vx));
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
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
  wait_for_fetches<0>();
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
    const RowMeans<C> means(sums[0], sums[1], sums[2], static_cast<C>(o.columns));
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

/// Returns the number of blocks, or -1 if a block would need more shared memory than there is.
template <class T, class W, bool kVector, int kUnits, int kStages, bool kWide>
std::int64_t launch_kernel(cudaStream_t stream, const Operands<T, W>& o, std::int64_t columns,
                           int lanes) {
  const auto kernel = layer_norm_backward_kernel<T, W, kVector, kUnits, kStages, kWide>;
  const int groups = std::max(1, 512 / lanes), threads = lanes * groups;
  const std::size_t staged = sizeof(Unit<T, kVector>) * kUnits * kStages *
                             (o.dsum != nullptr ? 3 : 2) * static_cast<std::size_t>(threads);
  const std::size_t partial = o.partial != nullptr ? 2 * columns * sizeof(float) : 0;
  const std::size_t shared = std::max(staged, partial);
  if (shared + 1024 > static_cast<std::size_t>(shared_memory_per_block())) return -1;
  if (shared > 40 * 1024)
    MT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(shared)));
  int resident = 1;
  MT_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared));
  const std::int64_t most =
      std::int64_t{std::clamp(resident, 1, kMaxBlocksPerMultiprocessor)} * multiprocessors();
  const std::int64_t blocks = std::min(ceil_div<std::int64_t>(o.rows, groups), most);
  cuda::launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), shared, stream, o,
               static_cast<int>(columns) / kUnitWidth<T, kVector>, lanes);
  return blocks;
}

/// Returns the number of blocks, or -1 if the row is too long.
template <class T, class W, bool kVector>
std::int64_t launch_rows(cudaStream_t stream, const Operands<T, W>& o, std::int64_t columns) {
  constexpr int kUnits = kVector ? 1 : kPerVector<T>;
  const std::int64_t units = ceil_div<std::int64_t>(columns, kPerVector<T>);
  const std::int64_t warps = ceil_div<std::int64_t>(units, kWarp);
  if (warps == 1)
    return launch_kernel<T, W, kVector, kUnits, 3, false>(stream, o, columns, ceil_pow2(units));
  if (warps <= kWarp)
    return launch_kernel<T, W, kVector, kUnits, 3, true>(stream, o, columns,
                                                         static_cast<int>(warps) * kWarp);
  if constexpr (kVector && sizeof(T) == 4)
    if (warps <= 2 * kWarp)
      return launch_kernel<T, W, kVector, 2, 2, true>(
          stream, o, columns, static_cast<int>(ceil_div<std::int64_t>(warps, 2)) * kWarp);
  return -1;
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
  const auto run = [&]<class W>(TypeTag<W>) {
    const Operands<T, W> o{a.dx.ptr<T>(),       a.dy.ptr<T>(),     a.dsum.ptr<T>(),
                           a.x.ptr<T>(),        a.weight.ptr<W>(), a.mean.ptr<float>(),
                           a.rstd.ptr<float>(), partial,           static_cast<int>(shape.rows)};
    return vector ? launch_rows<T, W, true>(stream, o, shape.columns)
                  : launch_rows<T, W, false>(stream, o, shape.columns);
  };
  return is_float(a.weight) ? run(TypeTag<float>{}) : run(TypeTag<T>{});
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
