// Clipping gradients by their global norm, without waiting for the device.
#pragma once

#include <vector>

#include "engine/function.h"
#include "engine/tensor.h"

namespace mixtape::optim {

/// Multiplies the gradients by min(1, max_norm / (norm + 1e-6)), where norm is the fp32 L2 norm of
/// all of them together, and returns the norm (0-d float32 on their device; reading it waits).
/// Gradients that still carry a loss scale are an error: call scaler.unscale(optimizer) first.
/// reduce_squares, optional, is given the squared norm (1 element) to sum over ranks.
Tensor clip_grad_norm(const std::vector<Tensor>& parameters, float max_norm,
                      const Function<void(Tensor&)>& reduce_squares = {});

}  // namespace mixtape::optim
