// index_select and gather: one index space over (out, x without the indexed dimension, index); the
// loaded index adds its stride to x's offset. Same dtype: words as wide as the layouts allow (16
// bytes for embedding rows); else one element at a time with a conversion.
#include <algorithm>

#include "kernels/cuda/device_error.cuh"
#include "kernels/cuda/fast_divide.cuh"
#include "kernels/cuda/iteration_space.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/index.h"

namespace mixtape::kernels::cuda {

namespace {

using Space = IterationSpace<3>;  // out, x, index

constexpr int kThreads = 256, kItems = 4;

struct alignas(16) Word16 {
  std::uint64_t low, high;
};

struct GatherArgs {
  void* out;
  const void* x;
  const void* index;
  Dtype out_dtype, x_dtype, index_dtype;
  std::int32_t dims;
  std::uint32_t numel;  // in words, as are the strides of out and x
  FastDivide sizes[kMaxDims];
  std::int32_t strides[3][kMaxDims];
  std::int64_t step;   // x's stride in the indexed dimension
  std::int64_t bound;  // its size
  ErrorTarget error;
};

/// Offsets of a thread's items: in out, and in x or -1 where the index is out of range.
__device__ __forceinline__ void gather_offsets(const GatherArgs& args, std::uint32_t first,
                                               std::int32_t (&to)[kItems],
                                               std::int64_t (&from)[kItems]) {
  std::int32_t base[kItems] = {}, at[kItems] = {};
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    to[u] = 0;
    std::uint32_t rest = first + u * kThreads;
    if (rest >= args.numel) rest = 0;
#pragma unroll
    for (int d = 0; d < kMaxDims; ++d) {
      if (d >= args.dims) break;
      std::uint32_t i = rest;
      if (d + 1 < args.dims) rest = args.sizes[d].divide(i);
      to[u] += static_cast<std::int32_t>(i) * args.strides[0][d];
      base[u] += static_cast<std::int32_t>(i) * args.strides[1][d];
      at[u] += static_cast<std::int32_t>(i) * args.strides[2][d];
    }
  }
  std::int64_t index[kItems];
#pragma unroll
  for (int u = 0; u < kItems; ++u) index[u] = load_index(args.index, args.index_dtype, at[u]);
#pragma unroll
  for (int u = 0; u < kItems; ++u)
    from[u] = check_index(args.error, index[u], args.bound) ? base[u] + index[u] * args.step : -1;
}

template <class Word>
__global__ void __launch_bounds__(kThreads) gather_words_kernel(GatherArgs args) {
  const std::uint32_t first = blockIdx.x * (kThreads * kItems) + threadIdx.x;
  std::int32_t to[kItems];
  std::int64_t from[kItems];
  gather_offsets(args, first, to, from);
  Word words[kItems];
#pragma unroll
  for (int u = 0; u < kItems; ++u)
    words[u] = from[u] >= 0 ? static_cast<const Word*>(args.x)[from[u]] : Word{};
#pragma unroll
  for (int u = 0; u < kItems; ++u)
    if (first + u * kThreads < args.numel) static_cast<Word*>(args.out)[to[u]] = words[u];
}

/// C: an arithmetic type that holds every value of x's dtype.
template <class C>
__global__ void __launch_bounds__(kThreads) gather_convert_kernel(GatherArgs args) {
  const std::uint32_t first = blockIdx.x * (kThreads * kItems) + threadIdx.x;
  std::int32_t to[kItems];
  std::int64_t from[kItems];
  gather_offsets(args, first, to, from);
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    if (first + u * kThreads >= args.numel) return;
    const C value = from[u] >= 0 ? load_as<C>(args.x, args.x_dtype, from[u]) : C(0);
    store_as(args.out, args.out_dtype, to[u], value);
  }
}

/// Bytes of the widest word that out and x consist of, rows apart by `step` elements included.
std::int64_t word_bytes(const Space& space, std::int64_t step) {
  const auto element = static_cast<std::int64_t>(size_of(space.dtypes[0]));
  if (space.dims == 0 || space.strides[0][0] != 1 || space.strides[1][0] != 1 ||
      space.strides[2][0] != 0)
    return element;
  std::int64_t bits = space.sizes[0] * element;
  for (int k = 0; k < 2; ++k) {
    bits |= static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(space.data[k]));
    for (int d = 1; d < space.dims; ++d) bits |= space.strides[k][d] * element;
  }
  bits |= step * element;
  return std::max(element, std::min<std::int64_t>(16, bits & -bits));
}

void launch_gather(const Stream& stream, GatherArgs args, const Space& space) {
  const bool convert = space.dtypes[0] != space.dtypes[1];
  const auto element = static_cast<std::int64_t>(size_of(space.dtypes[0]));
  const std::int64_t bytes = convert ? element : word_bytes(space, args.step);
  const std::int64_t per_word = bytes / element;
  args.out = space.data[0];
  args.x = space.data[1];
  args.index = space.data[2];
  args.dims = space.dims;
  args.numel = static_cast<std::uint32_t>(space.numel() / per_word);
  args.step /= per_word;
  for (int d = 0; d < space.dims; ++d) {
    args.sizes[d] = FastDivide(d == 0 ? space.sizes[0] / per_word : space.sizes[d]);
    for (int k = 0; k < 3; ++k)
      args.strides[k][d] = static_cast<std::int32_t>(
          d == 0 || k == 2 ? space.strides[k][d] : space.strides[k][d] / per_word);
  }
  const dim3 grid(blocks_for(args.numel, kThreads * kItems)), block(kThreads);
  const cudaStream_t queue = native_stream(stream);
  if (convert) {
    switch (compute_dtype(args.x_dtype)) {
      case Dtype::f32: return launch(gather_convert_kernel<float>, grid, block, 0, queue, args);
      case Dtype::f64: return launch(gather_convert_kernel<double>, grid, block, 0, queue, args);
      default: return launch(gather_convert_kernel<std::int64_t>, grid, block, 0, queue, args);
    }
  }
  switch (bytes) {
    case 1: return launch(gather_words_kernel<std::uint8_t>, grid, block, 0, queue, args);
    case 2: return launch(gather_words_kernel<std::uint16_t>, grid, block, 0, queue, args);
    case 4: return launch(gather_words_kernel<std::uint32_t>, grid, block, 0, queue, args);
    case 8: return launch(gather_words_kernel<std::uint64_t>, grid, block, 0, queue, args);
    default: return launch(gather_words_kernel<Word16>, grid, block, 0, queue, args);
  }
}

/// x and index as they are stepped through by out's index: x without its indexed dimension.
void gather_from(const Stream& stream, const char* op, const View& out, const View& x, int dim,
                 const View& index) {
  MT_CHECK(index.dtype == Dtype::i64 || index.dtype == Dtype::i32, op,
           ": expected an index of dtype int64 or int32, got ", index.dtype);
  View base = x;
  base.sizes = out.sizes;
  if (base.strides.size() > 0) base.strides[dim] = 0;
  const View* const views[3] = {&out, &base, &index};
  const Space space = make_iteration_space(op, views);
  if (space.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  GatherArgs args{};
  args.out_dtype = out.dtype;
  args.x_dtype = x.dtype;
  args.index_dtype = index.dtype;
  args.step = x.dim() > 0 ? x.strides[dim] : 0;
  args.bound = x.dim() > 0 ? x.sizes[dim] : 1;
  args.error = error_target(stream, op);
  for_each_piece(space, [&](const Space& piece) { launch_gather(stream, args, piece); });
}

}  // namespace

void index_select(const Stream& stream, const char* op, View out, View x, int dim, View index) {
  MT_CHECK_EQ(index.dim(), 1, op, ": dimensions of the index");
  MT_CHECK_EQ(out.dim(), x.dim(), op, ": dimensions of the output");
  MT_CHECK(out.sizes[dim] == index.sizes[0], op, ": expected an output of ", index.sizes[0],
           " rows in dimension ", dim, ", got ", out.sizes);
  for (int d = 0; d < out.dim(); ++d)
    MT_CHECK(d == dim || out.sizes[d] == x.sizes[d], op, ": expected an output of x's sizes ",
             x.sizes, " except in dimension ", dim, ", got ", out.sizes);
  // The index as a view of out's dimensions: it varies along `dim` only.
  View rows = index;
  rows.sizes = Shape::filled(out.dim(), 1);
  rows.strides = Shape::filled(out.dim(), 0);
  rows.sizes[dim] = index.sizes[0];
  rows.strides[dim] = index.strides[0];
  gather_from(stream, op, out, x, dim, rows);
}

void gather(const Stream& stream, const char* op, View out, View x, int dim, View index) {
  MT_CHECK_EQ(out.sizes, index.sizes, op, ": sizes of the output");
  MT_CHECK_EQ(index.dim(), x.dim(), op, ": dimensions of the index");
  for (int d = 0; d < x.dim(); ++d)
    MT_CHECK(d == dim || index.sizes[d] <= x.sizes[d], op, ": expected an index no larger than ",
             x.sizes, " except in dimension ", dim, ", got ", index.sizes);
  gather_from(stream, op, out, x, dim, index);
}

}  // namespace mixtape::kernels::cuda
