// Rows that the blocks of a cluster share (compute capability 9 and above).
//
// With one block to a row, a row that fills a multiprocessor's shared memory leaves it nothing to
// load while that row is reduced and stored. A cluster keeps the row in pieces in the shared memory
// of up to 8 small blocks; several of those are resident on each multiprocessor and work on
// different rows, so that loads of one overlap the reduction and stores of another. The blocks
// exchange their partial results through distributed shared memory, once a row.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "engine/cuda/backend.h"
#include "engine/cuda/capture_mode.h"
#include "kernels/cuda/rows.cuh"

namespace mixtape::kernels::cuda {

inline constexpr int kClusterThreads = 256;  // of each block
inline constexpr int kMaxCluster = 8;        // blocks; what every device with clusters can take

// ---- device side ---------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
/// This block's place among those that share its row. Every thread constructs it and exchanges
/// once.
struct RowCluster {
  using Group = cooperative_groups::cluster_group;

  const int blocks = static_cast<int>(Group::num_blocks());
  const int threads = static_cast<int>(Group::num_threads());  // of all blocks
  const int thread = static_cast<int>(Group::thread_rank());   // of those
  const std::int64_t row = blockIdx.x / Group::num_blocks();

  __device__ __forceinline__ RowCluster() {  // barrier_arrive() without its memory fence
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  /// Calls f(unit, i) for the units that are this thread's: at most `held`, its i-th at each i.
  template <class F>
  __device__ __forceinline__ void for_units(int units, int held, F&& f) const {
#pragma unroll 4
    for (int i = 0; i < held; ++i)
      if (const int unit = thread + i * threads; unit < units) f(unit, i);
  }

  /// parts[r] becomes `part` of block r, in every block; `parts` lies in shared memory.
  __device__ __forceinline__ void exchange(float2 (&parts)[kMaxCluster], float2 part) const {
    Group::barrier_wait();  // all blocks have started, so that their shared memory is there
    const int target = static_cast<int>(threadIdx.x);
    if (target < blocks) Group::map_shared_rank(&parts[Group::block_rank()], target)[0] = part;
    Group::sync();
  }
};
#endif

// ---- host side -----------------------------------------------------------------------------

/// A launch of one cluster of `blocks` blocks a row.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(std::int64_t rows, int blocks, std::size_t shared_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config.gridDim = dim3(blocks_for(rows * blocks, 1));
    config.blockDim = dim3(kClusterThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points into it
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

/// Whether the current device runs kKernel in clusters of kMaxCluster blocks that use all the
/// shared memory there is. The first call on a device finds out and allows the kernel that much.
template <auto kKernel>
bool clusters_fit(int shared_bytes) {
  enum : int { unknown, no, yes };
  static std::array<std::atomic<int>, cudart::kMaxDevices> answers;
  int device = 0;
  MT_CUDA_CHECK(cudaGetDevice(&device));
  MT_CHECK(device < cudart::kMaxDevices, "cuda: expected a device below ", cudart::kMaxDevices,
           ", got ", device);
  std::atomic<int>& answer = answers[static_cast<std::size_t>(device)];
  if (const int known = answer.load(std::memory_order_acquire)) return known == yes;
  const cudart::RelaxedCapture relaxed;
  int supported = 0, clusters = 0;
  cudaFuncAttributes code{};
  MT_CUDA_CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrClusterLaunch, device));
  MT_CUDA_CHECK(cudaFuncGetAttributes(&code, kKernel));
  if (supported != 0 && code.ptxVersion >= 90) {  // else its body is empty
    MT_CUDA_CHECK(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    const ClusterLaunch most(1, kMaxCluster, static_cast<std::size_t>(shared_bytes), nullptr);
    MT_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kKernel, &most.config));
  }
  answer.store(clusters > 0 ? yes : no, std::memory_order_release);
  return clusters > 0;
}

/// Runs kKernel(args..., units) with a cluster to a row of `columns` elements of T, of which
/// `operands` matrices are kept: `units` of each a thread. False, and nothing done, where the row
/// is too short to gain, too long to keep or the device has no clusters.
template <auto kKernel, class T, class... Args>
bool launch_clusters(cudaStream_t stream, RowShape shape, int operands, Args... args) {
  constexpr std::int64_t kBytes = sizeof(uint4), kGain = 64 * 1024, kPiece = 32 * 1024;
  const std::int64_t units = shape.columns / kPerVector<T>, bytes = units * kBytes * operands;
  if (bytes <= kGain) return false;
  const int blocks = std::min(ceil_pow2(ceil_div(bytes, kPiece)), kMaxCluster);
  const std::int64_t held = ceil_div<std::int64_t>(units, blocks * kClusterThreads);
  const std::int64_t shared_bytes = held * kClusterThreads * kBytes * operands;
  const int room = shared_memory_per_block() - 2048;
  if (shared_bytes > room || shape.rows * blocks > kMaxGridX || !clusters_fit<kKernel>(room))
    return false;
  const ClusterLaunch launch(shape.rows, blocks, static_cast<std::size_t>(shared_bytes), stream);
  MT_CUDA_CHECK(cudaLaunchKernelEx(&launch.config, kKernel, args..., static_cast<int>(held)));
  return true;
}

}  // namespace mixtape::kernels::cuda
