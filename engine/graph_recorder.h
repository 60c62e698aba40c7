// What a step does on the host while its device work is captured, noted so that each replay can
// repeat it: versions bumped, gradients that became valid, random numbers drawn, host values that
// the device reads. One per capture, current on the capturing thread. Internal; see capture.h.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/function.h"
#include "engine/memory_pool.h"
#include "engine/node.h"
#include "engine/philox.h"

namespace mixtape {

class GraphRecorder {
 public:
  explicit GraphRecorder(Device device);
  Device device() const { return device_; }
  std::uint32_t id() const { return id_; }

  /// Memory made before the capture stays where it is for as long as the graph lives.
  void note_read(const Tensor& t);
  /// Its version moves at each replay.
  void note_write(Storage& storage);
  /// Whether the step has written it so far.
  bool writes(Storage& storage) const { return writes_.contains(&storage); }
  /// The step looks at a leaf's gradient, or (`reset`) overwrites whatever it was.
  void note_leaf(TensorImpl& leaf, bool reset = false);
  /// The step reads the leaf's 16-bit copy without making it.
  void note_shadow(TensorImpl& leaf);
  /// Runs before each replay, on its stream: sends to the device what the host has changed.
  void before_replay(Function<void()> hook) { hooks_.push_back(std::move(hook)); }
  void keep(const Tensor& t) { note_read(t); }
  /// The state of a draw whose base the device reads at each replay.
  PhiloxState draw(std::uint64_t blocks);

  /// Ends the notes: the leaves' states now are those after every replay.
  void finish(const std::vector<Tensor>& outputs);
  /// Undoes the notes' effect on gradients: nothing was computed.
  void abandon();

  void prepare_replay();
  void complete_replay();

 private:
  struct Leaf {
    Ref<TensorImpl> impl;
    const void* data;
    const void* gradient = nullptr;  // address, when the step uses it
    GradState before = GradState::none, after = GradState::none;
    bool any_before = false;  // the step overwrites the gradient
    bool scaled_before = false, scaled_after = false;
    Tensor shadow;  // read as it was
    bool shadow_fresh_after = false;
  };
  Leaf& leaf_of(TensorImpl& leaf);
  bool outside(const Storage& s) const;
  void check(const Leaf& leaf) const;

  Device device_;
  std::uint32_t id_;
  std::unordered_map<Storage*, Ref<Storage>> reads_, writes_;
  std::unordered_map<TensorImpl*, Leaf> leaves_;
  std::vector<Function<void()>> hooks_;
  Tensor random_;  // (2) int64: seed and offset of the replay
  std::uint64_t drawn_ = 0;
};

/// Work that a capture under way must not record: uploads of tables that stay as they are. Streams
/// and memory are the process's own until the end of the scope, which waits for the work.
class OutsideCapture {
 public:
  explicit OutsideCapture(Device device);
  ~OutsideCapture() noexcept(false);
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  Device device_;
  GraphRecorder* recorder_;
  std::uint64_t pool_ = 0;
  std::unique_ptr<StreamGuard> stream_;
};

}  // namespace mixtape
