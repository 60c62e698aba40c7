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

// ---- rows

/// Up to a vector of elements from `p`, of which `count` exist. kAligned: all of it, as one access.
template <class T, bool kAligned>
__device__ __forceinline__ void load_floats(const T* p, int count, float (&x)[kPerVector<T>]) {
  if constexpr (kAligned) {
    unpack<T>(*reinterpret_cast<const uint4*>(p), x);
  } else {
#pragma unroll
    for (int j = 0; j < kPerVector<T>; ++j) x[j] = j < count ? static_cast<float>(p[j]) : 0.0f;
  }
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

template <class R, class T, bool kAligned>
__global__ void __launch_bounds__(kReduceThreads) reduce_rows_kernel(R reducer, ReduceArgs args) {
  constexpr int kWidth = kPerVector<T>, kUnroll = 4;
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
  const auto pointer = [&](std::int64_t v, int& count) {
    std::int64_t first = v * kWidth, base = 0;
    if (args.reduced.dims > 1) {
      std::int64_t outer, offset[1];
      if (args.steps <= 0x7FFFFFFF) {
        outer = args.row_vectors.quotient(static_cast<std::uint32_t>(v));
      } else {
        outer = v / args.row_vectors.divisor;
      }
      first -= outer * args.row_vectors.divisor * kWidth;
      args.reduced.offsets(outer, offset, 1);
      base = offset[0];
    }
    count = static_cast<int>(inner - first < kWidth ? inner - first : kWidth);
    return x + base + first;
  };
  const auto take = [&](const float(&values)[kWidth], int count, std::int64_t v) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (kAligned || j < count) R::add(lanes[j], values[j], v * kWidth + j);
  };

  const std::int64_t begin = split * args.chunk;
  std::int64_t end = begin + args.chunk < args.steps ? begin + args.chunk : args.steps;
  if (output >= args.outputs) end = begin;
  std::int64_t v = begin + lane;
  for (; v + (kUnroll - 1) * args.group < end; v += kUnroll * args.group) {
    float values[kUnroll][kWidth];
    int count[kUnroll];
    if constexpr (kAligned) {
      uint4 raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        raw[u] = *reinterpret_cast<const uint4*>(pointer(v + u * args.group, count[u]));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        unpack<T>(raw[u], values[u]);
        take(values[u], kWidth, v + u * args.group);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const T* p = pointer(v + u * args.group, count[u]);
        load_floats<T, false>(p, count[u], values[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) take(values[u], count[u], v + u * args.group);
    }
  }
  for (; v < end; v += args.group) {
    float values[kWidth];
    int count;
    const T* p = pointer(v, count);
    load_floats<T, kAligned>(p, count, values);
    take(values, count, v);
  }

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

template <class R, class T, bool kAligned>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_columns_kernel(R reducer, ReduceArgs args) {
  constexpr int kWidth = kPerVector<T>, kUnroll = 4, kWarps = kReduceThreads / kWarp;
  using State = typename R::State;
  const int across = args.group;  // threads side by side
  const int column = static_cast<int>(threadIdx.x) & (across - 1);
  const int line = static_cast<int>(threadIdx.x) / across, lines = kReduceThreads / across;
  const std::int64_t inner = args.kept.sizes[0], tile_width = across * kWidth;
  const std::int64_t tiles = (inner + tile_width - 1) / tile_width;
  const std::int64_t outer = blockIdx.x / tiles;
  const std::int64_t first = (blockIdx.x - outer * tiles) * tile_width + column * kWidth;
  const int count =
      static_cast<int>(inner - first < kWidth ? (inner > first ? inner - first : 0) : kWidth);
  std::int64_t base[1];
  args.kept.offsets(outer * inner, base);
  const T* x = static_cast<const T*>(args.x) + base[0] + first;

  State states[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) states[j] = R::identity();
  const auto pointer = [&](std::int64_t r) {
    std::int64_t offset[1] = {0};
    if (args.reduced.dims == 1)
      offset[0] = r * args.reduced.strides[0][0];
    else
      args.reduced.offsets(r, offset);
    return x + offset[0];
  };
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * args.chunk;
  std::int64_t end = begin + args.chunk < args.steps ? begin + args.chunk : args.steps;
  if (count == 0) end = begin;
  std::int64_t r = begin + line;
  for (; r + (kUnroll - 1) * lines < end; r += kUnroll * lines) {
    if constexpr (kAligned) {
      uint4 raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        raw[u] = *reinterpret_cast<const uint4*>(pointer(r + u * lines));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float values[kWidth];
        unpack<T>(raw[u], values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) R::add(states[j], values[j], r + u * lines);
      }
    } else {
      float values[kUnroll][kWidth];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        load_floats<T, false>(pointer(r + u * lines), count, values[u]);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          if (j < count) R::add(states[j], values[u][j], r + u * lines);
      }
    }
  }
  for (; r < end; r += lines) {
    float values[kWidth];
    load_floats<T, kAligned>(pointer(r), count, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (kAligned || j < count) R::add(states[j], values[j], r);
  }

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
  State state = R::identity();
  if (output < args.outputs)
    for (std::int64_t s = index; s < args.splits; s += args.group)
      state = R::combine(state, partial[s * args.outputs + output]);
  state = combine_group(reducer, state, index, args.group, per_block);
  if (index != 0 || output >= args.outputs) return;
  std::int64_t offsets[DimMap::kOperands];
  args.kept.offsets(output, offsets);
  reducer.write(offsets, state);
}

// ---- host

template <class R, class T>
void launch_vectors(const R& reducer, const ReduceArgs& args, const ReductionPlan& plan,
                    bool is_aligned, cudaStream_t stream) {
  if (plan.layout == ReductionLayout::rows) {
    const auto kernel =
        is_aligned ? reduce_rows_kernel<R, T, true> : reduce_rows_kernel<R, T, false>;
    launch(kernel, dim3(blocks_for(plan.outputs * plan.splits, kReduceThreads / plan.group)),
           dim3(kReduceThreads), 0, stream, reducer, args);
  } else {
    const auto kernel =
        is_aligned ? reduce_columns_kernel<R, T, true> : reduce_columns_kernel<R, T, false>;
    const std::int64_t inner = plan.kept.sizes[0];
    const std::int64_t tiles =
        ceil_div<std::int64_t>(inner, plan.group * plan.width) * (plan.outputs / inner);
    launch(kernel, dim3(blocks_for(tiles, 1), static_cast<unsigned>(plan.splits)),
           dim3(kReduceThreads), 0, stream, reducer, args);
  }
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
  args.group = plan.outputs >= kWarp ? kReduceThreads / kWarp : kReduceThreads;
  launch(reduce_finish_kernel<R>, dim3(blocks_for(plan.outputs, kReduceThreads / args.group)),
         dim3(kReduceThreads), 0, queue, reducer, args);
}

}  // namespace mixtape::kernels::cuda
