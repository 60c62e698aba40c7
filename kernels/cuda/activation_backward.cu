// dz = dy * act'(saved) and dbias = column sums of dz in one pass over dy.
//
// A block owns a strip of columns and a chunk of rows, keeps its columns' sums in registers and
// adds them up over its threads in a fixed order; chunks leave partial sums for column_sums. The
// chunking depends on the shape alone, so results are deterministic. Sums are of the unrounded
// products, in float (double for f64).
#include <algorithm>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/matmul.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kWideStrip = 256, kNarrowStrip = 64;  // columns of a block
constexpr std::int64_t kOneChunkRows = 512;                  // up to here one launch beats two
constexpr std::int64_t kMaxChunks = 512;
constexpr std::int64_t kTargetBlocks = 4096;  // a block is short beside the whole kernel
constexpr std::int64_t kRowsPerStep = 64;     // of a block of 16-bit vectors, with a full batch

struct Chunks {
  std::int64_t count, rows;  // rows of each but the last
};

Chunks chunks_of(std::int64_t rows, std::int64_t columns) {
  if (rows <= kOneChunkRows) return {1, rows};
  const std::int64_t strips = (columns + kWideStrip - 1) / kWideStrip;
  const std::int64_t wanted = std::clamp<std::int64_t>(kTargetBlocks / strips, 1, kMaxChunks);
  const std::int64_t each =
      ((rows + wanted - 1) / wanted + kRowsPerStep - 1) / kRowsPerStep * kRowsPerStep;
  return {(rows + each - 1) / each, each};
}

struct Matrix {
  void* data;
  std::int64_t row, column;  // strides
  Dtype dtype;
};

struct Backward {
  Matrix dz, dy, saved;  // dz.data and saved.data may be null
  std::int64_t rows, columns, rows_per_chunk;
  void* partials;  // (chunks, columns) of the compute type, or null
  void* dbias;     // written here if there is one chunk; or null
  std::int64_t dbias_stride;
  Dtype dbias_dtype;
  float beta;
};

template <class C>
__device__ void store_sum(const Backward& x, std::int64_t column, C sum) {
  if (x.partials != nullptr) {
    static_cast<C*>(x.partials)[blockIdx.y * x.columns + column] = sum;
  } else {
    const std::int64_t i = column * x.dbias_stride;
    if (x.beta != 0) sum += static_cast<C>(x.beta) * load_as<C>(x.dbias, x.dbias_dtype, i);
    store_as(x.dbias, x.dbias_dtype, i, sum);
  }
}

/// Adds `sums`, kWidth columns of each thread, over the block's threads of one lane, and stores
/// them.
template <class C, int kWidth, int kLanes>
__device__ void reduce_block(const Backward& x, const C (&sums)[kWidth]) {
  constexpr int kColumns = kLanes * kWidth, kGroups = kThreads / kLanes;
  __shared__ C shared[kGroups][kColumns];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) shared[group][lane * kWidth + i] = sums[i];
  __syncthreads();
  for (int c = threadIdx.x; c < kColumns; c += kThreads) {
    const std::int64_t column = std::int64_t{blockIdx.x} * kColumns + c;
    if (column >= x.columns) break;
    C sum = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) sum += shared[g][c];
    store_sum(x, column, sum);
  }
}

/// Rows of 16-byte vectors of one dtype: float, Half or BFloat16.
template <class T, Activation kActivation, int kLanes>
__global__ void __launch_bounds__(kThreads) activation_backward_rows_kernel(Backward x) {
  constexpr int kWidth = kPerVector<T>, kGroups = kThreads / kLanes;
  constexpr bool kSaved = kActivation != Activation::none;
  constexpr int kUnroll = kSaved ? 4 : 8;  // rows: eight vectors in flight either way
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const std::int64_t column = (std::int64_t{blockIdx.x} * kLanes + lane) * kWidth;
  const std::int64_t begin = std::int64_t{blockIdx.y} * x.rows_per_chunk;
  const std::int64_t end = min(begin + x.rows_per_chunk, x.rows);
  float sums[kWidth] = {};
  if (column < x.columns) {
    const T* dy = static_cast<const T*>(x.dy.data) + column;
    const T* saved = static_cast<const T*>(x.saved.data) + column;
    T* dz = static_cast<T*>(x.dz.data) + column;
    for (std::int64_t r = begin + group; r < end; r += kGroups * kUnroll) {
      uint4 g[kUnroll], s[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t row = r + u * kGroups;
        if (row >= end) continue;
        g[u] = *reinterpret_cast<const uint4*>(dy + row * x.dy.row);
        if (kSaved) s[u] = *reinterpret_cast<const uint4*>(saved + row * x.saved.row);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t row = r + u * kGroups;
        if (row >= end) continue;
        float d[kWidth], z[kWidth] = {};
        unpack<T>(g[u], d);
        if (kSaved) unpack<T>(s[u], z);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          d[i] = ActivationFunctor<kActivation, T>::derivative(d[i], z[i]);
          sums[i] += d[i];
        }
        if (x.dz.data != nullptr) store_vector(dz + row * x.dz.row, pack<T>(d));
      }
    }
  }
  if (x.partials != nullptr || x.dbias != nullptr) reduce_block<float, kWidth, kLanes>(x, sums);
}

/// Any dtypes and strides: one column a lane.
template <class C, Activation kActivation>
__global__ void __launch_bounds__(kThreads) activation_backward_strided_kernel(Backward x) {
  constexpr int kLanes = 32, kGroups = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const std::int64_t column = std::int64_t{blockIdx.x} * kLanes + lane;
  const std::int64_t begin = std::int64_t{blockIdx.y} * x.rows_per_chunk;
  const std::int64_t end = min(begin + x.rows_per_chunk, x.rows);
  C sums[1] = {};
  if (column < x.columns) {
    for (std::int64_t r = begin + group; r < end; r += kGroups) {
      const C dy = load_as<C>(x.dy.data, x.dy.dtype, r * x.dy.row + column * x.dy.column);
      C saved = 0;
      if (kActivation != Activation::none)
        saved = load_as<C>(x.saved.data, x.saved.dtype, r * x.saved.row + column * x.saved.column);
      const C d = ActivationFunctor<kActivation, C>::derivative(dy, saved);
      sums[0] += d;
      if (x.dz.data != nullptr)
        store_as(x.dz.data, x.dz.dtype, r * x.dz.row + column * x.dz.column, d);
    }
  }
  if (x.partials != nullptr || x.dbias != nullptr) reduce_block<C, 1, kLanes>(x, sums);
}

Matrix matrix_of(const View& v) {
  if (!v) return {};
  return {v.data, v.stride(0), v.stride(1), v.dtype};
}

bool vectors(const Matrix& m, Dtype dtype, std::int64_t columns) {
  const std::int64_t width = 16 / static_cast<std::int64_t>(size_of(dtype));
  return m.data == nullptr || (m.dtype == dtype && m.column == 1 && m.row % width == 0 &&
                               columns % width == 0 && aligned(m.data, 16));
}

template <class T, Activation kActivation>
void launch_backward(const Backward& x, const Chunks& chunks, cudaStream_t stream) {
  const auto grid = [&](std::int64_t strip) {
    return dim3(blocks_for(x.columns, strip), static_cast<unsigned>(chunks.count));
  };
  if constexpr (!std::is_same_v<T, double>) {
    constexpr int kWide = kWideStrip / kPerVector<T>, kNarrow = kNarrowStrip / kPerVector<T>;
    const Dtype dtype = dtype_of<T>;
    if (vectors(x.dz, dtype, x.columns) && vectors(x.dy, dtype, x.columns) &&
        vectors(x.saved, dtype, x.columns)) {
      if (chunks.count > 1)
        launch(activation_backward_rows_kernel<T, kActivation, kWide>, grid(kWideStrip), kThreads,
               0, stream, x);
      else
        launch(activation_backward_rows_kernel<T, kActivation, kNarrow>, grid(kNarrowStrip),
               kThreads, 0, stream, x);
      return;
    }
  }
  launch(activation_backward_strided_kernel<compute_t<T>, kActivation>, grid(32), kThreads, 0,
         stream, x);
}

void check_arguments(Activation activation, const View& dz, const View& dbias, const View& dy,
                     const View& saved) {
  MT_CHECK(dy.dim() == 2, "activation_backward: expected dy of 2 dimensions, got ", dy.sizes);
  MT_CHECK(activation == Activation::none || (saved && dz),
           "activation_backward: expected dz and saved with an activation");
  MT_CHECK(!dz || dz.sizes == dy.sizes, "activation_backward: expected dz of ", dy.sizes, ", got ",
           dz.sizes);
  MT_CHECK(!saved || saved.sizes == dy.sizes, "activation_backward: expected saved of ", dy.sizes,
           ", got ", saved.sizes);
  MT_CHECK(!dbias || (dbias.dim() == 1 && dbias.size(0) == dy.size(1)),
           "activation_backward: expected dbias of ", dy.size(1), " elements, got ", dbias.sizes);
}

}  // namespace

std::size_t activation_backward_workspace_bytes(std::int64_t rows, std::int64_t columns) {
  const Chunks chunks = chunks_of(rows, columns);
  return chunks.count == 1 ? 0 : static_cast<std::size_t>(chunks.count * columns) * sizeof(double);
}

void activation_backward(const Stream& stream, Activation activation, View dz, View dbias,
                         float beta, View dy, View saved, Workspace workspace) {
  check_arguments(activation, dz, dbias, dy, saved);
  if (dy.size(1) == 0) return;
  const CudaDeviceGuard device(stream.device());
  const cudaStream_t queue = native_stream(stream);
  const Chunks chunks = chunks_of(dy.size(0), dy.size(1));
  Backward x{};
  x.dz = matrix_of(dz);
  x.dy = matrix_of(dy);
  x.saved = activation == Activation::none ? Matrix{} : matrix_of(saved);
  x.rows = dy.size(0);
  x.columns = dy.size(1);
  x.rows_per_chunk = chunks.rows;
  x.beta = beta;
  if (dbias) {
    x.dbias = dbias.data;
    x.dbias_stride = dbias.stride(0);
    x.dbias_dtype = dbias.dtype;
    if (chunks.count > 1) {
      const std::size_t needed = activation_backward_workspace_bytes(x.rows, x.columns);
      MT_CHECK(workspace.bytes >= needed, "activation_backward: expected a workspace of ", needed,
               " bytes, got ", workspace.bytes);
      x.partials = workspace.data;
    }
  }
  dispatch_floating("activation_backward", dy.dtype, [&](auto tag) {
    dispatch_activation(activation, [&](auto which) {
      launch_backward<typename decltype(tag)::type, decltype(which)::value>(x, chunks, queue);
    });
  });
  if (x.partials != nullptr)
    column_sums(stream, dbias, beta, x.partials, dy.dtype == Dtype::f64, chunks.count);
}

}  // namespace mixtape::kernels::cuda
