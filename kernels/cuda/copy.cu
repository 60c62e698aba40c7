// Copies and conversions. Dense copies of one dtype are the runtime's; conversions are the identity
// as an elementwise formula. Strided copies of one dtype move words of the widest size that both
// layouts allow, and those whose contiguous dimensions differ go through tiles in shared memory, so
// that both sides are touched in whole sectors.
#include <algorithm>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/iteration_space.h"

namespace mixtape::kernels::cuda {

namespace {

using Space = IterationSpace<2>;  // out, x

struct Identity {
  static constexpr int kInputs = 1;
  static constexpr bool kIntegral = true;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[1]) const {
    return x[0];
  }
};

// ---- strided, one dtype

struct alignas(16) Word16 {
  std::uint64_t low, high;
};

constexpr int kCopyThreads = 256, kCopyItems = 4;

struct CopyArgs {
  void* out;
  const void* x;
  std::int32_t dims;
  std::uint32_t words;
  FastDivide sizes[kMaxDims];
  std::int32_t out_strides[kMaxDims], x_strides[kMaxDims];  // in words
};

template <class Word>
__global__ void __launch_bounds__(kCopyThreads) copy_strided_kernel(CopyArgs args) {
  const std::uint32_t first = blockIdx.x * (kCopyThreads * kCopyItems) + threadIdx.x;
  std::int32_t to[kCopyItems] = {}, from[kCopyItems] = {};
#pragma unroll
  for (int u = 0; u < kCopyItems; ++u) {
    std::uint32_t rest = first + u * kCopyThreads;
    if (rest >= args.words) rest = 0;
#pragma unroll
    for (int d = 0; d < kMaxDims; ++d) {
      if (d >= args.dims) break;
      std::uint32_t index = rest;
      if (d + 1 < args.dims) rest = args.sizes[d].divide(index);
      to[u] += static_cast<std::int32_t>(index) * args.out_strides[d];
      from[u] += static_cast<std::int32_t>(index) * args.x_strides[d];
    }
  }
  Word words[kCopyItems];
#pragma unroll
  for (int u = 0; u < kCopyItems; ++u) words[u] = static_cast<const Word*>(args.x)[from[u]];
#pragma unroll
  for (int u = 0; u < kCopyItems; ++u)
    if (first + u * kCopyThreads < args.words) static_cast<Word*>(args.out)[to[u]] = words[u];
}

/// Bytes of the widest word that both layouts of the space consist of.
std::int64_t word_bytes(const Space& space) {
  const auto element = static_cast<std::int64_t>(size_of(space.dtypes[0]));
  if (space.dims == 0 || space.strides[0][0] != 1 || space.strides[1][0] != 1) return element;
  std::int64_t bits = space.sizes[0] * element;
  for (int k = 0; k < 2; ++k) {
    bits |= static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(space.data[k]));
    for (int d = 1; d < space.dims; ++d) bits |= space.strides[k][d] * element;
  }
  return std::max(element, std::min<std::int64_t>(16, bits & -bits));
}

void copy_strided(const Stream& stream, const Space& space) {
  const std::int64_t bytes = word_bytes(space);
  const std::int64_t per_word = bytes / static_cast<std::int64_t>(size_of(space.dtypes[0]));
  CopyArgs args;
  args.out = space.data[0];
  args.x = space.data[1];
  args.dims = space.dims;
  args.words = static_cast<std::uint32_t>(space.numel() / per_word);
  for (int d = 0; d < space.dims; ++d) {
    args.sizes[d] = FastDivide(d == 0 ? space.sizes[0] / per_word : space.sizes[d]);
    const std::int64_t unit = d == 0 ? 1 : per_word;
    args.out_strides[d] = static_cast<std::int32_t>(space.strides[0][d] / unit);
    args.x_strides[d] = static_cast<std::int32_t>(space.strides[1][d] / unit);
  }
  const dim3 grid(blocks_for(args.words, kCopyThreads * kCopyItems)), block(kCopyThreads);
  const cudaStream_t queue = native_stream(stream);
  switch (bytes) {
    case 1: return launch(copy_strided_kernel<std::uint8_t>, grid, block, 0, queue, args);
    case 2: return launch(copy_strided_kernel<std::uint16_t>, grid, block, 0, queue, args);
    case 4: return launch(copy_strided_kernel<std::uint32_t>, grid, block, 0, queue, args);
    case 8: return launch(copy_strided_kernel<std::uint64_t>, grid, block, 0, queue, args);
    default: return launch(copy_strided_kernel<Word16>, grid, block, 0, queue, args);
  }
}

// ---- transposed

constexpr int kTile = 64;

/// out[.., j, i] = x[.., i, j]-like problems: i is contiguous in out, j in x; the others are a
/// batch.
struct TransposeArgs {
  void* out;
  const void* x;
  Dtype out_dtype, x_dtype;           // used where elements are converted
  std::int64_t out_stride, x_stride;  // of j in out, of i in x
  std::int32_t rows, columns;         // extent of j, of i
  std::int32_t row_tiles, column_tiles;
  std::int32_t batch_dims;
  std::int32_t batch_sizes[kMaxDims];
  std::int64_t out_batch[kMaxDims], x_batch[kMaxDims];
};

/// Raw: an unsigned type of the elements' size, or float to convert between two dtypes.
template <class Raw>
__global__ void __launch_bounds__(256) copy_transposed_kernel(TransposeArgs args) {
  constexpr int kPad = sizeof(Raw) < 4 ? 4 / sizeof(Raw) : 1;  // no two rows on one bank
  constexpr bool kConvert = std::is_same_v<Raw, float>;
  __shared__ Raw tile[kTile][kTile + kPad];
  std::uint32_t rest = blockIdx.x;
  const int i0 = static_cast<int>(rest % args.column_tiles) * kTile;
  rest /= args.column_tiles;
  const int j0 = static_cast<int>(rest % args.row_tiles) * kTile;
  rest /= args.row_tiles;
  std::int64_t to = 0, from = 0;
  for (int d = 0; d < args.batch_dims; ++d) {
    const std::uint32_t index = rest % args.batch_sizes[d];
    rest /= args.batch_sizes[d];
    to += index * args.out_batch[d];
    from += index * args.x_batch[d];
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < kTile; r += 8) {
#pragma unroll
    for (int c = 0; c < kTile; c += 32) {
      const int i = i0 + r + warp, j = j0 + c + lane;
      if (i >= args.columns || j >= args.rows) continue;
      const std::int64_t at = from + i * args.x_stride + j;
      if constexpr (kConvert)
        tile[r + warp][c + lane] = load_as<float>(args.x, args.x_dtype, at);
      else
        tile[r + warp][c + lane] = static_cast<const Raw*>(args.x)[at];
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kTile; r += 8) {
#pragma unroll
    for (int c = 0; c < kTile; c += 32) {
      const int j = j0 + r + warp, i = i0 + c + lane;
      if (i >= args.columns || j >= args.rows) continue;
      const std::int64_t at = to + j * args.out_stride + i;
      if constexpr (kConvert)
        store_as(args.out, args.out_dtype, at, tile[c + lane][r + warp]);
      else
        static_cast<Raw*>(args.out)[at] = tile[c + lane][r + warp];
    }
  }
}

/// The dimension that is contiguous in x where another one is in out and both are long enough for
/// tiles; -1 where there is none.
int transposed_dim(const Space& space) {
  constexpr std::int64_t kShort = 8;
  if (space.dims < 2 || space.strides[0][0] != 1 || space.strides[1][0] <= 1) return -1;
  if (space.sizes[0] < kShort || space.sizes[0] > INT32_MAX) return -1;
  for (int d = 1; d < space.dims; ++d)
    if (space.strides[1][d] == 1 && space.sizes[d] >= kShort && space.sizes[d] <= INT32_MAX)
      return d;
  return -1;
}

bool copy_transposed(const Stream& stream, const Space& space, bool convert) {
  const int row_dim = transposed_dim(space);
  if (row_dim < 0) return false;
  TransposeArgs args{};
  args.out = space.data[0];
  args.x = space.data[1];
  args.out_dtype = space.dtypes[0];
  args.x_dtype = space.dtypes[1];
  args.out_stride = space.strides[0][row_dim];
  args.x_stride = space.strides[1][0];
  args.columns = static_cast<std::int32_t>(space.sizes[0]);
  args.rows = static_cast<std::int32_t>(space.sizes[row_dim]);
  args.column_tiles = ceil_div(args.columns, kTile);
  args.row_tiles = ceil_div(args.rows, kTile);
  std::int64_t tiles = static_cast<std::int64_t>(args.column_tiles) * args.row_tiles;
  for (int d = 1; d < space.dims; ++d) {
    if (d == row_dim) continue;
    if (space.sizes[d] > INT32_MAX) return false;
    args.batch_sizes[args.batch_dims] = static_cast<std::int32_t>(space.sizes[d]);
    args.out_batch[args.batch_dims] = space.strides[0][d];
    args.x_batch[args.batch_dims++] = space.strides[1][d];
    tiles *= space.sizes[d];
  }
  if (tiles > kMaxGridX) return false;
  const dim3 grid(static_cast<unsigned>(tiles)), block(256);
  const cudaStream_t queue = native_stream(stream);
  if (convert) {
    launch(copy_transposed_kernel<float>, grid, block, 0, queue, args);
    return true;
  }
  switch (size_of(space.dtypes[0])) {
    case 1: launch(copy_transposed_kernel<std::uint8_t>, grid, block, 0, queue, args); break;
    case 2: launch(copy_transposed_kernel<std::uint16_t>, grid, block, 0, queue, args); break;
    case 4: launch(copy_transposed_kernel<std::uint32_t>, grid, block, 0, queue, args); break;
    default: launch(copy_transposed_kernel<std::uint64_t>, grid, block, 0, queue, args);
  }
  return true;
}

/// Arithmetic type that holds every value of `from`.
Dtype exact_compute(Dtype from) {
  if (from == Dtype::u8 || from == Dtype::b8) return Dtype::f32;
  return compute_dtype(from);
}

}  // namespace

void copy(const Stream& stream, View out, View x) {
  const View* const views[2] = {&out, &x};
  const Space space = make_iteration_space("copy", views);
  const std::int64_t n = space.numel();
  if (n == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const Dtype compute = exact_compute(x.dtype);
  if (out.dtype != x.dtype) {
    if (compute == Dtype::f32 && copy_transposed(stream, space, /*convert=*/true)) return;
    const Operand in[1] = {x};
    return elementwise(stream, "copy", compute, Identity{}, out, in);
  }
  if (space.contiguous()) {
    if (out.data == x.data) return;
    MT_CUDA_CHECK(cudaMemcpyAsync(out.data, x.data, static_cast<std::size_t>(n) * size_of(x.dtype),
                                  cudaMemcpyDeviceToDevice, native_stream(stream)));
    return;
  }
  if (copy_transposed(stream, space, /*convert=*/false)) return;
  for_each_piece(space, [&](const Space& piece) { copy_strided(stream, piece); });
}

void fill(const Stream& stream, View out, Scalar value) {
  const Operand in[1] = {value};
  elementwise(stream, "fill", exact_compute(out.dtype), Identity{}, out, in);
}

}  // namespace mixtape::kernels::cuda
