// The bytes behind one or more tensors, with the version counter that all of them share.
#pragma once

#include "engine/allocator.h"
#include "engine/ref.h"

namespace mixtape {

class GraphRecorder;
/// This thread's graph capture (engine/graph_recorder.h), or nullptr.
extern thread_local constinit GraphRecorder* graph_recorder;

class Storage : public RefCounted {
 public:
  /// `bytes` bytes on `device`, from its caching allocator, in order on the current stream.
  static Ref<Storage> create(std::size_t bytes, Device device);
  /// Page-locked host memory.
  static Ref<Storage> create_pinned(std::size_t bytes);
  static void destroy(Storage* storage) noexcept;

  void* data() const { return block_.data; }
  std::size_t bytes() const { return block_.bytes; }
  Device device() const { return device_; }
  bool pinned() const { return pinned_; }

  /// Counts in-place writes, in grad mode or not. Saved tensors compare it.
  std::uint32_t version() const { return version_.load(std::memory_order_relaxed); }
  void bump_version() {
    version_.fetch_add(1, std::memory_order_relaxed);
    if (graph_recorder != nullptr) [[unlikely]]
      note_captured_write();
  }
  /// Counts the in-place writes that were recorded on the tape; views made before one are stale.
  std::uint32_t recorded_writes() const { return recorded_writes_.load(std::memory_order_relaxed); }
  void bump_recorded_writes() { recorded_writes_.fetch_add(1, std::memory_order_relaxed); }
  void record_stream(const Stream& stream) { allocator_->record_stream(block_, stream); }
  /// Number of the graph capture during which this memory was made; 0: outside of any.
  std::uint32_t captured_by() const { return captured_by_; }

 private:
  void note_captured_write();
  Storage(Block block, Device device, Allocator& allocator, bool pinned)
      : block_(block), allocator_(&allocator), device_(device), pinned_(pinned) {}
  Block block_;
  Allocator* allocator_;
  Device device_;
  bool pinned_;
  std::uint32_t captured_by_ = 0;
  std::atomic<std::uint32_t> version_{0}, recorded_writes_{0};
};

}  // namespace mixtape
