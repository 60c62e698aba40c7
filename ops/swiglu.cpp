// SwiGLU. Forward and backward are one kernel each, so that nothing but the projection's output is
// saved and neither silu(gate) nor its gradient is ever in memory.
#include "kernels/swiglu.h"

#include "ops/op_support.h"

namespace mixtape {
namespace {

struct SwiGlu {
  static constexpr OpInfo info{.name = "swiglu", .cast = Cast::keep};

  Metas infer(Inputs in) const {
    const Tensor& x = in[0];
    check_floating("swiglu", "a tensor", x);
    MT_CHECK(x.dim() >= 1 && x.size(-1) % 2 == 0,
             "swiglu: expected x (.., 2H) with an even last size, got ", x.describe());
    Shape half = x.shape();
    half[half.size() - 1] /= 2;
    return {{half, x.dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = in[0].contiguous();
    const std::int64_t columns = x.size(-1);
    kernels::swiglu_forward(stream_of(x), rows_of(out[0], columns / 2), rows_of(x, columns));
    saved.value(x.same(in[0]) ? in[0] : x);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    const Tensor x = saved[0], d = dy[0].contiguous();
    const std::int64_t columns = x.size(-1);
    kernels::swiglu_backward(stream_of(x), rows_of(dx[0].out(), columns), rows_of(d, columns / 2),
                             rows_of(x, columns));
  }
};

}  // namespace

Tensor swiglu(const Tensor& gate_and_up) { return apply(SwiGlu{}, {gate_and_up}); }

}  // namespace mixtape
