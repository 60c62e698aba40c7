// Which tensors a piece of code reads that a gradient can flow to, noted while nothing is recorded:
// how a recomputed function (engine/recompute.h) finds the parameters that it captures. Internal.
#pragma once

#include <vector>

#include "engine/node.h"

namespace mixtape {

/// A tensor that backward needs again, and what to check it by.
struct RecomputeSource {
  Tensor data;  // outside the tape; undefined for an absent input
  std::uint32_t version = 0;
  Edge edge;  // empty when it needs no gradient

  explicit RecomputeSource(const Tensor& t);
};

/// Until its end notes what ops of this thread read of tensors that need a gradient and were made
/// before. Scopes nest.
class GradientUses {
 public:
  GradientUses();
  ~GradientUses();
  GradientUses(const GradientUses&) = delete;
  GradientUses& operator=(const GradientUses&) = delete;
  /// This thread's innermost scope, or nullptr.
  static GradientUses* current() { return current_; }

  void note(Inputs read);
  std::vector<RecomputeSource>& sources() { return sources_; }

 private:
  static thread_local constinit GradientUses* current_;
  GradientUses* outer_;
  std::uint64_t first_sequence_;
  std::vector<RecomputeSource> sources_;
};

}  // namespace mixtape
