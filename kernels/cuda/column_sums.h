// The second pass of sums over chunks: adds (chunks, columns) partial sums in a fixed order.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels::cuda {

/// out[c] = sum over chunks of partials[chunk, c] + beta * out[c]. partials is packed, of double if
/// `is_double`, else of float; out (columns) of any floating dtype and stride.
void column_sums(const Stream& stream, View out, float beta, const void* partials, bool is_double,
                 std::int64_t chunks);

}  // namespace mixtape::kernels::cuda
