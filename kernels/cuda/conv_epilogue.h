// What convolutions need around cuDNN: bias and ReLU over packed outputs, the bias gradient, and
// the accumulation of weight gradients.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels::cuda {

/// y[n, o, i] = relu?(y[n, o, i] + bias[o]) in place, y (images, channels, pixels) packed; bias (O)
/// of any floating dtype, or absent.
void planar_bias_relu(const Stream& stream, View y, View bias, bool relu);

/// dw = src + beta * dw for 4-D views of equal sizes and any strides; dtypes may differ, the sum is
/// in float (double if src is f64).
void accumulate_weight_gradient(const Stream& stream, View dw, float beta, View src);

/// db[o] = sum of dy[n, o, i] over n and i, + beta * db[o]; dy (images, channels, pixels) with
/// packed pixels and any image and channel stride.
void planar_channel_sums(const Stream& stream, View db, float beta, View dy, Workspace workspace);
std::size_t planar_channel_sums_workspace_bytes(std::int64_t images, std::int64_t channels,
                                                std::int64_t pixels);

}  // namespace mixtape::kernels::cuda
