// Softmax and losses.
//
// Legend: N rows, C classes.
#include "kernels/loss.h"

#include "engine/grad_mode.h"
#include "kernels/softmax.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

/// Contiguous rows along the last dimension; a 0-d tensor is one row of one.
View rows_of(const Tensor& t) { return mixtape::rows_of(t, t.dim() == 0 ? 1 : t.size(-1)); }

template <bool kLog>
struct Softmax {  // over the last dimension
  static constexpr OpInfo info{
      .name = kLog ? "log_softmax" : "softmax", .cast = Cast::keep, .higher_order = true};

  Metas infer(Inputs in) const {
    check_floating(info.name, "a tensor", in[0]);
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = in[0].contiguous();
    kernels::softmax_forward(stream_of(x), kLog, rows_of(out[0]), rows_of(x));
    saved.value(out[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor y = saved[0];
    if (grad_enabled()) {
      const Shape last = y.dim() ? Shape{-1} : Shape{};
      dx[0].set(kLog ? sub(dy[0], mul(exp(y), sum(dy[0], last, true)))
                     : mul(y, sub(dy[0], sum(mul(dy[0], y), last, true))));
      return;
    }
    const Tensor g = dy[0].contiguous();
    kernels::softmax_backward(stream_of(y), kLog, rows_of(dx[0].out()), rows_of(g), rows_of(y));
  }
};

template <bool kLog>
Tensor softmax_along(const Tensor& x, int dim) {
  const int d = normalize_dim(kLog ? "log_softmax" : "softmax", dim, x.dim());
  if (x.dim() == 0 || d == x.dim() - 1) return apply(Softmax<kLog>{}, {x});
  return transpose(apply(Softmax<kLog>{}, {transpose(x, d, -1)}), d, -1);
}

struct CrossEntropy {  // logits (N, C), target (N)
  CrossEntropyOptions options;
  static constexpr OpInfo info{.name = "cross_entropy", .cast = Cast::full};

  Metas infer(Inputs in) const {
    check_floating("cross_entropy", "logits", in[0]);
    return {{options.reduction == Reduction::none ? Shape{in[0].size(0)} : Shape{}, in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor logits = in[0].contiguous(), target = in[1].contiguous();
    const Dtype wide = compute_dtype(logits.dtype());
    const Shape rows = {logits.size(0)};
    const bool per_row = options.reduction == Reduction::none,
               mean = options.reduction == Reduction::mean;
    const bool direct = per_row && out[0].dtype() == wide;
    const Tensor row_loss = direct ? out[0] : Tensor::empty(rows, wide, logits.device());
    const Tensor lse = Tensor::empty(rows, wide, logits.device());
    const Tensor count = mean ? Tensor::empty({1}, Dtype::f32, logits.device()) : Tensor();
    kernels::cross_entropy_forward(stream_of(logits), {.row_loss = row_loss.view(),
                                                       .lse = lse.view(),
                                                       .count = view_or_absent(count),
                                                       .loss = per_row ? View{} : out[0].view(),
                                                       .logits = logits.view(),
                                                       .target = target.view(),
                                                       .ignore_index = options.ignore_index,
                                                       .label_smoothing = options.label_smoothing,
                                                       .mean = mean});
    if (per_row && !direct) out[0] = cast(row_loss, out[0].dtype());
    saved.value(logits.same(in[0]) ? in[0] : logits);
    saved.value(target.same(in[1]) ? in[1] : target);
    saved.value(lse);
    saved.value(count);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    const bool in_place =
        saved.disposable(0);  // a second (N, C) is most of a language model's peak
    const Tensor logits = saved[0], target = saved[1], lse = saved[2], count = saved[3],
                 g = dy[0].contiguous();
    const Tensor dlogits = in_place ? logits : dx[0].out();
    kernels::cross_entropy_backward(stream_of(logits),
                                    {.dlogits = dlogits.view(),
                                     .dy = g.view(),
                                     .count = view_or_absent(count),
                                     .lse = lse.view(),
                                     .logits = logits.view(),
                                     .target = target.view(),
                                     .ignore_index = options.ignore_index,
                                     .label_smoothing = options.label_smoothing});
    if (in_place) dx[0].set(dlogits);
  }
};

}  // namespace

Tensor softmax(const Tensor& x, int dim) { return softmax_along<false>(x, dim); }
Tensor log_softmax(const Tensor& x, int dim) { return softmax_along<true>(x, dim); }

Tensor cross_entropy(const Tensor& logits, const Tensor& target, CrossEntropyOptions options) {
  MT_CHECK(logits.dim() >= 2, "cross_entropy: expected logits (N, C, ..), got ", logits.describe());
  MT_CHECK(target.dtype() == Dtype::i64 || target.dtype() == Dtype::i32,
           "cross_entropy: expected an int64 target of class indices, got ", target.describe());
  MT_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1,
           "cross_entropy: expected label_smoothing in [0, 1], got ", options.label_smoothing);
  Shape expected = logits.shape();
  expected.erase(1);
  MT_CHECK(target.shape() == expected, "cross_entropy: expected a target of shape ", expected,
           " for logits ", logits.describe(), ", got ", target.describe());
  const Tensor classes = cast(target, Dtype::i64).reshape({target.numel()});
  Tensor rows = logits;
  for (int d = 1; d + 1 < rows.dim(); ++d) rows = transpose(rows, d, d + 1);  // (N, d1, .., C)
  const Tensor flat = rows.dim() == 2 ? rows : rows.reshape({target.numel(), logits.size(1)});
  const Tensor loss = apply(CrossEntropy{options}, {flat, classes});
  return options.reduction == Reduction::none ? loss.reshape(target.shape()) : loss;
}

Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  MT_CHECK_EQ(target.shape(), x.shape(), "mse_loss: shape of the target");
  check_floating("mse_loss", "x", x);
  const bool wide =
      thread_state.autocast && is_low_precision(promote_types(x.dtype(), target.dtype()));
  const Tensor difference = wide ? sub(cast(x, Dtype::f32), target) : sub(x, target);
  const Tensor squares = mul(difference, difference);
  return reduction == Reduction::none  ? squares
         : reduction == Reduction::sum ? sum(squares)
                                       : mean(squares);
}

}  // namespace mixtape
