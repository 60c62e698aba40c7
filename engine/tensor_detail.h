// Recorded operations that the engine needs before ops/ exists on the include path; ops/ defines
// them.
#pragma once

#include "engine/tensor.h"

namespace mixtape::detail {

/// a + b, recorded when grad mode is on (used to sum gradients under create_graph).
Tensor add_tensors(const Tensor& a, const Tensor& b);
/// t in another dtype, recorded when grad mode is on.
Tensor cast_tensor(const Tensor& t, Dtype dtype);
/// target = source (converted, both of one shape), without recording; bumps target's version.
void copy_into(const Tensor& target, const Tensor& source);
/// target += source in target's memory, without recording; bumps target's version.
void accumulate_into(const Tensor& target, const Tensor& source);

}  // namespace mixtape::detail
