// The two layouts of an image batch (N, C, H, W), read off its strides.
#pragma once

#include "engine/view.h"

namespace mixtape::kernels::cuda {

enum class ConvLayout : bool { planar, channels_last };

/// Packed strides of (a, b, c, d) sizes.
Shape packed_strides(const Shape& sizes, ConvLayout layout);
/// Whether each image of v is packed that way; the batch stride may be larger. Sizes of 1 and empty
/// views fit both.
bool has_layout(const View& v, ConvLayout layout);
/// As has_layout, with the batch packed too.
bool is_packed(const View& v, ConvLayout layout);
/// planar if that fits, else channels_last; throws "op: name: ..." if v is neither, or not packed.
ConvLayout layout_of(const char* op, const char* name, const View& v);

/// A packed channels-last v as (N * H * W, C).
View as_rows(const View& v);
/// A planar v as (N, C, H * W).
View as_planes(const View& v);

}  // namespace mixtape::kernels::cuda
