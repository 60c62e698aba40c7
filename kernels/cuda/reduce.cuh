// The reduction kernels, as templates over a reducer.
//
// A reducer R has
//   Value, State         type that elements are converted to; running result (whole 32-bit words)
//   identity()           the state of no elements
//   add(state, x, i)     takes in element x, which is number i of its output
//   combine(a, b)        the state of both
//   write(offsets, s)    stores a finished state; offsets[1], [2] are the outputs' (DimMap)
// and is passed by value. Each thread keeps one state per vector lane, so that additions are
// independent and sums are short; states are combined in a fixed tree.
//
// A pass over 16-bit data is short beside the latency of memory: every load of a batch is under way
// before the first is used, and one block alone keeps its multiprocessor's share of the bandwidth
// busy.
#pragma once

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/cuda/reduction_plan.h"

namespace mixtape::kernels::cuda {

struct ReduceArgs {
  const void* x;
  Dtype dtype;
  DimMap kept, reduced;
  std::int64_t outputs, length, steps, chunk, splits;
  std::int32_t group;
  bool along_reduced;
  void* partial;           // [splits][outputs] states, where splits > 1
  FastDivide row_vectors;  // vectors of one run of the innermost reduced dimension (rows)
};

/// Stores the state of one part of an output: the result itself if there is one part only.
template <class R>
__device__ __forceinline__ void finish_part(const R& reducer, const ReduceArgs& args,
                                            std::int64_t output, std::int64_t split,
                                            typename R::State state) {
  if (args.splits > 1) {
    static_cast<typename R::State*>(args.partial)[split * args.outputs + output] = state;
  } else {
    std::int64_t offsets[DimMap::kOperands];
    args.kept.offsets(output, offsets);
    reducer.write(offsets, state);
  }
}

/// Combines the states of the `group` threads (a power of two) that are `distance` apart; the
/// result is right in the first of them. Every thread of the block calls it.
template <class R>
__device__ __forceinline__ typename R::State combine_group(const R&, typename R::State state,
                                                           int index, int group, int distance) {
  __shared__ __align__(16) unsigned char storage[kReduceThreads * sizeof(typename R::State)];
  auto* states = reinterpret_cast<typename R::State*>(storage);
  const int thread = static_cast<int>(threadIdx.x);
  for (int half = group / 2; half > 0; half /= 2) {
    states[thread] = state;
    __syncthreads();
    if (index < half) state = R::combine(state, states[thread + half * distance]);
    __syncthreads();
  }
  return state;
}

// ---- vectors

/// How the vector kernels read x.
enum class Access : std::uint8_t {
  dense,     // whole 16-byte vectors, a fixed distance apart: one reduced dimension
  vectors,   // whole 16-byte vectors
  elements,  // one element at a time, ragged ends
};

/// Vectors that one thread has in flight: of whole batches where access is dense, and else.
template <class R>
inline constexpr int kWholeBatch = sizeof(typename R::State) <= 8 ? 8 : 4;
inline constexpr int kTestedBatch = 4;

/// The first `count` elements from p, the rest 0.
template <class T>
__device__ __forceinline__ void load_floats(const T* p, int count, float (&x)[kPerVector<T>]) {
#pragma unroll
  for (int j = 0; j < kPerVector<T>; ++j) x[j] = j < count ? static_cast<float>(p[j]) : 0.0f;
}

/// Takes in vectors v, v + stride, ... of a thread, kVectors of them if kWhole, else those below
/// `end`: address(v, u, count) points to vector v + u stride and sets how many of its elements
/// exist, take(values, count, i) adds those of vector i.
template <class T, Access kAccess, int kVectors, bool kWhole, class Address, class Take>
__device__ __forceinline__ void take_batch(std::int64_t v, std::int64_t end, int stride,
                                           const Address& address, const Take& take) {
  constexpr int kWidth = kPerVector<T>;
  const auto exists = [&](int u) { return kWhole || v + u * stride < end; };
  int count[kVectors];
  if constexpr (kAccess == Access::elements) {
    float values[kVectors][kWidth];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (!exists(u)) continue;
      const T* p = address(v, u, count[u]);
      load_floats(p, count[u], values[u]);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u)
      if (exists(u)) take(values[u], count[u], v + u * stride);
  } else {
    uint4 raw[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u)
      if (exists(u)) raw[u] = *reinterpret_cast<const uint4*>(address(v, u, count[u]));
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (!exists(u)) continue;
      float values[kWidth];
      unpack<T>(raw[u], values);
      take(values, kWidth, v + u * stride);
    }
  }
}

/// All of a thread's vectors from `first` to `end`.
template <class R, class T, Access kAccess, class Address, class Take>
__device__ __forceinline__ void take_all(std::int64_t first, std::int64_t end, int stride,
                                         const Address& address, const Take& take) {
  constexpr int kWhole = kWholeBatch<R>;
  std::int64_t v = first;
  if constexpr (kAccess == Access::dense)
    for (; v + (kWhole - 1) * stride < end; v += kWhole * stride)
      take_batch<T, kAccess, kWhole, true>(v, end, stride, address, take);
  for (; v < end; v += kTestedBatch * stride)
    take_batch<T, kAccess, kTestedBatch, false>(v, end, stride, address, take);
}

template <class R, int kWidth>
__device__ __forceinline__ typename R::State combine_lanes(typename R::State (&lanes)[kWidth]) {
#pragma unroll
  for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) lanes[j] = R::combine(lanes[j], lanes[j + half]);
  }
  return lanes[0];
}

// ---- rows

template <class R, class T, Access kAccess>
__global__ void __launch_bounds__(kReduceThreads) reduce_rows_kernel(R reducer, ReduceArgs args) {
  constexpr int kWidth = kPerVector<T>;
  const int lane = static_cast<int>(threadIdx.x) & (args.group - 1);
  const int per_block = kReduceThreads / args.group;
  const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * per_block +
                            static_cast<int>(threadIdx.x) / args.group;
  const std::int64_t output = args.splits > 1 ? part / args.splits : part;
  const std::int64_t split = part - output * args.splits;
  const std::int64_t inner = args.reduced.sizes[0];
  std::int64_t row[1];
  args.kept.offsets(output < args.outputs ? output : 0, row);
  const T* x = static_cast<const T*>(args.x) + row[0];

  typename R::State lanes[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) lanes[j] = R::identity();
  const auto address = [&](std::int64_t batch, int u, int& count) {
    if constexpr (kAccess == Access::dense) {
      return x + batch * kWidth + u * args.group * kWidth;
    } else {
      const std::int64_t v = batch + u * args.group;
      std::int64_t first = v * kWidth, base = 0;
      if (args.reduced.dims > 1) {
        std::int64_t outer, offset[1];
        if (args.steps <= 0x7FFFFFFF)
          outer = args.row_vectors.quotient(static_cast<std::uint32_t>(v));
        else
          outer = v / args.row_vectors.divisor;
        first -= outer * args.row_vectors.divisor * kWidth;
        args.reduced.offsets(outer, offset, 1);
        base = offset[0];
      }
      count = static_cast<int>(inner - first < kWidth ? inner - first : kWidth);
      return x + base + first;
    }
  };
  const auto take = [&](const float(&values)[kWidth], int count, std::int64_t v) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (kAccess != Access::elements || j < count) R::add(lanes[j], values[j], v * kWidth + j);
  };
  const std::int64_t begin = split * args.chunk;
  std::int64_t end = begin + args.chunk < args.steps ? begin + args.chunk : args.steps;
  if (output >= args.outputs) end = begin;
  take_all<R, T, kAccess>(begin + lane, end, args.group, address, take);

  typename R::State state = combine_lanes<R>(lanes);
  state = warp_reduce(
      state, [](const auto& a, const auto& b) { return R::combine(a, b); },
      args.group < kWarp ? args.group : kWarp);
  if (args.group > kWarp) {
    // One state a warp: lane 0 of each stands for it.
    __shared__ __align__(16) unsigned char storage[kReduceThreads / kWarp * sizeof(state)];
    auto* warps = reinterpret_cast<typename R::State*>(storage);
    const int warp = static_cast<int>(threadIdx.x) / kWarp, count = args.group / kWarp;
    if (threadIdx.x % kWarp == 0) warps[warp] = state;
    __syncthreads();
    if (lane == 0)
      for (int w = 1; w < count; ++w) state = R::combine(state, warps[warp + w]);
  }
  if (lane == 0 && output < args.outputs) finish_part(reducer, args, output, split, state);
}

// ---- columns

template <class R, class T, Access kAccess>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_columns_kernel(R reducer, ReduceArgs args) {
  constexpr int kWidth = kPerVector<T>, kWarps = kReduceThreads / kWarp;
  using State = typename R::State;
  const int across = args.group;  // threads side by side
  const int column = static_cast<int>(threadIdx.x) & (across - 1);
  const int line = static_cast<int>(threadIdx.x) / across, lines = kReduceThreads / across;
  const std::int64_t inner = args.kept.sizes[0], tile_width = across * kWidth;
  const std::int64_t tiles = (inner + tile_width - 1) / tile_width;
  const std::int64_t outer = blockIdx.x / tiles;
  const std::int64_t first = (blockIdx.x - outer * tiles) * tile_width + column * kWidth;
  const int exist =
      static_cast<int>(inner - first < kWidth ? (inner > first ? inner - first : 0) : kWidth);
  std::int64_t base[1];
  args.kept.offsets(outer * inner, base);
  const T* x = static_cast<const T*>(args.x) + base[0] + first;

  State states[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) states[j] = R::identity();
  const std::int64_t stride = args.reduced.strides[0][0], apart = lines * stride;
  const auto address = [&](std::int64_t batch, int u, int& count) {
    count = exist;
    if constexpr (kAccess == Access::dense) {
      return x + batch * stride + u * apart;
    } else {
      std::int64_t offset[1] = {0};
      args.reduced.offsets(batch + u * lines, offset);
      return x + offset[0];
    }
  };
  const auto take = [&](const float(&values)[kWidth], int count, std::int64_t r) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (kAccess != Access::elements || j < count) R::add(states[j], values[j], r);
  };
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * args.chunk;
  std::int64_t end = begin + args.chunk < args.steps ? begin + args.chunk : args.steps;
  if (exist == 0) end = begin;
  take_all<R, T, kAccess>(begin + line, end, lines, address, take);

  // Lines of a warp, then the warps, one output a thread.
  __shared__ __align__(16) unsigned char storage[kWarps * kWarp * kWidth * sizeof(State)];
  auto* shared = reinterpret_cast<State*>(storage);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask >>= 1)
      if (mask >= across) states[j] = R::combine(states[j], shuffle_xor(states[j], mask));
    if (lane < across) shared[(warp * across + column) * kWidth + j] = states[j];
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < tile_width; c += kReduceThreads) {
    const std::int64_t kept = first - column * kWidth + c;
    if (kept >= inner) break;
    State state = shared[c];
    for (int w = 1; w < kWarps; ++w) state = R::combine(state, shared[w * tile_width + c]);
    finish_part(reducer, args, outer * inner + kept, blockIdx.y, state);
  }
}

// ---- strided

template <class R>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_strided_kernel(R reducer, ReduceArgs args) {
  constexpr int kUnroll = 4;
  const int thread = static_cast<int>(threadIdx.x), per_block = kReduceThreads / args.group;
  const int index = args.along_reduced ? thread & (args.group - 1) : thread / per_block;
  const int which = args.along_reduced ? thread / args.group : thread & (per_block - 1);
  const std::int64_t block = blockIdx.x / args.splits, split = blockIdx.x - block * args.splits;
  const std::int64_t output = block * per_block + which;
  const bool exists = output < args.outputs;
  std::int64_t base[1];
  args.kept.offsets(exists ? output : 0, base);
  typename R::State states[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) states[u] = R::identity();
  const std::int64_t begin = split * args.chunk;
  std::int64_t end = begin + args.chunk < args.steps ? begin + args.chunk : args.steps;
  if (!exists) end = begin;
  for (std::int64_t r = begin + index; r < end; r += kUnroll * args.group) {
    std::int64_t offset[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      std::int64_t one[1];
      const std::int64_t i = r + u * args.group;
      args.reduced.offsets(i < end ? i : r, one);
      offset[u] = base[0] + one[0];
    }
    typename R::Value x[kUnroll];
    load_items(args.x, args.dtype, offset, x);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (r + u * args.group < end) R::add(states[u], x[u], r + u * args.group);
  }
  typename R::State state = combine_lanes<R>(states);
  state = combine_group(reducer, state, index, args.group, args.along_reduced ? 1 : per_block);
  if (index == 0 && exists) finish_part(reducer, args, output, split, state);
}

/// Combines the parts of each output; `group` threads, `distance` apart, share an output.
template <class R>
__global__ void __launch_bounds__(kReduceThreads) reduce_finish_kernel(R reducer, ReduceArgs args) {
  using State = typename R::State;
  const int thread = static_cast<int>(threadIdx.x), per_block = kReduceThreads / args.group;
  const int index = thread / per_block;
  const std::int64_t output =
      static_cast<std::int64_t>(blockIdx.x) * per_block + thread % per_block;
  const auto* partial = static_cast<const State*>(args.partial);
  constexpr int kUnroll = 4;
  State state = R::identity();
  const std::int64_t end = output < args.outputs ? args.splits : 0;
  for (std::int64_t s = index; s < end; s += kUnroll * args.group) {
    State parts[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t i = s + u * args.group;
      parts[u] = i < end ? partial[i * args.outputs + output] : R::identity();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) state = R::combine(state, parts[u]);
  }
  state = combine_group(reducer, state, index, args.group, per_block);
  if (index != 0 || output >= args.outputs) return;
  std::int64_t offsets[DimMap::kOperands];
  args.kept.offsets(output, offsets);
  reducer.write(offsets, state);
}

// ---- host

template <class R, class T, Access kAccess>
void launch_vectors(const R& reducer, const ReduceArgs& args, const ReductionPlan& plan,
                    cudaStream_t stream) {
  if (plan.layout == ReductionLayout::rows) {
    launch(reduce_rows_kernel<R, T, kAccess>,
           dim3(blocks_for(plan.outputs * plan.splits, kReduceThreads / plan.group)),
           dim3(kReduceThreads), 0, stream, reducer, args);
  } else {
    const std::int64_t inner = plan.kept.sizes[0];
    const std::int64_t tiles =
        ceil_div<std::int64_t>(inner, plan.group * plan.width) * (plan.outputs / inner);
    launch(reduce_columns_kernel<R, T, kAccess>,
           dim3(blocks_for(tiles, 1), static_cast<unsigned>(plan.splits)), dim3(kReduceThreads), 0,
           stream, reducer, args);
  }
}

template <class R, class T>
void launch_vectors(const R& reducer, const ReduceArgs& args, const ReductionPlan& plan,
                    bool is_aligned, cudaStream_t stream) {
  if (is_aligned && plan.reduced.dims == 1)
    launch_vectors<R, T, Access::dense>(reducer, args, plan, stream);
  else if (is_aligned)
    launch_vectors<R, T, Access::vectors>(reducer, args, plan, stream);
  else
    launch_vectors<R, T, Access::elements>(reducer, args, plan, stream);
}

/// Runs a planned reduction. kVectors: R::Value is float and x of a dtype with vectors.
template <bool kVectors, class R>
void run_reduction(const char* name, const Stream& stream, const R& reducer,
                   const ReductionPlan& plan, const View& x, Workspace workspace) {
  static_assert(sizeof(typename R::State) <= kMaxStateBytes);
  const std::size_t needed =
      plan.splits > 1
          ? static_cast<std::size_t>(plan.outputs * plan.splits) * sizeof(typename R::State)
          : 0;
  MT_CHECK(workspace.bytes >= needed, name, ": expected a workspace of ", needed, " bytes, got ",
           workspace.bytes);
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  ReduceArgs args{x.data,       x.dtype,     plan.kept,          plan.reduced,
                  plan.outputs, plan.length, plan.steps,         plan.chunk,
                  plan.splits,  plan.group,  plan.along_reduced, workspace.data,
                  FastDivide()};
  if (plan.layout == ReductionLayout::rows && plan.reduced.dims > 1)
    args.row_vectors = FastDivide(ceil_div<std::int64_t>(plan.reduced.sizes[0], plan.width));
  if (plan.layout == ReductionLayout::strided) {
    const std::int64_t blocks =
        ceil_div<std::int64_t>(plan.outputs, kReduceThreads / plan.group) * plan.splits;
    launch(reduce_strided_kernel<R>, dim3(blocks_for(blocks, 1)), dim3(kReduceThreads), 0, queue,
           reducer, args);
  } else if constexpr (kVectors) {
    const bool is_aligned = vectors_aligned(plan, x);
    switch (x.dtype) {
      case Dtype::f16: launch_vectors<R, Half>(reducer, args, plan, is_aligned, queue); break;
      case Dtype::bf16: launch_vectors<R, BFloat16>(reducer, args, plan, is_aligned, queue); break;
      default: launch_vectors<R, float>(reducer, args, plan, is_aligned, queue);
    }
  }
  if (plan.splits == 1) return;
  // Neighbouring threads read neighbouring outputs, at least a sector of memory of them.
  args.group = plan.outputs < 8 ? kReduceThreads : plan.splits > 64 ? 32 : 8;
  launch(reduce_finish_kernel<R>, dim3(blocks_for(plan.outputs, kReduceThreads / args.group)),
         dim3(kReduceThreads), 0, queue, reducer, args);
}

}  // namespace mixtape::kernels::cuda
