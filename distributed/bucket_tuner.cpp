#include "distributed/bucket_tuner.h"

#include <algorithm>
#include <cstdio>

namespace mixtape::distributed {

std::vector<BucketSizes> BucketTuner::candidates(const std::vector<Tensor>& parameters,
                                                 const BucketSizes& first_choice) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  std::vector<BucketSizes> all;
  std::vector<std::vector<std::int64_t>> layouts;
  const auto add = [&](const BucketSizes& sizes) {
    std::vector<std::int64_t> layout;
    for (const GradientBucket& b : make_gradient_buckets(parameters, sizes))
      layout.push_back(b.bytes());
    if (std::find(layouts.begin(), layouts.end(), layout) != layouts.end()) return;
    layouts.push_back(std::move(layout));
    all.push_back(sizes);
  };
  add(first_choice);
  for (const std::int64_t rest : {2 * kMiB, 8 * kMiB, 25 * kMiB, 100 * kMiB})
    add({.first = first_choice.first, .rest = rest});
  return all;
}

bool BucketTuner::note(double seconds) {
  passes_.push_back(seconds);
  if (passes_.size() < kWarmUp + kPasses) return false;
  const auto first = passes_.begin() + kWarmUp, middle = first + kPasses / 2;
  std::nth_element(first, middle, passes_.end());
  results_.push_back(*middle);
  passes_.clear();
  if (!done()) ++index_;
  return true;
}

std::size_t BucketTuner::choose(const std::vector<double>& results) {
  const auto best = std::min_element(results.begin(), results.end());
  return *best < 0.95 * results[0] ? static_cast<std::size_t>(best - results.begin()) : 0;
}

std::string BucketTuner::report(const std::vector<double>& results, std::size_t chosen) const {
  std::string text;
  for (std::size_t i = 0; i < results.size(); ++i) {
    char entry[64];
    std::snprintf(entry, sizeof(entry), "%s%.1f MiB %.2f ms%s", i == 0 ? "" : ", ",
                  static_cast<double>(candidates_[i].rest) / (1 << 20), 1e3 * results[i],
                  i == chosen ? " (chosen)" : "");
    text += entry;
  }
  return text;
}

}  // namespace mixtape::distributed
