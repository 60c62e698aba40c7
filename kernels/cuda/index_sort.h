// A stable sort of (destination, source item) pairs, which puts all additions to one destination
// side by side in the order of the items. By CUB's radix sort, which is slow to compile: a file of
// its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace mixtape::kernels::cuda {

/// Scratch bytes of sort_pairs for `count` pairs.
std::size_t sort_scratch_bytes(std::int64_t count);

/// Sorts by the low `bits` of keys.
void sort_pairs(void* scratch, std::size_t scratch_bytes, const std::uint32_t* keys_in,
                std::uint32_t* keys_out, const std::uint32_t* items_in, std::uint32_t* items_out,
                std::int64_t count, int bits, cudaStream_t stream);

}  // namespace mixtape::kernels::cuda
