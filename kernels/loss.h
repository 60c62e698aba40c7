// Cross-entropy of logits against class indices, fused: log-sum-exp, pick, label smoothing,
// reduction.
//
// logits (N, V) row-major of any floating dtype; target (N) i64. With smoothing s the target
// distribution is (1 - s) onehot + s / V (Szegedy et al. 2016). Rows whose target is ignore_index
// have loss exactly 0 and gradient 0. A target that is neither ignore_index nor in [0, V) throws on
// the CPU and is reported to the device's error slot on CUDA (its row is treated as ignored).
#pragma once

#include "kernels/kernel.h"

namespace mixtape::kernels {

struct CrossEntropyForward {
  View row_loss = {};  // out (N), f32 (f64 for f64)
  View lse = {};       // out (N), f32 (f64 for f64): log-sum-exp of each row
  View count = {};     // out, optional, 1 element f32: rows that are not ignored
  View loss = {};  // out, optional, 1 element of any floating dtype: sum of row_loss, over count if
                   // `mean`
  View logits = {}, target = {};
  std::int64_t ignore_index = -100;
  float label_smoothing = 0;
  bool mean = false;  // mean over no rows is NaN, as PyTorch's
};

struct CrossEntropyBackward {
  View dlogits = {};  // out (N, V); may be logits' memory
  View dy = {};       // (N) or 1 element: gradient of the row losses or of the reduced loss
  View count = {};    // absent: sum or per-row; else dy is divided by it
  View lse = {}, logits = {}, target = {};
  std::int64_t ignore_index = -100;
  float label_smoothing = 0;
};

#define MT_DECLARE_LOSS                                                       \
  void cross_entropy_forward(const Stream&, const CrossEntropyForward& args); \
  void cross_entropy_backward(const Stream&, const CrossEntropyBackward& args);

namespace cpu {
MT_DECLARE_LOSS
}
namespace cuda {
MT_DECLARE_LOSS
}
#undef MT_DECLARE_LOSS

inline constexpr Kernel cross_entropy_forward{"cross_entropy_forward", cpu::cross_entropy_forward,
                                              MT_CUDA(cuda::cross_entropy_forward)};
inline constexpr Kernel cross_entropy_backward{
    "cross_entropy_backward", cpu::cross_entropy_backward, MT_CUDA(cuda::cross_entropy_backward)};

}  // namespace mixtape::kernels
