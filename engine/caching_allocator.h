// What the allocators of this folder share: statistics, a limit, an emptiable cache, and the text
// of the out-of-memory report. Internal: users see engine/allocator.h.
#pragma once

#include <string>

#include "engine/allocator.h"
#include "engine/profile_hooks.h"

namespace mixtape::detail {

class CachingAllocator : public Allocator {
 public:
  virtual MemoryStats stats() = 0;
  virtual void reset_peak() = 0;
  virtual void empty_cache() = 0;
  virtual void set_limit(std::size_t bytes) = 0;
};

/// MemoryStats kept up to date under the owner's lock, and told to the profiler.
class StatsCounter {
 public:
  explicit StatsCounter(Device device, bool pinned = false) : device_(device), pinned_(pinned) {}
  void add_live(std::size_t bytes) {
    ++stats_.allocations;
    stats_.allocated += bytes;
    if (stats_.allocated > stats_.allocated_peak) stats_.allocated_peak = stats_.allocated;
    tell_profiler(static_cast<std::int64_t>(bytes));
  }
  void remove_live(std::size_t bytes) {
    ++stats_.frees;
    stats_.allocated -= bytes;
    tell_profiler(-static_cast<std::int64_t>(bytes));
  }
  void add_reserved(std::size_t bytes) {
    ++stats_.driver_allocations;
    stats_.reserved += bytes;
    if (stats_.reserved > stats_.reserved_peak) stats_.reserved_peak = stats_.reserved;
  }
  void remove_reserved(std::size_t bytes) {
    ++stats_.driver_frees;
    stats_.reserved -= bytes;
  }
  void count_retry() { ++stats_.retries; }
  void reset_peak() {
    stats_.allocated_peak = stats_.allocated;
    stats_.reserved_peak = stats_.reserved;
  }
  const MemoryStats& get() const { return stats_; }

 private:
  void tell_profiler(std::int64_t bytes) const {
    if (profile::mode() & profile::kMemory) [[unlikely]]
      profile::note_memory(device_, pinned_, bytes, stats_.allocated, stats_.reserved);
  }

  MemoryStats stats_;
  Device device_;
  bool pinned_;
};

/// True when freed memory may be kept for reuse: not under MIXTAPE_NO_CACHE=1, nor in a build with
/// the address sanitizer, which could not see a use after free.
bool caching_enabled();

/// "1.50 GiB", "512 B".
std::string format_bytes(std::size_t bytes);

/// Throws OutOfMemory: "matmul: out of memory on cuda:0: requested ..., allocated ..., reserved
/// ..., largest free block ...", then `more`. The op is OpScope::current().
[[noreturn]] void throw_out_of_memory(const std::string& place, std::size_t requested,
                                      const MemoryStats& stats, const std::string& more);

CachingAllocator& cpu_allocator();

}  // namespace mixtape::detail
