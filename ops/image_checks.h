// Checks that the ops on images share.
#pragma once

#include "ops/op_support.h"

namespace mixtape {

inline void check_image(const char* op, const Tensor& x) {
  MT_CHECK(x.dim() == 4, op, ": expected x (N, C, H, W), got ", x.describe());
  check_floating(op, "x", x);
}
inline void check_pair(const char* op, const char* what, const Shape& pair, std::int64_t least) {
  MT_CHECK(pair.size() == 2 && pair[0] >= least && pair[1] >= least, op, ": expected a ", what,
           " of two numbers of at least ", least, ", got ", pair);
}

}  // namespace mixtape
