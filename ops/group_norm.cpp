// Group normalisation: forward and backward.
#include "kernels/group_norm.h"

#include "ops/channel_norm.h"

namespace mixtape {
namespace {

struct GroupNorm {
  std::int64_t groups;
  double eps;
  bool channels_last;
  static constexpr OpInfo info{.name = "group_norm", .cast = Cast::keep};

  Metas infer(Inputs in) const {
    check_channel_vector("group_norm", "weight", in[1], in[0]);
    check_channel_vector("group_norm", "bias", in[2], in[0]);
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = in_layout(in[0], channels_last), w = in[1] ? in[1].contiguous() : in[1],
                 b = in[2] ? in[2].contiguous() : in[2];
    if (channels_last) out[0] = empty_in_layout(x.shape(), x.dtype(), x.device(), true);
    const Shape tasks{x.size(0), groups};
    const Tensor mean = Tensor::empty(tasks, Dtype::f64, x.device()),
                 rstd = Tensor::empty(tasks, compute_dtype(x.dtype()), x.device());
    kernels::group_norm_forward(stream_of(x), {.y = channels_of(out[0], channels_last),
                                               .mean = mean.view(),
                                               .rstd = rstd.view(),
                                               .x = channels_of(x, channels_last),
                                               .weight = view_or_absent(w),
                                               .bias = view_or_absent(b),
                                               .groups = groups,
                                               .eps = eps});
    saved.value(x.same(in[0]) ? in[0] : x);
    saved.value(in[1]);
    saved.value(mean);
    saved.value(rstd);
  }
  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    const Tensor x = saved[0], w = saved[1] ? saved[1].contiguous() : Tensor(), mean = saved[2],
                 rstd = saved[3], dy = in_layout(dys[0], channels_last);
    GradDst::Accumulator dw{{}, 0}, db{{}, 0};
    if (dx[1]) dw = dx[1].accumulator();
    if (dx[2]) db = dx[2].accumulator();
    const auto run = [&](const View& to) {
      const View view = channels_of(x, channels_last);
      View out;
      if (to) {
        out = view;
        out.data = to.data;
      }
      const ScratchWorkspace scratch(kernels::group_norm_backward_workspace_bytes(view),
                                     x.device());
      kernels::group_norm_backward(stream_of(x),
                                   {.dx = out,
                                    .dweight = view_or_absent(dw.tensor),
                                    .dbias = view_or_absent(db.tensor),
                                    .beta_weight = dw.beta,
                                    .beta_bias = db.beta,
                                    .dy = channels_of(dy, channels_last),
                                    .x = view,
                                    .weight = view_or_absent(w),
                                    .mean = mean.view(),
                                    .rstd = rstd.view(),
                                    .groups = groups},
                                   scratch);
    };
    if (dx[0])
      write_gradient(dx[0], channels_last, dy.device(), run);
    else
      run({});
  }
};

}  // namespace

Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight, const Tensor& bias,
                  double eps) {
  check_channels("group_norm", x);
  MT_CHECK(groups >= 1 && x.size(1) % groups == 0, "group_norm: expected channels divisible by ",
           groups, " groups, got ", x.describe());
  return apply(GroupNorm{groups, eps, is_channels_last(x)}, {x, weight, bias});
}

}  // namespace mixtape
