// Memory: one caching allocator per device, one for pinned host memory, and plain aligned host
// memory.
//
// CUDA blocks are cached in size classes and reused in stream order: a freed block goes back to the
// stream it was allocated on, and, if record_stream() named others, only after their work is done.
// MIXTAPE_NO_CACHE=1 turns the caches off, for memory checkers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>

#include "engine/device.h"
#include "engine/stream.h"

namespace mixtape {

/// One allocation. `handle` is the allocator's own record.
struct Block {
  void* data = nullptr;
  std::size_t bytes = 0;  // as requested
  void* handle = nullptr;
};

class Allocator {
 public:
  virtual ~Allocator() = default;
  /// At least `bytes` bytes, aligned to 256 (device) or 64 (host). bytes == 0 gives a null block.
  /// Throws OutOfMemory with requested, allocated, reserved and the largest free block.
  virtual Block allocate(std::size_t bytes, const Stream& stream) = 0;
  virtual void release(const Block& block) noexcept = 0;
  /// Keeps the block from being reused until work queued so far on `stream` is done.
  virtual void record_stream(const Block& block, const Stream& stream) = 0;
};

/// The allocator of a device's memory.
Allocator& allocator_of(Device device);
/// Page-locked host memory (plain host memory in a build or on a machine without CUDA).
Allocator& pinned_allocator();

/// Bytes and counts of one device's allocator since the start (peaks since
/// reset_peak_memory_stats).
struct MemoryStats {
  std::size_t allocated = 0, allocated_peak = 0;  // bytes in live tensors
  std::size_t reserved = 0, reserved_peak = 0;  // bytes taken from the driver, cached ones included
  std::size_t largest_free_block = 0;
  std::uint64_t allocations = 0, frees = 0;  // calls by tensors
  std::uint64_t driver_allocations = 0, driver_frees = 0;
  std::uint64_t retries = 0;  // cache emptied because the driver had no room
};
MemoryStats memory_stats(Device device);
MemoryStats pinned_memory_stats();
void reset_peak_memory_stats(Device device);
/// A readable multi-line report of memory_stats().
std::string memory_summary(Device device);
/// Gives cached, unused memory back to the driver.
void empty_cache(Device device);
void empty_pinned_cache();
/// The most that a device's allocator may reserve, as if the device were that small; 0 means all
/// there is. Allocations beyond it empty the cache and then throw OutOfMemory.
void set_memory_limit(Device device, std::size_t bytes);

}  // namespace mixtape
