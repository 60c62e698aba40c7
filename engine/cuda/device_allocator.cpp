// The caching allocator of one CUDA device.
//
// Memory comes from cudaMalloc in segments, which are split into chunks and merged again as the
// chunks are freed. A chunk belongs to the stream it was allocated for: work queued there later may
// reuse it at once, since the stream keeps the order. Uses on other streams (record_stream) make a
// freed chunk wait for their events. The sizes are those of PyTorch's CUDACachingAllocator, so that
// the same model reserves the same memory. Private pools (graph capture) are free lists under their
// own number: nothing moves between pools.
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/caching_allocator.h"
#include "engine/cuda/capture_mode.h"
#include "engine/cuda/cuda_check.h"
#include "engine/cuda/free_list.h"

namespace mixtape::cudart {
namespace {

using detail::format_bytes;

constexpr std::size_t kMaxBytes = std::size_t{1} << 50;

// This thread's pool on each device.
thread_local constinit std::uint64_t current_pools[kMaxDevices] = {};

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

std::size_t segment_size(std::size_t size) {
  if (size <= kSmallLimit) return kSmallSegment;
  return size < kExactLimit ? kLargeSegment : round_up(size, kSegmentRound);
}

class DeviceAllocator final : public detail::CachingAllocator {
 public:
  explicit DeviceAllocator(int device) : device_(Device::cuda(device)) {}

  Block allocate(std::size_t bytes, const Stream& stream) override {
    if (bytes == 0) return {};
    check_not_forked();
    MT_CHECK(stream.device() == device_, "allocate: expected a stream of ", device_,
             ", got one of ", stream.device());
    const std::lock_guard lock(mutex_);
    if (bytes > kMaxBytes) out_of_memory(bytes);
    const std::size_t size = round_up(bytes, kMinChunk);
    if (!pending_.empty()) pending_.process(reclaim_);
    FreeList& list = list_for(size, stream.native());
    Chunk* chunk = list.best_fit(size);
    if (chunk != nullptr)
      list.remove(chunk);
    else
      chunk = allocate_slow(list, size, bytes);
    split(chunk, size);
    chunk->requested = bytes;
    stats_.add_live(bytes);
    return {chunk->data, bytes, chunk};
  }

  // A failing CUDA call (the driver is shutting down, or an earlier kernel broke the context)
  // leaves the chunk out of every list: lost, but never handed out while it may be in use.
  void release(const Block& block) noexcept override {
    if (block.handle == nullptr || in_forked_child()) return;
    auto* chunk = static_cast<Chunk*>(block.handle);
    const std::lock_guard lock(mutex_);
    stats_.remove_live(chunk->requested);
    try {
      if (chunk->used_on.empty())
        reclaim(chunk);
      else
        pending_.add(chunk);
    } catch (...) {
    }
  }

  void record_stream(const Block& block, const Stream& stream) override {
    if (block.handle == nullptr || stream.device().is_cpu()) return;
    auto* chunk = static_cast<Chunk*>(block.handle);
    const std::lock_guard lock(mutex_);
    if (stream.device() == device_ && stream.native() == chunk->home->stream()) return;
    chunk->add_use(stream);
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
    release_whole_segments();
    drop_finished_pools();
  }
  void set_limit(std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

  std::uint64_t create_pool() {
    const std::lock_guard lock(mutex_);
    return ++last_pool_;
  }

  // Live chunks of the pool may outlive it; their segments go back to the driver with the next
  // empty_cache() (or when memory runs out) after the last of them is freed.
  void release_pool(std::uint64_t pool) noexcept {
    if (in_forked_child()) return;
    const std::lock_guard lock(mutex_);
    for (auto& lists : lists_)
      if (lists->pool == pool) lists->released = true;
    try {
      pending_.wait(reclaim_);
      release_whole_segments(pool);
      drop_finished_pools();
    } catch (...) {  // as in release(): what the driver refuses stays reserved
    }
  }

 private:
  struct Lists {
    Lists(void* s, std::uint64_t p) : stream(s), pool(p), small(true, s, p), large(false, s, p) {}
    void* stream;
    std::uint64_t pool;
    bool released = false;
    FreeList small, large;
    bool has_segments() const { return small.segments + large.segments > 0; }
  };

  FreeList& list_for(std::size_t size, void* stream) {
    const std::uint64_t pool = current_pools[device_.index];
    if (last_lists_ == nullptr || last_lists_->stream != stream || last_lists_->pool != pool)
      last_lists_ = find_lists(stream, pool);
    return size <= kSmallLimit ? last_lists_->small : last_lists_->large;
  }

  Lists* find_lists(void* stream, std::uint64_t pool) {
    for (auto& lists : lists_)
      if (lists->stream == stream && lists->pool == pool) return lists.get();
    return lists_.emplace_back(std::make_unique<Lists>(stream, pool)).get();
  }

  // No chunk fits. After each way of getting memory back the free list is searched again, since
  // chunks that were waiting for events may have merged into one that does.
  Chunk* allocate_slow(FreeList& list, std::size_t size, std::size_t bytes) {
    const std::size_t segment = detail::caching_enabled() ? segment_size(size) : size;
    if (Chunk* chunk = new_segment(list, segment)) return chunk;
    if (pending_.wait(reclaim_)) {
      if (Chunk* chunk = list.best_fit(size)) {
        list.remove(chunk);
        return chunk;
      }
    }
    stats_.count_retry();
    release_whole_segments();
    if (Chunk* chunk = new_segment(list, segment)) return chunk;
    const std::size_t exact = round_up(size, kSegmentRound);
    if (exact < segment) {
      if (Chunk* chunk = new_segment(list, exact)) return chunk;
    }
    out_of_memory(bytes);
  }

  /// A segment as one chunk that is in no list; nullptr if there is no room for it.
  Chunk* new_segment(FreeList& list, std::size_t size) {
    if (limit_ != 0 && stats_.get().reserved + size > limit_) return nullptr;
    const CudaDeviceGuard guard(device_);
    const RelaxedCapture relaxed;
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, size);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    MT_CUDA_CHECK(error);
    stats_.add_reserved(size);
    Chunk* chunk = new_chunk();
    chunk->data = static_cast<char*>(data);
    chunk->size = size;
    chunk->home = &list;
    ++list.segments;
    return chunk;
  }

  /// Cuts what a live chunk does not need off its end.
  void split(Chunk* chunk, std::size_t size) {
    FreeList& list = *chunk->home;
    if (!list.should_split(chunk->size, size)) return;
    Chunk* rest = new_chunk();
    rest->data = chunk->data + size;
    rest->size = chunk->size - size;
    rest->home = &list;
    rest->previous = chunk;
    rest->next = chunk->next;
    if (rest->next != nullptr) rest->next->previous = rest;
    chunk->next = rest;
    chunk->size = size;
    list.insert(rest);
  }

  /// Puts a chunk that nothing uses any more into its free list, merged with its free neighbours.
  void reclaim(Chunk* chunk) {
    if (!detail::caching_enabled()) {
      free_segment(chunk);
      return;
    }
    if (Chunk* before = chunk->previous; before != nullptr && before->free) {
      before->home->remove(before);
      absorb_next(before);
      chunk = before;
    }
    if (Chunk* after = chunk->next; after != nullptr && after->free) {
      after->home->remove(after);
      absorb_next(chunk);
    }
    chunk->home->insert(chunk);
  }

  void absorb_next(Chunk* chunk) {
    Chunk* gone = chunk->next;
    chunk->size += gone->size;
    chunk->next = gone->next;
    if (chunk->next != nullptr) chunk->next->previous = chunk;
    spare_.push_back(gone);
  }

  // Segments of private pools stay: a captured graph writes to them without our knowledge.
  void release_whole_segments(std::uint64_t pool = 0) {
    for (auto& lists : lists_) {
      if (lists->pool != pool && !lists->released) continue;
      for (FreeList* list : {&lists->small, &lists->large}) {
        while (Chunk* chunk = list->whole_segment()) {
          list->remove(chunk);
          free_segment(chunk);
        }
      }
    }
  }

  // Released pools whose last segment is gone.
  void drop_finished_pools() {
    std::erase_if(lists_, [](const auto& l) { return l->released && !l->has_segments(); });
    last_lists_ = nullptr;
  }

  // cudaFree waits for the work that uses the segment.
  void free_segment(Chunk* chunk) {
    const CudaDeviceGuard guard(device_);
    const RelaxedCapture relaxed;
    MT_CUDA_CHECK(cudaFree(chunk->data));
    stats_.remove_reserved(chunk->size);
    --chunk->home->segments;
    spare_.push_back(chunk);
  }

  Chunk* new_chunk() {
    if (spare_.empty()) return new Chunk;
    Chunk* chunk = spare_.back();
    spare_.pop_back();
    *chunk = Chunk{};
    return chunk;
  }

  MemoryStats stats_with_largest() const {
    MemoryStats s = stats_.get();
    for (const auto& lists : lists_)
      s.largest_free_block =
          std::max({s.largest_free_block, lists->small.largest(), lists->large.largest()});
    return s;
  }

  [[noreturn]] void out_of_memory(std::size_t bytes) {
    std::size_t free = 0, total = 0;
    {
      const CudaDeviceGuard guard(device_);
      MT_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    }
    std::string more = "the device has " + format_bytes(free) + " free of " + format_bytes(total);
    if (limit_ != 0) more += ", the limit is " + format_bytes(limit_);
    detail::throw_out_of_memory(detail::concat(device_), bytes, stats_with_largest(), more);
  }

  const Device device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lists>> lists_;
  Lists* last_lists_ = nullptr;
  PendingQueue pending_;
  std::vector<Chunk*> spare_;
  detail::StatsCounter stats_{device_};
  std::size_t limit_ = 0;
  std::uint64_t last_pool_ = 0;

  struct Reclaim {
    DeviceAllocator* self;
    void operator()(Deferrable* item) const { self->reclaim(static_cast<Chunk*>(item)); }
  };
  const Reclaim reclaim_{this};
};

// Never destroyed: tensors in static objects may outlive any order of destruction.
DeviceAllocator& allocator(int device) {
  static auto& all = *[] {
    auto* made = new std::vector<std::unique_ptr<DeviceAllocator>>;
    for (int i = 0; i < cuda_device_count(); ++i)
      made->push_back(std::make_unique<DeviceAllocator>(i));
    return made;
  }();
  return *all[static_cast<std::size_t>(device)];
}

}  // namespace

detail::CachingAllocator& device_allocator(int device) { return allocator(device); }

std::uint64_t create_memory_pool(int device) { return allocator(device).create_pool(); }

void release_memory_pool(int device, std::uint64_t pool) noexcept {
  allocator(device).release_pool(pool);
}

std::uint64_t exchange_memory_pool(int device, std::uint64_t pool) noexcept {
  return std::exchange(current_pools[device], pool);
}

}  // namespace mixtape::cudart
