// What carries collectives: MPI or NCCL. communicator.cpp checks a call and hands it over as a
// Collective; a backend starts it and returns its state. Internal.
#pragma once

#include <memory>
#include <string>

#include "distributed/communicator.h"

namespace mixtape::distributed {

enum class CollectiveKind : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  send,
  recv,
  barrier,
};
const char* name_of(CollectiveKind kind);

/// One call, checked: tensors are contiguous and fit.
struct Collective {
  CollectiveKind kind;
  ReduceOp op = ReduceOp::sum;
  int peer = 0;               // root, or the other rank of send and recv, by its rank in the group
  Tensor in = {}, out = {};   // the same where the call is in place; both undefined in a barrier
  std::string describe = {};  // "world: all_reduce(sum) #12 of 'layers.0.weight' float32(768, 768)"
};

/// Progress of a collective. It lets go of the tensors when it is done.
class WorkState {
 public:
  virtual ~WorkState() = default;
  virtual void wait() = 0;
  /// Result there or failed. Called from any thread.
  virtual bool done() = 0;
  /// What went wrong while it is under way; empty as a rule. The watchdog asks.
  virtual std::string failure() { return ""; }
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::shared_ptr<WorkState> start(const Collective& collective) = 0;
  /// The backend of a part of the group: ranks of the same colour (-1: none), in the order of key.
  /// Every rank of this group calls it. `name` is the part's.
  virtual std::unique_ptr<Backend> split(int color, int key, const std::string& name) = 0;
};

}  // namespace mixtape::distributed
