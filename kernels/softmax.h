// Softmax and log-softmax over the last dimension of row-major (N, C) views, any floating dtypes.
// The row maximum is subtracted; arithmetic is float (double for f64). A row that is all -inf gives
// softmax 0 and log-softmax -inf, with gradient 0, so that masked rows stay out of other gradients.
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

#define MT_DECLARE_SOFTMAX                                                    \
  void softmax_forward(const Stream&, bool log, View y, View x);              \
  /* softmax: dx = y * (dy - sum(dy * y)); log: dx = dy - exp(y) * sum(dy) */ \
  void softmax_backward(const Stream&, bool log, View dx, View dy, View y);

namespace cpu {
MT_DECLARE_SOFTMAX
}
namespace cuda {
MT_DECLARE_SOFTMAX
}
#undef MT_DECLARE_SOFTMAX

inline constexpr Kernel softmax_forward{"softmax_forward", cpu::softmax_forward,
                                        MT_CUDA(cuda::softmax_forward)};
inline constexpr Kernel softmax_backward{"softmax_backward", cpu::softmax_backward,
                                         MT_CUDA(cuda::softmax_backward)};

}  // namespace mixtape::kernels
