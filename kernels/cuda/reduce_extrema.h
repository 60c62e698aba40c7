// Maximum and minimum, in a file of their own to keep each quick to compile.
#pragma once

#include "kernels/cuda/reduction_plan.h"

namespace mixtape::kernels::cuda {

void reduce_extrema(const Stream& stream, bool largest, const ReductionPlan& plan, const View& out,
                    const View& x, Workspace workspace);

}  // namespace mixtape::kernels::cuda
