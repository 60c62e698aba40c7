// Random ops. A draw's (seed, offset) is part of the op, so that backward remakes the mask exactly.
#include "kernels/random.h"

#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

struct Dropout {
  double p;
  PhiloxState state;
  static constexpr OpInfo info{.name = "dropout", .higher_order = true};

  Metas infer(Inputs in) const {
    check_floating("dropout", "a tensor", in[0]);
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved&) const { run(out[0], in[0]); }
  void backward(const Saved&, Inputs dy, Grads dx) const {  // linear in x: the same mask on dy
    if (grad_enabled())
      dx[0].set(apply(*this, {dy[0]}));
    else
      run(dx[0].out(), dy[0]);
  }
  void run(const Tensor& out, const Tensor& x) const {
    const Tensor rows = x.contiguous();
    kernels::dropout(stream_of(x), out.view(), rows.view(), p, state);
  }
};

}  // namespace

Tensor dropout(const Tensor& x, double p, bool training) {
  MT_CHECK(p >= 0 && p <= 1, "dropout: expected a probability in [0, 1], got ", p);
  if (!training || p == 0) return x;
  return apply(Dropout{p, draw_random(x.device(), x.numel())}, {x});
}

}  // namespace mixtape
