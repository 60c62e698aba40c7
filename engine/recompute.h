// Recomputation: a function whose results are kept but not what was made on the way; backward runs
// it again, recorded, and differentiates that (Chen et al. 2016, "Training deep nets with sublinear
// memory cost"). nn/checkpoint.h is the user's side.
#pragma once

#include <vector>

#include "engine/function.h"
#include "engine/op.h"

namespace mixtape {

using RecomputedFunction = Function<std::vector<Tensor>(Inputs)>;

/// function(inputs), recorded as one node. Its edges lead to every tensor that the function reads
/// and that a gradient can flow to, whether passed or captured, so that leaf hooks wait for it.
std::vector<Tensor> apply_recomputed(RecomputedFunction function, Inputs inputs);

/// Whether this thread is running such a function again for its backward pass: what a forward pass
/// does once (running statistics) was done by the first run.
bool recomputing();

}  // namespace mixtape
