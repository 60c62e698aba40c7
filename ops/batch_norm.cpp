// Batch normalisation, with a residual addition and ReLU fused behind it: forward and backward.
//
// Legend: N samples, C channels, S values of one channel of a sample.
#include "kernels/batch_norm.h"

#include "engine/recompute.h"
#include "ops/channel_norm.h"

namespace mixtape {
namespace {

enum Input : std::uint8_t { kX, kWeight, kBias, kResidual, kRunningMean, kRunningVar, kBatches };

Tensor contiguous_or_absent(const Tensor& t) { return t ? t.contiguous() : t; }

struct BatchNorm {
  bool training, relu;
  double momentum, eps;  // momentum negative: the average of all batches
  bool channels_last;
  static constexpr OpInfo info{.name = "batch_norm", .cast = Cast::keep};

  Metas infer(Inputs in) const {
    const Tensor& x = in[kX];
    check_channel_vector("batch_norm", "weight", in[kWeight], x);
    check_channel_vector("batch_norm", "bias", in[kBias], x);
    check_running(in);
    MT_CHECK(!in[kResidual] ||
                 (in[kResidual].shape() == x.shape() && in[kResidual].dtype() == x.dtype()),
             "batch_norm: expected a residual like x, ", x.describe(), ", got ",
             in[kResidual].describe());
    const std::int64_t values = x.size(1) == 0 ? 0 : x.numel() / x.size(1);
    MT_CHECK(!training || values != 1,
             "batch_norm: expected more than one value per channel in training, got ",
             x.describe());
    return {meta_of(x)};
  }

  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = in_layout(in[kX], channels_last),
                 residual = in[kResidual] ? in_layout(in[kResidual], channels_last) : Tensor(),
                 weight = contiguous_or_absent(in[kWeight]), bias = contiguous_or_absent(in[kBias]);
    if (channels_last) out[0] = empty_in_layout(x.shape(), x.dtype(), x.device(), true);
    Tensor statistics;
    if (training) statistics = Tensor::empty({3, x.size(1)}, compute_dtype(x.dtype()), x.device());
    const Tensor mean = contiguous_or_absent(in[kRunningMean]),
                 var = contiguous_or_absent(in[kRunningVar]);
    const bool moves = !training || !recomputing();  // the first run moved them
    const View view = channels_of(x, channels_last);
    const ScratchWorkspace scratch(kernels::batch_norm_workspace_bytes(view), x.device());
    kernels::batch_norm_forward(
        stream_of(x),
        {.y = channels_of(out[0], channels_last),
         .statistics = view_or_absent(statistics),
         .running_mean = moves ? view_or_absent(mean) : View{},
         .running_var = moves ? view_or_absent(var) : View{},
         .batches = training && moves ? view_or_absent(in[kBatches]) : View{},
         .x = view,
         .residual = channels_of(residual, channels_last),
         .weight = view_or_absent(weight),
         .bias = view_or_absent(bias),
         .training = training,
         .relu = relu,
         .momentum = moves ? momentum : 0,
         .eps = eps},
        scratch);
    if (training && moves) {
      for (const Input i : {kRunningMean, kRunningVar, kBatches})
        if (in[i]) in[i].impl()->storage->bump_version();
    }
    saved.value(x.same(in[kX]) ? in[kX] : x);
    saved.value(relu ? out[0] : Tensor());
    saved.value(in[kWeight]);
    saved.value(statistics);
    saved.value(training ? Tensor() : in[kRunningMean]);
    saved.value(training ? Tensor() : in[kRunningVar]);
  }

  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    const Tensor x = saved[0], y = saved[1], weight = contiguous_or_absent(saved[2]),
                 statistics = saved[3], mean = contiguous_or_absent(saved[4]),
                 var = contiguous_or_absent(saved[5]);
    const Tensor dy = in_layout(dys[0], channels_last);
    if (dx[kResidual] && !relu) dx[kResidual].set(dys[0]);
    Tensor dresidual;
    if (dx[kResidual] && relu)
      dresidual = empty_in_layout(x.shape(), x.dtype(), x.device(), channels_last);
    if (dx[kX])
      write_gradient(dx[kX], channels_last, dy.device(), [&](const View& to) {
        run(x, y, weight, statistics, mean, var, dy, &to, dresidual, dx);
      });
    else if (dresidual || dx[kWeight] || dx[kBias])
      run(x, y, weight, statistics, mean, var, dy, nullptr, dresidual, dx);
    if (dresidual) dx[kResidual].set(dresidual);
  }

 private:
  void check_running(Inputs in) const {
    const Tensor &mean = in[kRunningMean], &var = in[kRunningVar], &batches = in[kBatches];
    check_channel_vector("batch_norm", "running_mean", mean, in[kX]);
    check_channel_vector("batch_norm", "running_var", var, in[kX]);
    MT_CHECK(mean.defined() == var.defined(),
             "batch_norm: expected both running_mean and running_var or neither");
    MT_CHECK(training || mean,
             "batch_norm: expected running_mean and running_var outside of training, got none");
    for (const Tensor& t : {mean, var})
      MT_CHECK(
          !t || ((!training || t.is_contiguous()) && !t.requires_grad()),
          "batch_norm: expected running statistics that need no gradient (and, in training, are "
          "contiguous), got ",
          t.describe());
    MT_CHECK(!batches || (batches.numel() == 1 && batches.dtype() == Dtype::i64),
             "batch_norm: expected batches_tracked to be one int64, got ", batches.describe());
    MT_CHECK(!training || momentum >= 0 || batches,
             "batch_norm: expected batches_tracked where momentum is absent, got none");
  }

  void run(const Tensor& x, const Tensor& y, const Tensor& weight, const Tensor& statistics,
           const Tensor& mean, const Tensor& var, const Tensor& dy, const View* to,
           const Tensor& dresidual, Grads dx) const {
    GradDst::Accumulator dw{{}, 0}, db{{}, 0};
    if (dx[kWeight]) dw = dx[kWeight].accumulator();
    if (dx[kBias]) db = dx[kBias].accumulator();
    const View view = channels_of(x, channels_last);
    const ScratchWorkspace scratch(kernels::batch_norm_workspace_bytes(view), x.device());
    kernels::batch_norm_backward(stream_of(x),
                                 {.dx = to != nullptr ? like(view, *to) : View{},
                                  .dresidual = channels_of(dresidual, channels_last),
                                  .dweight = view_or_absent(dw.tensor),
                                  .dbias = view_or_absent(db.tensor),
                                  .beta_weight = dw.beta,
                                  .beta_bias = db.beta,
                                  .dy = channels_of(dy, channels_last),
                                  .x = view,
                                  .y = channels_of(y, channels_last),
                                  .weight = view_or_absent(weight),
                                  .statistics = view_or_absent(statistics),
                                  .running_mean = view_or_absent(mean),
                                  .running_var = view_or_absent(var),
                                  .eps = eps},
                                 scratch);
  }
  /// `memory` seen as the (N, C, S) of `view`.
  static View like(const View& view, const View& memory) {
    View v = view;
    v.data = memory.data;
    return v;
  }
};

}  // namespace

Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Tensor& running_mean, const Tensor& running_var,
                  const BatchNormOptions& options) {
  check_channels("batch_norm", x);
  MT_CHECK(!options.momentum || (*options.momentum >= 0 && *options.momentum <= 1),
           "batch_norm: expected a momentum in [0, 1], got ", options.momentum.value_or(0));
  const BatchNorm op{options.training, options.relu, options.momentum.value_or(-1), options.eps,
                     is_channels_last(x)};
  return apply(op, {x, weight, bias, options.residual, running_mean, running_var,
                    options.training ? options.batches_tracked : Tensor()});
}

}  // namespace mixtape
