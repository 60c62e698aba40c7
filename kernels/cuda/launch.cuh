// Launching: the grid for a number of items and a checked launch on a stream.
//
// Nothing here asks the driver about the device: grids follow from sizes alone, so that the order
// of every reduction does too. The dispatcher does not make the stream's device current; launchers
// hold a CudaDeviceGuard.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "kernels/cuda/cuda_check.h"

namespace mixtape::kernels::cuda {

inline constexpr int kWarp = 32;
inline constexpr std::int64_t kMaxGridX = 0x7FFFFFFF;

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

/// Blocks that cover `items` with `per_block` each, as gridDim.x.
inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  const std::int64_t blocks = ceil_div(items, per_block);
  MT_CHECK(blocks <= kMaxGridX, "cuda: expected at most 2^31 - 1 blocks, got ", blocks);
  return static_cast<unsigned>(blocks);
}

/// A kernel as cudaLaunchKernel names it.
template <class... Params>
const void* kernel_address(void (*kernel)(Params...)) {
  return reinterpret_cast<const void*>(kernel);
}

/// kernel<<<grid, block, shared, stream>>>(args...), throwing if it cannot be launched.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  kernel<<<grid, block, shared_bytes, stream>>>(std::forward<Args>(args)...);
  MT_CUDA_CHECK_LAUNCH();
}

}  // namespace mixtape::kernels::cuda
