// Host memory: a cache of free blocks in size classes, eight to a power of two.
//
// Without it every activation of a training step larger than glibc's mmap threshold would be
// mapped, faulted in page by page and unmapped again, which costs more than the arithmetic. The
// cache is bounded: what is reserved stays near the highest amount ever live at once, and blocks of
// other classes go back to the system before it grows past that.
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <mutex>

#include "engine/caching_allocator.h"

namespace mixtape::detail {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kHugeThreshold = 2 * kHugePage;  // from here on ask for huge pages
constexpr std::size_t kSlack = std::size_t{64} << 20;  // cache that is always allowed
constexpr std::size_t kMaxBytes = std::size_t{1} << 47;
constexpr int kClassCount = 8 + 8 * (47 - 9);

// Multiples of 64 up to 512 bytes, then eight classes for each power of two (at most 12.5 % waste).
int class_of(std::size_t bytes) {
  if (bytes <= 512) return static_cast<int>((bytes + 63) / 64) - 1;
  const std::size_t b = bytes - 1;
  const int e = std::bit_width(b) - 1;
  return 8 + (e - 9) * 8 + static_cast<int>((b >> (e - 3)) & 7);
}

std::size_t size_of_class(int c) {
  if (c < 8) return static_cast<std::size_t>(c + 1) * 64;
  const int e = 9 + (c - 8) / 8, sub = (c - 8) % 8;
  return (std::size_t{1} << e) + (static_cast<std::size_t>(sub + 1) << (e - 3));
}

struct Record {
  void* data;
  Record* next;  // in its class's free list
  std::size_t requested;
  int size_class;
};

void* system_allocate(std::size_t bytes) {
  const bool huge = bytes >= kHugeThreshold;
  void* data = nullptr;
  if (posix_memalign(&data, huge ? kHugePage : kAlignment, bytes) != 0) return nullptr;
  if (huge) madvise(data, bytes, MADV_HUGEPAGE);  // a hint: not every kernel has it
  return data;
}

class CpuAllocator final : public CachingAllocator {
 public:
  Block allocate(std::size_t bytes, const Stream&) override {
    if (bytes == 0) return {};
    const std::lock_guard lock(mutex_);
    if (bytes > kMaxBytes) out_of_memory(bytes);
    const int c = class_of(bytes);
    Record* record = take(c);
    if (record == nullptr) record = grow(bytes, c);
    record->requested = bytes;
    stats_.add_live(bytes);
    return {record->data, bytes, record};
  }

  void release(const Block& block) noexcept override {
    if (block.handle == nullptr) return;
    auto* record = static_cast<Record*>(block.handle);
    const std::lock_guard lock(mutex_);
    stats_.remove_live(record->requested);
    if (!caching_enabled()) {
      give_back(record, record->requested);
      return;
    }
    record->next = free_[static_cast<std::size_t>(record->size_class)];
    free_[static_cast<std::size_t>(record->size_class)] = record;
  }

  void record_stream(const Block&, const Stream&) override {}  // CPU work is done on return

  MemoryStats stats() override {
    const std::lock_guard lock(mutex_);
    return stats_with_largest();
  }
  void reset_peak() override {
    const std::lock_guard lock(mutex_);
    stats_.reset_peak();
  }
  void empty_cache() override {
    const std::lock_guard lock(mutex_);
    trim(0);
  }
  void set_limit(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  // A free block of class c or, for blocks whose waste matters less than their page faults, one of
  // the next two classes.
  Record* take(int c) {
    const int last = c < kFirstShared ? c : std::min(c + 2, kClassCount - 1);
    for (int i = c; i <= last; ++i) {
      Record*& head = free_[static_cast<std::size_t>(i)];
      if (head == nullptr) continue;
      Record* record = head;
      head = record->next;
      return record;
    }
    return nullptr;
  }

  Record* grow(std::size_t bytes, int c) {
    const std::size_t size = caching_enabled() ? size_of_class(c) : bytes;
    const std::size_t live = stats_.get().allocated + bytes;
    if (live > high_water_) high_water_ = live;
    const std::size_t bound = high_water_ + high_water_ / 4 + kSlack;
    if (stats_.get().reserved + size > bound) trim(bound > size ? bound - size : 0);
    void* data = nullptr;
    for (int attempt = 0; data == nullptr; ++attempt) {
      const bool allowed = limit_ == 0 || stats_.get().reserved + size <= limit_;
      if (allowed) data = system_allocate(size);
      if (data != nullptr) break;
      if (attempt == 1) out_of_memory(bytes);
      stats_.count_retry();
      trim(0);
    }
    auto* record = new Record{data, nullptr, bytes, c};
    stats_.add_reserved(size);
    return record;
  }

  // Frees cached blocks, largest first, until at most `target` bytes are reserved.
  void trim(std::size_t target) {
    for (int c = kClassCount - 1; c >= 0; --c) {
      Record*& head = free_[static_cast<std::size_t>(c)];
      while (head != nullptr && stats_.get().reserved > target) {
        Record* record = head;
        head = record->next;
        give_back(record, size_of_class(c));
      }
    }
  }

  void give_back(Record* record, std::size_t size) {
    stats_.remove_reserved(size);
    std::free(record->data);
    delete record;
  }

  MemoryStats stats_with_largest() const {
    MemoryStats s = stats_.get();
    for (int c = kClassCount - 1; c >= 0 && s.largest_free_block == 0; --c)
      if (free_[static_cast<std::size_t>(c)] != nullptr) s.largest_free_block = size_of_class(c);
    return s;
  }

  [[noreturn]] void out_of_memory(std::size_t bytes) {
    throw_out_of_memory("cpu", bytes, stats_with_largest(),
                        limit_ ? "the limit is " + format_bytes(limit_) : "");
  }

  static constexpr int kFirstShared = 8 + 8 * (16 - 9);  // 64 KiB

  std::mutex mutex_;
  std::array<Record*, kClassCount> free_{};
  StatsCounter stats_{Device::cpu()};
  std::size_t high_water_ = 0;
  std::size_t limit_ = 0;
};

CpuAllocator* the_allocator = nullptr;

CpuAllocator& instance() {
  // Never destroyed: tensors in static objects may outlive it. A fork must not copy a held lock.
  static CpuAllocator& allocator = [&]() -> CpuAllocator& {
    the_allocator = new CpuAllocator;
    pthread_atfork([] { the_allocator->lock_for_fork(); },
                   [] { the_allocator->unlock_after_fork(); },
                   [] { the_allocator->unlock_after_fork(); });
    return *the_allocator;
  }();
  return allocator;
}

}  // namespace

CachingAllocator& cpu_allocator() { return instance(); }

}  // namespace mixtape::detail
