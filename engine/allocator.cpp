#include "engine/allocator.h"

#include <cstdio>
#include <sstream>

#include "engine/caching_allocator.h"
#include "engine/check.h"
#include "engine/cuda/backend.h"
#include "engine/env.h"
#include "engine/op_scope.h"

namespace mixtape {
namespace detail {

bool caching_enabled() {
#if defined(__SANITIZE_ADDRESS__)
  return false;
#else
  static const bool enabled = !env_flag("MIXTAPE_NO_CACHE");
  return enabled;
#endif
}

std::string format_bytes(std::size_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 5; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %s", value, kUnits[unit]);
  return text;
}

void throw_out_of_memory(const std::string& place, std::size_t requested, const MemoryStats& stats,
                         const std::string& more) {
  const char* op = OpScope::current();
  std::string text =
      concat(op ? op : "allocate", OpScope::in_backward() ? " (backward)" : "",
             ": out of memory on ", place, ": requested ", format_bytes(requested), ", allocated ",
             format_bytes(stats.allocated), ", reserved ", format_bytes(stats.reserved),
             ", largest free block ", format_bytes(stats.largest_free_block));
  if (!more.empty()) text += "; " + more;
  throw OutOfMemory(text);
}

namespace {
CachingAllocator& caching_allocator_of(Device device) {
  if (device.is_cpu()) return cpu_allocator();
  // Without check_device's look at forks: memory is released in a forked child too.
  if (device.index < 0 || device.index >= cuda_device_count()) check_device("allocator_of", device);
  return cudart::device_allocator(device.index);
}

// Without a usable CUDA device, pinned memory is plain host memory.
CachingAllocator& caching_pinned_allocator() {
  return cuda_device_count() > 0 ? cudart::pinned_allocator() : cpu_allocator();
}
}  // namespace
}  // namespace detail

Allocator& allocator_of(Device device) { return detail::caching_allocator_of(device); }
Allocator& pinned_allocator() { return detail::caching_pinned_allocator(); }

MemoryStats memory_stats(Device device) { return detail::caching_allocator_of(device).stats(); }
MemoryStats pinned_memory_stats() { return detail::caching_pinned_allocator().stats(); }
void reset_peak_memory_stats(Device device) { detail::caching_allocator_of(device).reset_peak(); }
void empty_cache(Device device) { detail::caching_allocator_of(device).empty_cache(); }
void empty_pinned_cache() { detail::caching_pinned_allocator().empty_cache(); }
void set_memory_limit(Device device, std::size_t bytes) {
  detail::caching_allocator_of(device).set_limit(bytes);
}

std::string memory_summary(Device device) {
  using detail::format_bytes;
  const MemoryStats s = memory_stats(device);
  std::ostringstream out;
  out << "memory of " << device << '\n'
      << "  allocated           " << format_bytes(s.allocated) << " (peak "
      << format_bytes(s.allocated_peak) << ")\n"
      << "  reserved            " << format_bytes(s.reserved) << " (peak "
      << format_bytes(s.reserved_peak) << ")\n"
      << "  largest free block  " << format_bytes(s.largest_free_block) << '\n'
      << "  allocations         " << s.allocations << " (" << s.frees << " freed)\n"
      << "  driver allocations  " << s.driver_allocations << " (" << s.driver_frees << " freed, "
      << s.retries << " times the cache was emptied for room)\n";
  return out.str();
}

}  // namespace mixtape
