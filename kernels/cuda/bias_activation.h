// What cuBLASLt's epilogues do not cover: z = scale * out + bias, pre_activation = z,
// out = activation(z), in one pass over out.
#pragma once

#include "kernels/matmul.h"

namespace mixtape::kernels::cuda {

/// out is (M, N) or (B, M, N) with any strides; pre_activation, if given, has its sizes and dtype;
/// bias, if given, is (N) of any floating dtype. scale 0 does not read out. Deterministic; one
/// rounding to out's dtype, arithmetic in float (double for f64).
void bias_activation(const Stream& stream, View out, float scale, View bias, Activation activation,
                     View pre_activation);

}  // namespace mixtape::kernels::cuda
