// Chooses bucket sizes by trying some in a run's first steps: large buckets use the network well,
// small ones start earlier, and which counts more depends on the model, the network and the number
// of ranks. What is measured is what matters: the time that backward waits at its end. (Horovod's
// autotune has the same aim.) Internal.
#pragma once

#include <string>
#include <vector>

#include "distributed/gradient_buckets.h"

namespace mixtape::distributed {

class BucketTuner {
 public:
  /// The sizes that are tried for these parameters: `first_choice`, and others that give other
  /// buckets.
  static std::vector<BucketSizes> candidates(const std::vector<Tensor>& parameters,
                                             const BucketSizes& first_choice);

  explicit BucketTuner(std::vector<BucketSizes> candidates) : candidates_(std::move(candidates)) {}
  /// What the next pass is to use.
  const BucketSizes& current() const { return candidates_[index_]; }
  const BucketSizes& candidate(std::size_t i) const { return candidates_[i]; }
  /// A pass with current() waited so long. True when current() has changed or done() is true.
  bool note(double seconds);
  /// Every candidate had its passes; results() are their medians, in seconds.
  bool done() const { return results_.size() == candidates_.size(); }
  const std::vector<double>& results() const { return results_; }

  /// The index to use by what the ranks measured together: the best, but the first choice unless
  /// another is better by more than a twentieth.
  static std::size_t choose(const std::vector<double>& results);
  /// "25.0 MiB 1.20 ms, 8.0 MiB 0.75 ms (chosen), ..."
  std::string report(const std::vector<double>& results, std::size_t chosen) const;

 private:
  static constexpr std::size_t kWarmUp = 2, kPasses = 5;
  std::vector<BucketSizes> candidates_;
  std::size_t index_ = 0;
  std::vector<double> passes_, results_;
};

}  // namespace mixtape::distributed
