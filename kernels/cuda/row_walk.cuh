// Kernels that walk over the rows of a matrix with a grid that fits the device at once: each thread
// holds the same columns of every row, so that what belongs to a column (weights, sums over rows)
// stays in its registers, and the rows it needs next are on their way to shared memory while it
// works on one. Short rows need no barrier; rows that several warps share meet at a named one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <unordered_map>

#include "kernels/cuda/byte_key.h"
#include "kernels/cuda/rows.cuh"

namespace mixtape::kernels::cuda {

// ---- device side ---------------------------------------------------------------------------

/// Whether this lane's i-th unit exists. With vectors only the last of them may not (see
/// dispatch_row_walk): the others are in straight-line code, whose latencies overlap.
template <bool kVector, int kUnits>
__device__ __forceinline__ bool owns_unit(int i, int lane, int lanes, int units) {
  return (kVector && i + 1 < kUnits) || lane + i * lanes < units;
}

/// N sums over the threads that share a row: `lanes` of a warp, or with kWide whole warps, whose
/// sums meet in `scratch` behind the named barrier of the group, so that other groups of the block
/// go on meanwhile. One barrier a call: calls that follow each other use different scratch.
template <bool kWide, int N>
__device__ __forceinline__ void group_sums(float (&values)[N], int lanes, int group,
                                           float (*scratch)[kWarp]) {
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = warp_reduce(values[n], Sum{}, kWide ? kWarp : lanes);
  if constexpr (kWide) {
    const int warps = lanes / kWarp, first = group * warps;
    if (threadIdx.x % kWarp == 0)
#pragma unroll
      for (int n = 0; n < N; ++n) scratch[n][threadIdx.x / kWarp] = values[n];
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
#pragma unroll
    for (int n = 0; n < N; ++n) {
      values[n] = 0;
      for (int w = first; w < first + warps; ++w) values[n] += scratch[n][w];
    }
  }
}

// ---- host side -----------------------------------------------------------------------------

inline int multiprocessors() {
  int device = 0, count = 0;
  MT_CUDA_CHECK(cudaGetDevice(&device));
  MT_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

/// A grid that fits the device at once and walks over the rows. `lanes` threads share a row, each
/// holding the same columns of every row; a block works on threads / lanes rows at a time, and the
/// rows that follow are on their way to `stages` places in shared memory.
struct RowWalk {
  int threads = 0, stages = 0;
  unsigned blocks = 0;  // 0: a block would need more threads or shared memory than there are
  std::size_t shared_bytes = 0;
};
struct RowWalkLimits {
  int threads, wanted_threads;    // of a block: at most, and where the rows allow it
  int blocks;                     // resident on one multiprocessor, at most
  std::size_t bytes_per_thread;   // of one stage
  std::size_t bytes_per_row = 0;  // that each of the block's rows needs at the end
};
template <class KernelFunction>
RowWalk plan_row_walk(KernelFunction* kernel, std::int64_t rows, int lanes,
                      const RowWalkLimits& most) {
  const std::int64_t processors = multiprocessors(), unit = lanes < kWarp ? kWarp / lanes : 1;
  // Few rows spread over all processors; whole warps.
  const std::int64_t wanted =
      std::min<std::int64_t>(most.wanted_threads / lanes, ceil_div<std::int64_t>(rows, processors));
  const std::int64_t groups = std::max<std::int64_t>(ceil_div(wanted, unit), 1) * unit;
  const int threads = static_cast<int>(groups) * lanes;
  RowWalk walk;
  int most_resident = 0;
  for (const int stages : {2, 3}) {  // a third stage, unless that costs a resident block
    const std::size_t shared = std::max(most.bytes_per_thread * stages * threads,
                                        most.bytes_per_row * static_cast<std::size_t>(groups));
    if (shared + 2048 > static_cast<std::size_t>(shared_memory_per_block())) break;
    if (shared > 40 * 1024)
      MT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)));
    int resident = 0;
    MT_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared));
    resident = std::clamp(resident, 1, most.blocks);
    if (resident < most_resident) break;
    most_resident = resident;
    walk = {threads, stages,
            static_cast<unsigned>(std::min(ceil_div(rows, groups), resident * processors)), shared};
  }
  return walk;
}

struct RowWalkKey {
  std::uint64_t kernel, bytes_per_thread, bytes_per_row;
  std::int64_t rows;
  std::int32_t lanes, device;
};
/// The same, remembered for each shape: asking the runtime takes longer than launching.
template <class KernelFunction>
RowWalk row_walk(KernelFunction* kernel, std::int64_t rows, int lanes, const RowWalkLimits& most) {
  if (lanes > most.threads) return {};
  constexpr std::size_t kMostKept = 4096;
  thread_local std::unordered_map<RowWalkKey, RowWalk, ByteHash, ByteEqual> known;
  int device = 0;
  MT_CUDA_CHECK(cudaGetDevice(&device));
  const RowWalkKey key{reinterpret_cast<std::uintptr_t>(kernel),
                       most.bytes_per_thread,
                       most.bytes_per_row,
                       rows,
                       lanes,
                       device};
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  if (known.size() >= kMostKept) known.clear();
  return known.emplace(key, plan_row_walk(kernel, rows, lanes, most)).first->second;
}

/// Calls f(bool_constant vector, integral_constant units, bool_constant wide, lanes) for rows of
/// `columns` elements of T: a thread holds up to 4 vectors, of which only the last may not exist,
/// or up to 8 elements if rows are not aligned; wide: whole warps share a row, the fewest that hold
/// it.
template <class T, class F>
void dispatch_row_walk(std::int64_t columns, bool vector, F&& f) {
  const auto call = [&]<bool kVector, int kUnits, bool kWide>(std::int64_t lanes) {
    f(std::bool_constant<kVector>{}, std::integral_constant<int, kUnits>{},
      std::bool_constant<kWide>{}, static_cast<int>(lanes));
  };
  if (!vector) {
    const std::int64_t lanes = ceil_div<std::int64_t>(columns, 8);
    if (lanes <= kWarp) return call.template operator()<false, 8, false>(ceil_pow2(lanes));
    return call.template operator()<false, 8, true>(ceil_div<std::int64_t>(lanes, kWarp) * kWarp);
  }
  const std::int64_t units = columns / kPerVector<T>;
  const std::int64_t warps = ceil_div<std::int64_t>(units, 4 * kWarp);
  const std::int64_t held = ceil_div(units, warps * kWarp);
  if (warps > 1 && held == 4) return call.template operator()<true, 4, true>(warps * kWarp);
  if (warps > 1) return call.template operator()<true, 3, true>(warps * kWarp);
  switch (held) {
    case 1: return call.template operator()<true, 1, false>(ceil_pow2(units));
    case 2: return call.template operator()<true, 2, false>(kWarp);
    case 3: return call.template operator()<true, 3, false>(kWarp);
    default: return call.template operator()<true, 4, false>(kWarp);
  }
}

}  // namespace mixtape::kernels::cuda
