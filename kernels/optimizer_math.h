// The rules of loss scaling and clipping that both backends run on one scalar.
#pragma once

#include "engine/half.h"
#include "kernels/optimizer.h"

namespace mixtape::optimizer_math {

/// PyTorch's GradScaler: backoff after inf or NaN, growth after growth_interval clean steps in a
/// row, both clamped. found_inf is taken and cleared.
MT_HOST_DEVICE inline kernels::ScalerState next_scaler_state(kernels::ScalerState s,
                                                             const kernels::ScalerPolicy& policy) {
  if (s.found_inf != 0) {
    s.scale *= policy.backoff_factor;
    s.growth_tracker = 0;
    s.skipped_in_a_row += 1;
  } else {
    s.skipped_in_a_row = 0;
    s.growth_tracker += 1;
    if (s.growth_tracker >= static_cast<float>(policy.growth_interval)) {
      s.scale *= policy.growth_factor;
      s.growth_tracker = 0;
    }
  }
  if (s.scale < policy.min_scale) s.scale = policy.min_scale;
  if (s.scale > policy.max_scale) s.scale = policy.max_scale;
  s.inv_scale = 1 / s.scale;
  s.found_inf = 0;
  return s;
}

/// min(1, max_norm / (norm + 1e-6)), as PyTorch's clip_grad_norm_; NaN where norm is.
MT_HOST_DEVICE inline float clip_factor(float norm, float max_norm) {
  const float f = max_norm / (norm + 1e-6f);
  return f > 1 ? 1.0f : f;
}

}  // namespace mixtape::optimizer_math
