// Learning-rate schedules: host functions from the step number to a learning rate.
//
//   const optim::WarmupCosine schedule{.lr = 6e-4f, .warmup_steps = 700, .total_steps = 20000};
//   opt.set_lr(schedule(step));
#pragma once

#include <cstdint>

namespace mixtape::optim {

/// Linear from lr / warmup_steps to lr over warmup_steps, then constant.
struct LinearWarmup {
  float lr = 1e-3f;
  std::int64_t warmup_steps = 0;
  float operator()(std::int64_t step) const;
};
/// Half a cosine from lr at step 0 to min_lr at total_steps, then min_lr (Loshchilov and Hutter
/// 2017).
struct Cosine {
  float lr = 1e-3f, min_lr = 0;
  std::int64_t total_steps = 1;
  float operator()(std::int64_t step) const;
};
/// LinearWarmup, then Cosine over the remaining steps.
struct WarmupCosine {
  float lr = 1e-3f, min_lr = 0;
  std::int64_t warmup_steps = 0, total_steps = 1;
  float operator()(std::int64_t step) const;
};
/// LinearWarmup, then linear decay to min_lr at total_steps.
struct WarmupLinear {
  float lr = 1e-3f, min_lr = 0;
  std::int64_t warmup_steps = 0, total_steps = 1;
  float operator()(std::int64_t step) const;
};

}  // namespace mixtape::optim
