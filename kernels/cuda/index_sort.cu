#include "kernels/cuda/index_sort.h"

#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/cuda_check.h"

namespace mixtape::kernels::cuda {

std::size_t sort_scratch_bytes(std::int64_t count) {
  std::size_t bytes = 0;
  const std::uint32_t* in = nullptr;
  std::uint32_t* out = nullptr;
  MT_CUDA_CHECK(
      cub::DeviceRadixSort::SortPairs(nullptr, bytes, in, out, in, out, static_cast<int>(count)));
  return bytes;
}

void sort_pairs(void* scratch, std::size_t scratch_bytes, const std::uint32_t* keys_in,
                std::uint32_t* keys_out, const std::uint32_t* items_in, std::uint32_t* items_out,
                std::int64_t count, int bits, cudaStream_t stream) {
  MT_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, keys_in, keys_out, items_in,
                                                items_out, static_cast<int>(count), 0, bits,
                                                stream));
}

}  // namespace mixtape::kernels::cuda
