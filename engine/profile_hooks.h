// Where the engine tells the profiler and NVTX what it is doing. Off, a hook is one load of a
// global and a branch that is not taken. On, each thread keeps a stack of open ranges and a queue
// of finished ones, without locks, that the profiler (engine/profiler.h) drains.
//
// Ranges are strictly last in, first out in each thread. A range that ends while others opened
// after it are still open ends those too, at the same instant; their own end then does nothing.
// What NVTX returns is never looked at, so a tool that is absent or attaches half way cannot
// unbalance it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "engine/device.h"
#include "engine/profile_kind.h"

namespace mixtape::profile {

/// What is on, as bits.
enum Mode : unsigned {
  kRecord = 1,  // ranges
  kNvtx = 2,
  kMemory = 4,         // memory changes, and time spent in allocators
  kShapes = 8,         // shapes of ops' inputs
  kWork = 16,          // FLOPs and bytes of ops
  kCupti = 32,         // ranges are announced to CUPTI
  kUnread = 1u << 31,  // MIXTAPE_NVTX has not been looked at
};
extern std::atomic<unsigned> current_mode;
/// The bits that are on now; 0 but for the first call of a process when nothing is.
inline unsigned mode() { return current_mode.load(std::memory_order_relaxed); }

std::int64_t now_ns() noexcept;

struct RecordedRange;  // engine/profile_recording.h

/// Opens a range that close(owner) ends; false if nothing is on. `literal` must outlive the
/// recording, `text` need not; give one of them.
bool open(const void* owner, ProfileKind kind, const char* literal, std::string_view text = {});
void close(const void* owner) noexcept;
/// The innermost range of this thread that is recorded, or nullptr; valid until the next opens.
RecordedRange* innermost() noexcept;
bool any_open() noexcept;

/// A number for the path of modules that this thread is inside (or, in a backward op, that its
/// forward was inside); 0 when nothing is recorded.
std::uint32_t module_id();

/// For the allocators: `bytes` more (or fewer) are live. Called under their locks.
void note_memory(Device device, bool pinned, std::int64_t bytes, std::size_t allocated,
                 std::size_t reserved) noexcept;
void note_allocator_time(std::int64_t ns) noexcept;

/// A scope of engine code; `name` is a literal.
class Range {
 public:
  Range(ProfileKind kind, const char* name) {
    if (mode() != 0) [[unlikely]]
      on_ = open(this, kind, name);
  }
  ~Range() {
    if (on_) [[unlikely]]
      close(this);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  bool on() const { return on_; }

 private:
  bool on_ = false;
};

/// Adds the time until the end of the scope to the innermost range, as spent in an allocator.
class AllocatorTime {
 public:
  AllocatorTime() : begin_ns_((mode() & kMemory) != 0 ? now_ns() : 0) {}
  ~AllocatorTime() {
    if (begin_ns_ != 0) [[unlikely]]
      note_allocator_time(now_ns() - begin_ns_);
  }
  AllocatorTime(const AllocatorTime&) = delete;
  AllocatorTime& operator=(const AllocatorTime&) = delete;

 private:
  std::int64_t begin_ns_;
};

/// Turns NVTX ranges on (+1) or off (-1); they are on while the sum is positive. Throws where this
/// build has no NVTX.
void count_nvtx(int change);

}  // namespace mixtape::profile
