// Page-locked host memory: cudaHostAlloc takes hundreds of microseconds and may wait for the
// device, so blocks are kept in classes of powers of two. A freed block that copies may still be
// using waits for their events.
#include "engine/cuda/pinned.h"

#include <array>
#include <bit>
#include <functional>
#include <map>
#include <mutex>

#include "engine/caching_allocator.h"
#include "engine/cuda/capture_mode.h"
#include "engine/cuda/cuda_check.h"
#include "engine/cuda/pending.h"

namespace mixtape::cudart {
namespace {

constexpr std::size_t kMinBlock = 512;
constexpr std::size_t kMaxBytes = std::size_t{1} << 47;

struct PinnedBlock : Deferrable {
  void* data = nullptr;
  std::size_t size = 0;  // a power of two
  std::size_t requested = 0;
  bool live = false;
  PinnedBlock* next = nullptr;  // in its class's free list
};

class PinnedAllocator final : public detail::CachingAllocator {
 public:
  Block allocate(std::size_t bytes, const Stream&) override {
    if (bytes == 0) return {};
    check_not_forked();
    const std::lock_guard lock(mutex_);
    if (bytes > kMaxBytes) out_of_memory(bytes);
    const std::size_t size = std::bit_ceil(std::max(bytes, kMinBlock));
    if (!pending_.empty()) pending_.process(reclaim_);
    PinnedBlock* block = take(size);
    if (block == nullptr) block = allocate_slow(size, bytes);
    block->requested = bytes;
    block->live = true;
    stats_.add_live(bytes);
    return {block->data, bytes, block};
  }

  // As the device allocator's: a failing CUDA call loses the block.
  void release(const Block& handle) noexcept override {
    if (handle.handle == nullptr || in_forked_child()) return;
    auto* block = static_cast<PinnedBlock*>(handle.handle);
    const std::lock_guard lock(mutex_);
    stats_.remove_live(block->requested);
    block->live = false;
    try {
      if (block->used_on.empty())
        reclaim(block);
      else
        pending_.add(block);
    } catch (...) {
    }
  }

  void record_stream(const Block& handle, const Stream& stream) override {
    if (handle.handle == nullptr || stream.device().is_cpu()) return;
    const std::lock_guard lock(mutex_);
    static_cast<PinnedBlock*>(handle.handle)->add_use(stream);
  }

  bool record_use(const void* data, const Stream& stream) {
    const std::lock_guard lock(mutex_);
    auto after = by_address_.upper_bound(data);
    if (after == by_address_.begin()) return false;
    PinnedBlock* block = std::prev(after)->second;
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(data) -
                                                 static_cast<const char*>(block->data));
    if (!block->live || offset >= block->size) return false;
    block->add_use(stream);
    return true;
  }

  MemoryStats stats() override {
    const std::lock_guard lock(mutex_);
    return stats_with_largest();
  }
  void reset_peak() override {
    const std::lock_guard lock(mutex_);
    stats_.reset_peak();
  }
  void empty_cache() override {
    check_not_forked();
    const std::lock_guard lock(mutex_);
    pending_.wait(reclaim_);
    free_all();
  }
  void set_limit(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

 private:
  PinnedBlock*& head_of(std::size_t size) {
    return free_[static_cast<std::size_t>(std::countr_zero(size))];
  }

  PinnedBlock* take(std::size_t size) {
    PinnedBlock*& head = head_of(size);
    PinnedBlock* block = head;
    if (block != nullptr) head = block->next;
    return block;
  }

  PinnedBlock* allocate_slow(std::size_t size, std::size_t bytes) {
    if (PinnedBlock* block = new_block(size)) return block;
    if (pending_.wait(reclaim_)) {
      if (PinnedBlock* block = take(size)) return block;
    }
    stats_.count_retry();
    free_all();
    if (PinnedBlock* block = new_block(size)) return block;
    out_of_memory(bytes);
  }

  PinnedBlock* new_block(std::size_t size) {
    if (limit_ != 0 && stats_.get().reserved + size > limit_) return nullptr;
    const RelaxedCapture relaxed;
    void* data = nullptr;
    const cudaError_t error = cudaHostAlloc(&data, size, cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    MT_CUDA_CHECK(error);
    stats_.add_reserved(size);
    auto* block = new PinnedBlock;
    block->data = data;
    block->size = size;
    by_address_.emplace(data, block);
    return block;
  }

  void reclaim(PinnedBlock* block) {
    if (!detail::caching_enabled()) {
      free_block(block);
      return;
    }
    PinnedBlock*& head = head_of(block->size);
    block->next = head;
    head = block;
  }

  void free_all() {
    for (PinnedBlock*& head : free_) {
      while (PinnedBlock* block = head) {
        head = block->next;
        free_block(block);
      }
    }
  }

  void free_block(PinnedBlock* block) {
    const RelaxedCapture relaxed;
    by_address_.erase(block->data);
    MT_CUDA_CHECK(cudaFreeHost(block->data));
    stats_.remove_reserved(block->size);
    delete block;
  }

  MemoryStats stats_with_largest() const {
    MemoryStats s = stats_.get();
    for (std::size_t i = free_.size(); i-- > 0 && s.largest_free_block == 0;)
      if (free_[i] != nullptr) s.largest_free_block = free_[i]->size;
    return s;
  }

  [[noreturn]] void out_of_memory(std::size_t bytes) {
    detail::throw_out_of_memory("pinned host memory", bytes, stats_with_largest(),
                                limit_ ? "the limit is " + detail::format_bytes(limit_) : "");
  }

  std::mutex mutex_;
  std::array<PinnedBlock*, 64> free_{};  // by the logarithm of the size
  std::map<const void*, PinnedBlock*, std::less<>> by_address_;
  PendingQueue pending_;
  detail::StatsCounter stats_{Device::cpu(), true};
  std::size_t limit_ = 0;

  struct Reclaim {
    PinnedAllocator* self;
    void operator()(Deferrable* item) const { self->reclaim(static_cast<PinnedBlock*>(item)); }
  };
  const Reclaim reclaim_{this};
};

PinnedAllocator& allocator() {
  static auto& instance = *new PinnedAllocator;
  return instance;
}

}  // namespace

detail::CachingAllocator& pinned_allocator() { return allocator(); }

bool record_pinned_use(const void* data, const Stream& stream) {
  return allocator().record_use(data, stream);
}

}  // namespace mixtape::cudart
