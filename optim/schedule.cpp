#include "optim/schedule.h"

#include <algorithm>
#include <cmath>

namespace mixtape::optim {
namespace {

/// Share of the way from `from` to `to`, in [0, 1].
double progress(std::int64_t step, std::int64_t from, std::int64_t to) {
  if (to <= from) return step < from ? 0 : 1;
  return std::clamp(static_cast<double>(step - from) / static_cast<double>(to - from), 0.0, 1.0);
}

float cosine(float lr, float min_lr, double share) {
  return static_cast<float>(min_lr +
                            0.5 * (lr - min_lr) * (1 + std::cos(share * 3.14159265358979323846)));
}

}  // namespace

float LinearWarmup::operator()(std::int64_t step) const {
  if (step >= warmup_steps) return lr;
  return static_cast<float>(lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps));
}
float Cosine::operator()(std::int64_t step) const {
  return cosine(lr, min_lr, progress(step, 0, total_steps));
}
float WarmupCosine::operator()(std::int64_t step) const {
  if (step < warmup_steps) return LinearWarmup{lr, warmup_steps}(step);
  return cosine(lr, min_lr, progress(step, warmup_steps, total_steps));
}
float WarmupLinear::operator()(std::int64_t step) const {
  if (step < warmup_steps) return LinearWarmup{lr, warmup_steps}(step);
  return static_cast<float>(lr + (min_lr - lr) * progress(step, warmup_steps, total_steps));
}

}  // namespace mixtape::optim
