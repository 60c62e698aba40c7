// Autocast: inside the scope, ops choose their precision from the policy in their OpInfo.
//
//   { Autocast amp(Dtype::f16);  loss = cross_entropy(net(x), y); }     // matmuls in f16, loss in
//   f32
//
// Scopes nest; Autocast(false) switches it off inside one. A float32 parameter's 16-bit copy is
// made once for each of its versions and kept; each use records its own cast on the tape, so that a
// no-grad pass never hides a gradient and an in-place update is never missed.
#pragma once

#include <string>
#include <vector>

#include "engine/op.h"
#include "engine/thread_state.h"

namespace mixtape {

class Autocast {
 public:
  /// dtype: f16 or bf16. `cache`: keep the weights' 16-bit copies.
  explicit Autocast(Dtype dtype, bool enabled = true, bool cache = true);
  /// Autocast off (false) or as it was last configured (true).
  explicit Autocast(bool enabled);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  ThreadState previous_;
};

/// Whether this thread is inside an enabled Autocast scope.
inline bool autocast_enabled() { return thread_state.autocast; }

/// The tensor that an op of policy `low` uses for t: t itself, or its recorded cast.
Tensor autocast_low(const Tensor& t);

namespace amp {

struct PolicyUse {
  std::string op;
  Cast cast;
  std::uint64_t calls = 0, casts = 0, cast_bytes = 0, cache_hits = 0;
};
/// Per op seen under autocast since the outermost scope was last entered on this thread: policy,
/// casts inserted and the bytes they wrote.
std::vector<PolicyUse> last_step();
/// last_step() as a table.
std::string explain();

namespace detail {
void note_call(const OpInfo& info);
void note_cast(std::uint64_t bytes, bool cache_hit);
}  // namespace detail
}  // namespace amp
}  // namespace mixtape
