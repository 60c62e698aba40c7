// index_add and scatter_add: the same problem, "item i is added to destination key(i)", for rows
// and for single elements.
//
// Pairs (key, item) are sorted stably, so that all items of a destination lie side by side in their
// own order; each run of equal keys is then summed in float and rounded once. Sorted positions are
// cut into chunks: runs inside a chunk are finished there, parts of runs that cross a boundary go
// to the workspace and are added by a second kernel. No atomics: the order of additions follows
// from the indices alone.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cuda/device_error.cuh"
#include "kernels/cuda/dim_map.h"
#include "kernels/cuda/index_sort.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/elementwise.h"
#include "kernels/index.h"

namespace mixtape::kernels::cuda {

namespace {

constexpr int kThreads = 256;
// Of one launch. Keys are 32 bits, one value of which is "no destination".
constexpr std::int64_t kMaxKeys = 0xFFFFFFFFll, kMaxItems = 0x7FFFFFFFll;

/// Items and destinations of one launch: items [first_item, first_item + item_count) go to
/// destinations [first_key, first_key + key_count). Each is `column_count` elements.
struct AddProblem {
  DimMap items;    // item -> offsets of (index, src)
  DimMap keys;     // destination -> offset of out
  DimMap columns;  // column -> offsets of (out, src)
  const void* index;
  const void* src;
  void* out;
  Dtype index_dtype, src_dtype, out_dtype;
  std::int64_t item_count, key_count, column_count, first_item, first_key;
  std::int64_t line_items, rows;  // key(i) = i / line_items * rows + index
  std::int64_t padding_index;
  float beta;
  ErrorTarget error;
};

/// The workspace's parts. Sizes follow from (count, width) alone.
struct AddScratch {
  std::uint32_t *keys_in, *keys, *items_in, *items;
  void* sort;
  std::size_t sort_bytes;
  void*
      partial;  // [chunks][2][columns]: the part of a run from before the chunk, and into the next
};

/// Sorted positions of one chunk: longer for long inputs, so that few runs cross; short where one
/// thread has only one column to work on.
std::int64_t chunk_size(std::int64_t count, std::int64_t width) {
  if (width < 32) return 32;
  const auto root = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(count)));
  return static_cast<std::int64_t>(std::clamp<std::uint64_t>(std::bit_ceil(root) / 2, 16, 256));
}

std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

std::size_t scratch_layout(std::int64_t count, std::int64_t width, void* data,
                           AddScratch* scratch) {
  std::size_t used = 0;
  const auto take = [&](std::size_t bytes) {
    void* p = static_cast<char*>(data) + used;
    used += padded(bytes);
    return p;
  };
  AddScratch s;
  const std::size_t words = static_cast<std::size_t>(count) * sizeof(std::uint32_t);
  s.keys_in = static_cast<std::uint32_t*>(take(words));
  s.keys = static_cast<std::uint32_t*>(take(words));
  s.items_in = static_cast<std::uint32_t*>(take(words));
  s.items = static_cast<std::uint32_t*>(take(words));
  s.sort_bytes = sort_scratch_bytes(count);
  s.sort = take(s.sort_bytes);
  const std::int64_t chunks = ceil_div(count, chunk_size(count, width));
  s.partial = take(static_cast<std::size_t>(chunks * 2 * width) * sizeof(double));
  if (scratch != nullptr) *scratch = s;
  return used;
}

// ---- keys

__global__ void __launch_bounds__(kThreads)
    index_keys_kernel(AddProblem p, std::uint32_t* keys, std::uint32_t* items) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.item_count) return;
  std::int64_t offset[1];
  p.items.offsets(p.first_item + i, offset);
  const std::int64_t row = load_index(p.index, p.index_dtype, offset[0]);
  std::uint32_t key = static_cast<std::uint32_t>(p.key_count);  // none
  if (row != p.padding_index && check_index(p.error, row, p.rows))
    key = static_cast<std::uint32_t>(i / p.line_items * p.rows + row);
  keys[i] = key;
  items[i] = static_cast<std::uint32_t>(i);
}

// ---- sums of runs

struct AddArgs {
  AddProblem p;
  const std::uint32_t* keys;
  const std::uint32_t* items;
  void* partial;
  std::int32_t chunk, lanes;   // positions of a chunk; threads across columns (a power of two)
  std::int64_t chunks, tiles;  // blockIdx.x is a group of chunks times `tiles` plus a column tile
};

/// kWidth columns from `offset`; wide ones are one access (4-byte or 2-byte floats).
template <class C, int kWidth>
__device__ __forceinline__ void load_columns(const void* data, Dtype t, std::int64_t offset,
                                             C (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    x[0] = load_as<C>(data, t, offset);
  } else if (t == Dtype::f32) {
    const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(data) + offset);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    const uint2 v =
        *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(data) + offset);
    const bool half = t == Dtype::f16;
    const float2 a = half ? unpack_pair<Half>(v.x) : unpack_pair<BFloat16>(v.x);
    const float2 b = half ? unpack_pair<Half>(v.y) : unpack_pair<BFloat16>(v.y);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  }
}

template <class C, int kWidth>
__device__ __forceinline__ void store_columns(void* data, Dtype t, std::int64_t offset,
                                              const C (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    store_as(data, t, offset, x[0]);
  } else if (t == Dtype::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + offset) =
        make_float4(x[0], x[1], x[2], x[3]);
  } else {
    const bool half = t == Dtype::f16;
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(data) + offset) =
        half ? make_uint2(pack_pair<Half>(x[0], x[1]), pack_pair<Half>(x[2], x[3]))
             : make_uint2(pack_pair<BFloat16>(x[0], x[1]), pack_pair<BFloat16>(x[2], x[3]));
  }
}

template <class C, int kWidth>
__device__ __forceinline__ void store_sum(const AddProblem& p, std::uint32_t key,
                                          std::int64_t column_offset, const C (&sum)[kWidth]) {
  std::int64_t offset[1];
  p.keys.offsets(p.first_key + key, offset);
  const std::int64_t at = offset[0] + column_offset;
  C total[kWidth] = {};
  if (p.beta != 0.0f) load_columns(p.out, p.out_dtype, at, total);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) total[j] += sum[j];
  store_columns(p.out, p.out_dtype, at, total);
}

/// A group of `lanes` threads walks one chunk; each thread has kWidth columns.
template <class C, int kWidth>
__global__ void __launch_bounds__(kThreads) segment_sum_kernel(AddArgs args) {
  constexpr int kUnroll = 4;
  const AddProblem& p = args.p;
  const int lane = static_cast<int>(threadIdx.x) & (args.lanes - 1);
  const std::int64_t block = blockIdx.x / args.tiles, tile = blockIdx.x - block * args.tiles;
  const std::int64_t chunk =
      block * (kThreads / args.lanes) + static_cast<int>(threadIdx.x) / args.lanes;
  const std::int64_t column = (tile * args.lanes + lane) * kWidth;
  if (chunk >= args.chunks || column >= p.column_count) return;
  const std::int64_t begin = chunk * args.chunk;
  const std::int64_t end = begin + args.chunk < p.item_count ? begin + args.chunk : p.item_count;
  const auto none = static_cast<std::uint32_t>(p.key_count);
  std::int64_t column_offset[2];  // out, src
  p.columns.offsets(column, column_offset);
  C* const partial = static_cast<C*>(args.partial) + chunk * 2 * p.column_count + column;

  C sum[kWidth] = {};
  std::uint32_t current = args.keys[begin];
  bool whole = begin == 0 || args.keys[begin - 1] != current;  // the run starts in this chunk
  for (std::int64_t first = begin; first < end; first += kUnroll) {
    std::uint32_t keys[kUnroll];
    std::int64_t offset[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t i = first + u < end ? first + u : end - 1;
      keys[u] = args.keys[i];
      std::int64_t at[2];
      p.items.offsets(p.first_item + args.items[i], at);
      offset[u] = at[1] + column_offset[1];
    }
    C x[kUnroll][kWidth];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_columns(p.src, p.src_dtype, offset[u], x[u]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u >= end) break;
      if (keys[u] != current) {
        if (whole) {
          if (current != none) store_sum(p, current, column_offset[0], sum);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) partial[j] = sum[j];
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = C(0);
        current = keys[u];
        whole = true;
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += x[u][j];
    }
  }
  const bool ends = end == p.item_count || args.keys[end] != current;
  if (whole && ends) {
    if (current != none) store_sum(p, current, column_offset[0], sum);
    return;
  }
  C* const to = whole ? partial + p.column_count : partial;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) to[j] = sum[j];
}

/// First position after `from` whose key is not `key`.
__device__ __forceinline__ std::int64_t run_end(const std::uint32_t* keys, std::uint32_t key,
                                                std::int64_t from, std::int64_t count) {
  std::int64_t low = from, high = count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (keys[middle] > key)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/// For each run that starts in a chunk and goes on into the next: the sum of its parts. A warp
/// takes `lanes` columns; its 32 / lanes groups share the parts.
template <class C>
__global__ void __launch_bounds__(kThreads) segment_join_kernel(AddArgs args) {
  constexpr int kUnroll = 4;
  const AddProblem& p = args.p;
  const std::int64_t block = blockIdx.x / args.tiles, tile = blockIdx.x - block * args.tiles;
  const std::int64_t chunk = block * (kThreads / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
  if (chunk + 1 >= args.chunks) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t begin = chunk * args.chunk, end = begin + args.chunk;
  const std::uint32_t key = args.keys[end - 1];
  const bool starts = begin == 0 || args.keys[begin] != key || args.keys[begin - 1] != key;
  if (!starts || args.keys[end] != key || key == static_cast<std::uint32_t>(p.key_count)) return;
  const std::int64_t last = (run_end(args.keys, key, end, p.item_count) - 1) / args.chunk;
  const int across = args.lanes, group = lane / across, groups = kWarp / across;
  const std::int64_t column = tile * across + (lane & (across - 1));
  const bool exists = column < p.column_count;
  const C* const partial = static_cast<const C*>(args.partial) + (exists ? column : 0);
  const std::int64_t step = 2 * p.column_count;

  C sums[kUnroll] = {};
  std::int64_t c = chunk + 1 + group;
  for (; c + (kUnroll - 1) * groups <= last; c += kUnroll * groups) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sums[u] += partial[(c + u * groups) * step];
  }
  for (; c <= last; c += groups) sums[0] += partial[c * step];
  C sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int mask = kWarp / 2; mask >= across; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  if (!exists || group != 0) return;
  const C total[1] = {partial[chunk * step + p.column_count] + sum};
  std::int64_t column_offset[1];
  p.columns.offsets(column, column_offset);
  store_sum(p, key, column_offset[0], total);
}

// ---- host

int lanes_for(std::int64_t columns, int most) {
  return static_cast<int>(
      std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(columns, 1, most))));
}

/// Whether four neighbouring columns are one aligned access in src and in out.
bool columns_in_fours(const AddProblem& p) {
  const auto in_fours = [](const DimMap& map, int operand, int from) {
    for (int d = from; d < map.dims; ++d)
      if (map.strides[operand][d] % 4 != 0) return false;
    return true;
  };
  const auto is_float = [](Dtype t) { return t == Dtype::f32 || is_low_precision(t); };
  return is_float(p.src_dtype) && is_float(p.out_dtype) && p.columns.dims > 0 &&
         p.columns.sizes[0] % 4 == 0 && p.columns.strides[0][0] == 1 &&
         p.columns.strides[1][0] == 1 && in_fours(p.columns, 0, 1) && in_fours(p.columns, 1, 1) &&
         in_fours(p.items, 1, 0) && in_fours(p.keys, 0, 0) &&
         aligned(p.src, 4 * size_of(p.src_dtype)) && aligned(p.out, 4 * size_of(p.out_dtype));
}

template <class C>
void launch_sums(AddArgs args, bool fours, cudaStream_t stream) {
  const AddProblem& p = args.p;
  const auto blocks = [&](int chunks_per_block) {
    return dim3(blocks_for(ceil_div<std::int64_t>(args.chunks, chunks_per_block) * args.tiles, 1));
  };
  const std::int64_t threads = ceil_div<std::int64_t>(p.column_count, fours ? 4 : 1);
  args.lanes = lanes_for(threads, 64);
  args.tiles = ceil_div<std::int64_t>(threads, args.lanes);
  const dim3 grid = blocks(kThreads / args.lanes);
  if constexpr (std::is_same_v<C, float>) {
    if (fours) launch(segment_sum_kernel<C, 4>, grid, dim3(kThreads), 0, stream, args);
  }
  if (!fours) launch(segment_sum_kernel<C, 1>, grid, dim3(kThreads), 0, stream, args);
  if (args.chunks == 1) return;
  args.lanes = lanes_for(p.column_count, kWarp);
  args.tiles = ceil_div<std::int64_t>(p.column_count, args.lanes);
  launch(segment_join_kernel<C>, blocks(kThreads / kWarp), dim3(kThreads), 0, stream, args);
}

void run(const Stream& stream, const AddProblem& p, std::int64_t width, Workspace workspace,
         const char* op) {
  AddScratch scratch;
  const std::size_t needed = scratch_layout(p.item_count, width, workspace.data, &scratch);
  MT_CHECK(workspace.bytes >= needed, op, ": expected a workspace of ", needed, " bytes, got ",
           workspace.bytes);
  const cudaStream_t queue = native_stream(stream);
  launch(index_keys_kernel, dim3(blocks_for(p.item_count, kThreads)), dim3(kThreads), 0, queue, p,
         scratch.keys_in, scratch.items_in);
  sort_pairs(scratch.sort, scratch.sort_bytes, scratch.keys_in, scratch.keys, scratch.items_in,
             scratch.items, p.item_count,
             std::max(1, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(p.key_count)))),
             queue);
  AddArgs args;
  args.p = p;
  args.keys = scratch.keys;
  args.items = scratch.items;
  args.partial = scratch.partial;
  args.chunk = static_cast<std::int32_t>(chunk_size(p.item_count, width));
  args.chunks = ceil_div<std::int64_t>(p.item_count, args.chunk);
  const Dtype wide = promote_types(p.src_dtype, p.out_dtype);
  switch (compute_dtype(wide)) {
    case Dtype::f32: return launch_sums<float>(args, columns_in_fours(p), queue);
    case Dtype::f64: return launch_sums<double>(args, false, queue);
    default: return launch_sums<std::int64_t>(args, false, queue);
  }
}

AddProblem problem(const Stream& stream, const char* op, const View& out, float beta,
                   const View& index, const View& src) {
  MT_CHECK(index.dtype == Dtype::i64 || index.dtype == Dtype::i32, op,
           ": expected an index of dtype int64 or int32, got ", index.dtype);
  MT_CHECK(beta == 0.0f || beta == 1.0f, op, ": expected beta 0 or 1, got ", beta);
  AddProblem p{};
  p.index = index.data;
  p.src = src.data;
  p.out = out.data;
  p.index_dtype = index.dtype;
  p.src_dtype = src.dtype;
  p.out_dtype = out.dtype;
  p.padding_index = -1;
  p.beta = beta;
  p.error = error_target(stream, op);
  return p;
}

}  // namespace

std::size_t index_add_workspace_bytes(std::int64_t count, std::int64_t /*rows*/,
                                      std::int64_t width) {
  if (count == 0 || width == 0) return 0;
  return scratch_layout(count, width, nullptr, nullptr);
}

void index_add(const Stream& stream, const char* op, View out, float beta, int dim, View index,
               View src, std::int64_t padding_index, Workspace workspace) {
  MT_CHECK_EQ(index.dim(), 1, op, ": dimensions of the index");
  MT_CHECK_EQ(src.dim(), out.dim(), op, ": dimensions of the source");
  for (int d = 0; d < out.dim(); ++d)
    MT_CHECK(src.sizes[d] == (d == dim ? index.sizes[0] : out.sizes[d]), op,
             ": expected a source of the output's sizes ", out.sizes, " with ", index.sizes[0],
             " in dimension ", dim, ", got ", src.sizes);
  const CudaDeviceGuard guard(stream.device());
  if (beta == 0.0f) fill(stream, out, Scalar(0));
  if (src.numel() == 0) return;
  AddProblem p = problem(stream, op, out, beta, index, src);
  p.padding_index = padding_index >= 0 ? padding_index : std::numeric_limits<std::int64_t>::min();
  p.item_count = p.line_items = index.sizes[0];
  p.key_count = p.rows = out.sizes[dim];
  MT_CHECK(p.rows < kMaxKeys && p.item_count < kMaxItems, op,
           ": expected fewer than 2^32 rows and 2^31 indices, got ", p.rows, " and ", p.item_count);
  p.items.append(p.item_count, {index.strides[0], src.strides[dim], 0});
  p.keys.append(p.rows, {out.strides[dim], 0, 0});
  for (int d = out.dim() - 1; d >= 0; --d)
    if (d != dim && out.sizes[d] != 1)
      p.columns.append(out.sizes[d], {out.strides[d], src.strides[d], 0});
  p.columns.sort_and_merge();
  for (DimMap* map : {&p.items, &p.keys, &p.columns}) map->prepare();
  p.column_count = p.columns.count();
  run(stream, p, p.column_count, workspace, op);
}

void scatter_add(const Stream& stream, const char* op, View out, float beta, int dim, View index,
                 View src, Workspace workspace) {
  MT_CHECK_EQ(index.dim(), out.dim(), op, ": dimensions of the index");
  MT_CHECK_EQ(src.dim(), out.dim(), op, ": dimensions of the source");
  for (int d = 0; d < out.dim(); ++d)
    MT_CHECK(index.sizes[d] <= src.sizes[d] && (d == dim || index.sizes[d] <= out.sizes[d]), op,
             ": expected an index no larger than the source ", src.sizes,
             " and, except in "
             "dimension ",
             dim, ", than ", out.sizes, ", got ", index.sizes);
  const CudaDeviceGuard guard(stream.device());
  if (beta == 0.0f) fill(stream, out, Scalar(0));
  if (index.numel() == 0) return;
  AddProblem p = problem(stream, op, out, beta, index, src);
  p.padding_index = std::numeric_limits<std::int64_t>::min();
  const bool scalar = out.dim() == 0;
  p.line_items = scalar ? 1 : index.sizes[dim];
  p.rows = scalar ? 1 : out.sizes[dim];
  // Items and keys along `dim` first, then the lines: in row-major order of the other dimensions.
  p.items.append(p.line_items, {scalar ? 0 : index.strides[dim], scalar ? 0 : src.strides[dim], 0});
  p.keys.append(p.rows, {scalar ? 0 : out.strides[dim], 0, 0});
  for (int d = out.dim() - 1; d >= 0; --d) {
    if (d == dim) continue;
    p.items.append(index.sizes[d], {index.strides[d], src.strides[d], 0});
    p.keys.append(index.sizes[d], {out.strides[d], 0, 0});
  }
  for (DimMap* map : {&p.items, &p.keys, &p.columns}) map->prepare();
  p.column_count = 1;
  // As many lines at a time as 32-bit keys and items allow.
  const std::int64_t lines = index.numel() / p.line_items;
  const std::int64_t batch = std::min(
      {lines, (kMaxKeys - 1) / std::max<std::int64_t>(p.rows, 1), kMaxItems / p.line_items});
  MT_CHECK(batch > 0, op, ": expected fewer than 2^32 - 1 rows and 2^31 indices in dimension ", dim,
           ", got ", p.rows, " and ", p.line_items);
  for (std::int64_t line = 0; line < lines; line += batch) {
    const std::int64_t count = std::min(batch, lines - line);
    p.first_item = line * p.line_items;
    p.first_key = line * p.rows;
    p.item_count = count * p.line_items;
    p.key_count = count * p.rows;
    run(stream, p, 1, workspace, op);
  }
}

}  // namespace mixtape::kernels::cuda
