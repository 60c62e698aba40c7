// mixtape::math for Tensor: lets the functors' derivatives be instantiated with Tensor, so that
// they record themselves (create_graph). These names must be declared before the functors are.
#pragma once

#include "ops/ops.h"

namespace mixtape::math {

inline Tensor constant(const Tensor& like, double value) {
  return scalar_tensor(value, {.dtype = like.dtype(), .device = like.device()});
}
inline Tensor select(const Tensor& mask, const Tensor& a, const Tensor& b) {
  return where(mask, a, b);
}
using mixtape::abs;
using mixtape::eq;
using mixtape::erf;
using mixtape::exp;
using mixtape::ge;
using mixtape::gt;
using mixtape::le;
using mixtape::log;
using mixtape::lt;
using mixtape::maximum;
using mixtape::minimum;
using mixtape::ne;
using mixtape::pow;
using mixtape::sqrt;
using mixtape::tanh;

}  // namespace mixtape::math

#include "kernels/elementwise_functors.h"
