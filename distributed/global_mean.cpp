#include "distributed/global_mean.h"

#include "engine/grad_mode.h"
#include "engine/op.h"
#include "kernels/elementwise.h"
#include "ops/ops.h"

namespace mixtape::distributed {
namespace {

/// in: loss sum, and (2) float64 of all ranks: loss, count. out: loss / count.
struct GlobalMean {
  int ranks;
  static constexpr OpInfo info{.name = "global_mean", .cast = Cast::keep};
  Metas infer(Inputs in) const { return {meta_of(in[0])}; }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor loss = in[1].select(0, 0), count = in[1].select(0, 1);
    kernels::binary(Stream::current(in[0].device()), kernels::BinaryOp::div, Dtype::f64,
                    out[0].view(), loss.view(), count.view());
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    const Tensor share = div(static_cast<double>(ranks), saved[0].select(0, 1));
    dx[0].set(dy[0] * share.to(dy[0].dtype()));
  }
};

}  // namespace

Tensor global_mean(const Tensor& loss_sum, double count, Communicator group) {
  MT_CHECK(is_floating(loss_sum.dtype()) && loss_sum.numel() == 1,
           "global_mean: expected a floating loss of one element, got ", loss_sum.describe());
  MT_CHECK(count >= 0, "global_mean: expected a count of at least 0, got ", count);
  Tensor totals;
  {
    const NoGrad no_grad;
    totals = full({2}, count, {.dtype = Dtype::f64, .device = loss_sum.device()});
    totals.select(0, 0).copy_(loss_sum.detach().reshape({}));
    totals.set_name("loss and count");
    group.all_reduce(totals, ReduceOp::sum);
    Tensor total_count = totals.select(0, 1);
    total_count.copy_(where(eq(total_count, 0.0), 1.0, total_count));
  }
  return apply(GlobalMean{group.size()}, {loss_sum.reshape({}), totals});
}

void agree_on_overflow(GradScaler& scaler, Communicator group) {
  scaler.set_reduce([group](Tensor& found_inf) mutable {
    const NoGrad no_grad;
    group.all_reduce(found_inf, ReduceOp::max);
  });
}

}  // namespace mixtape::distributed
