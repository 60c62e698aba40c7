// Channels-last images. There is no format flag: a (N, C, H, W) tensor is channels-last when its
// strides say that its memory is (N, H, W, C), which is what convolution on Tensor Cores wants. Ops
// on images give their results in the layout of their input, so that a network stays in the layout
// of the batch that it is fed.
#pragma once

#include "engine/op.h"

namespace mixtape {

/// Whether x is a (N, C, H, W) tensor over packed (N, H, W, C) memory. False for one channel, where
/// the layouts are the same.
bool is_channels_last(const Tensor& x);
/// Uninitialised memory for `sizes`, channels-last (`sizes` then has four dimensions) or
/// contiguous.
Tensor empty_in_layout(const Shape& sizes, Dtype dtype, Device device, bool channels_last);
/// For an op that works element by element: makes `out`, freshly allocated and contiguous,
/// channels- last if the first input of its shape is.
void follow_layout(Tensor& out, Inputs in);

}  // namespace mixtape
