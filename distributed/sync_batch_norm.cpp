// Two passes of batch_norm's own kernels on either side of one message. Forward: the kernel in
// training finds this rank's moments (what it writes to y is overwritten), all ranks gather them,
// and the kernel in evaluation normalises by the merged ones, whose float64 it takes in two parts.
// Backward: the kernel in evaluation gives weight rstd g and the sums of g and g xhat; with the
// sums over all ranks, dx is that plus a line in x, which is the forward kernel once more.
//
// Legend: R ranks, C channels, n values of a channel on this rank.
#include "distributed/sync_batch_norm.h"

#include "engine/grad_mode.h"
#include "engine/recompute.h"
#include "kernels/batch_norm.h"
#include "ops/channel_norm.h"

namespace mixtape::distributed {
namespace {

constexpr const char* kOp = "sync_batch_norm";
enum Input : std::uint8_t { kX, kWeight, kBias, kResidual, kRunningMean, kRunningVar, kBatches };
enum SavedValue : std::uint8_t {
  kSavedX,
  kSavedY,
  kSavedWeight,
  kSavedMean,
  kSavedVar,
  kSavedCount
};

Tensor contiguous_or_absent(const Tensor& t) { return t ? t.contiguous() : t; }

/// Values of one channel.
std::int64_t values_of(const Tensor& x) {
  std::int64_t n = x.size(0);
  for (int d = 2; d < x.dim(); ++d) n *= x.size(d);
  return n;
}

/// (1 + 2 C) float64: n, means, sums of squares about them. Writes to `scratch`, which is like x.
Tensor local_moments(const Tensor& x, const Tensor& scratch, bool channels_last) {
  const std::int64_t n = values_of(x), c = x.size(1);
  Tensor moments = zeros({1 + 2 * c}, {.dtype = Dtype::f64, .device = x.device()});
  if (n == 0 || c == 0) return moments;
  moments.select(0, 0).fill_(static_cast<double>(n));
  const Tensor mean = moments.slice(0, 1, 1 + c);
  Tensor squares = moments.slice(0, 1 + c, 1 + 2 * c);
  if (n == 1) {
    Tensor(mean).copy_(x.reshape({c}));
    return moments;
  }
  const View view = channels_of(x, channels_last);
  const Tensor statistics = Tensor::empty({3, c}, compute_dtype(x.dtype()), x.device());
  const ScratchWorkspace workspace(kernels::batch_norm_workspace_bytes(view), x.device());
  kernels::batch_norm_forward(stream_of(x),
                              {.y = channels_of(scratch, channels_last),
                               .statistics = statistics.view(),
                               .running_mean = mean.view(),
                               .running_var = squares.view(),
                               .x = view,
                               .training = true,
                               .momentum = 1},
                              workspace);
  squares.mul_(static_cast<double>(n - 1));  // from the unbiased variance
  return moments;
}

/// Moments of all ranks' values, float64 on the device.
struct Merged {
  Tensor count;           // (1)
  Tensor mean, variance;  // (C), biased
  Tensor unbiased;        // (C)
};

Tensor at_least_one(const Tensor& count) { return where(lt(count, 1.0), 1.0, count); }

Merged merge(const Tensor& gathered) {  // (R, 1 + 2 C)
  const std::int64_t c = gathered.size(1) / 2;
  const Tensor counts = gathered.slice(1, 0, 1), means = gathered.slice(1, 1, 1 + c),
               squares = gathered.slice(1, 1 + c, 1 + 2 * c);
  Merged m;
  m.count = sum(counts, {0});
  const Tensor some = at_least_one(m.count);
  m.mean = sum(counts * means, {0}) / some;
  const Tensor d = means - m.mean, total = sum(squares + counts * d * d, {0});
  m.variance = total / some;
  m.unbiased = total / at_least_one(sub(m.count, 1.0));
  return m;
}

struct SyncBatchNormOp {
  Communicator group;
  bool relu;
  double momentum, eps;  // momentum negative: the average of all batches
  bool channels_last;
  static constexpr OpInfo info{.name = kOp, .cast = Cast::keep};

  Metas infer(Inputs in) const {
    const Tensor& x = in[kX];
    check_channel_vector(kOp, "weight", in[kWeight], x);
    check_channel_vector(kOp, "bias", in[kBias], x);
    check_channel_vector(kOp, "running_mean", in[kRunningMean], x);
    check_channel_vector(kOp, "running_var", in[kRunningVar], x);
    MT_CHECK(in[kRunningMean].defined() == in[kRunningVar].defined(), kOp,
             ": expected both running_mean and running_var or neither");
    for (const Input i : {kRunningMean, kRunningVar})
      MT_CHECK(!in[i] || !in[i].requires_grad(), kOp,
               ": expected running statistics that need no gradient, got ", in[i].describe());
    const Tensor &residual = in[kResidual], &batches = in[kBatches];
    MT_CHECK(!residual || (residual.shape() == x.shape() && residual.dtype() == x.dtype()), kOp,
             ": expected a residual like x, ", x.describe(), ", got ", residual.describe());
    MT_CHECK(!batches || (batches.numel() == 1 && batches.dtype() == Dtype::i64), kOp,
             ": expected batches_tracked to be one int64, got ", batches.describe());
    MT_CHECK(momentum >= 0 || batches, kOp,
             ": expected batches_tracked where momentum is absent, got none");
    return {meta_of(x)};
  }

  void forward(Inputs in, Outputs out, Saved& saved) const {
    const NoGrad no_grad;
    const Tensor x = in_layout(in[kX], channels_last);
    if (channels_last) out[0] = empty_in_layout(x.shape(), x.dtype(), x.device(), true);
    const Tensor local = local_moments(x, out[0], channels_last);
    const Tensor gathered = Tensor::empty({group.size(), local.size(0)}, Dtype::f64, x.device());
    local.set_name("batch statistics");
    Communicator(group).all_gather(gathered, local);
    const Merged all = merge(gathered);
    if (x.device().is_cpu())
      MT_CHECK(all.count.item<double>() != 1, kOp,
               ": expected more than one value per channel over all ranks in training, got one; x "
               "on this rank is ",
               x.describe());
    normalise(x, contiguous_or_absent(in[kWeight]), contiguous_or_absent(in[kBias]),
              in[kResidual] ? in_layout(in[kResidual], channels_last) : Tensor(), all.mean,
              all.variance, out[0], relu);
    if (!recomputing()) move_running(in, all);  // the first run moved them
    saved.value(x.same(in[kX]) ? in[kX] : x);
    saved.value(relu ? out[0] : Tensor());
    saved.value(in[kWeight]);
    saved.value(all.mean);
    saved.value(all.variance);
    saved.value(all.count);
  }

  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    const NoGrad no_grad;
    const Tensor x = saved[kSavedX], y = saved[kSavedY],
                 weight = contiguous_or_absent(saved[kSavedWeight]), mean = saved[kSavedMean],
                 variance = saved[kSavedVar];
    const Tensor dy = in_layout(dys[0], channels_last);
    const auto like_x = [&] {
      return empty_in_layout(x.shape(), x.dtype(), x.device(), channels_last);
    };
    const Tensor scaled = dx[kX] ? like_x() : Tensor();  // weight rstd g
    const Tensor dresidual = dx[kResidual] && relu ? like_x() : Tensor();
    // (2, C): sums of g xhat and of g.
    const Tensor sums = zeros({2, x.size(1)}, {.dtype = Dtype::f64, .device = x.device()});
    local_gradient(x, y, weight, mean, variance, dy, scaled, dresidual, sums);
    const auto set_sum = [&](Input input, int row) {
      if (dx[input]) dx[input].set(sums.select(0, row).to(dx[input].meta().dtype).clone());
    };
    set_sum(kWeight, 0);
    set_sum(kBias, 1);
    if (dx[kResidual]) dx[kResidual].set(relu ? dresidual : dys[0]);
    sums.set_name("sums of batch gradients");
    Communicator(group).all_reduce(sums);
    if (!dx[kX]) return;
    // dx = weight rstd (g - sum g / count - xhat sum(g xhat) / count).
    Tensor factor = div(-1.0, at_least_one(saved[kSavedCount]) * sqrt(add(variance, eps)));
    if (weight) factor = factor * weight.to(Dtype::f64);
    const Tensor slope = factor * sums.select(0, 0), shift = factor * sums.select(0, 1);
    const Tensor result = like_x();
    normalise(x, slope, shift, scaled, mean, variance, result, false);
    dx[kX].set(result);
  }

 private:
  /// y = (x - mean) rstd weight + bias [+ residual] [max 0].
  void normalise(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual,
                 const Tensor& mean, const Tensor& variance, const Tensor& y, bool rectify) const {
    if (x.numel() == 0) return;
    const View view = channels_of(x, channels_last);
    const ScratchWorkspace workspace(kernels::batch_norm_workspace_bytes(view), x.device());
    kernels::batch_norm_forward(stream_of(x),
                                {.y = channels_of(y, channels_last),
                                 .running_mean = mean.view(),
                                 .running_var = variance.view(),
                                 .x = view,
                                 .residual = channels_of(residual, channels_last),
                                 .weight = view_or_absent(weight),
                                 .bias = view_or_absent(bias),
                                 .training = false,
                                 .relu = rectify,
                                 .eps = eps},
                                workspace);
  }
  void local_gradient(const Tensor& x, const Tensor& y, const Tensor& weight, const Tensor& mean,
                      const Tensor& variance, const Tensor& dy, const Tensor& scaled,
                      const Tensor& dresidual, const Tensor& sums) const {
    if (x.numel() == 0) return;
    const View view = channels_of(x, channels_last);
    const ScratchWorkspace workspace(kernels::batch_norm_workspace_bytes(view), x.device());
    kernels::batch_norm_backward(stream_of(x),
                                 {.dx = channels_of(scaled, channels_last),
                                  .dresidual = channels_of(dresidual, channels_last),
                                  .dweight = sums.select(0, 0).view(),
                                  .dbias = sums.select(0, 1).view(),
                                  .dy = channels_of(dy, channels_last),
                                  .x = view,
                                  .y = channels_of(y, channels_last),
                                  .weight = view_or_absent(weight),
                                  .running_mean = mean.view(),
                                  .running_var = variance.view(),
                                  .eps = eps},
                                 workspace);
  }

  void move_running(Inputs in, const Merged& all) const {
    const Tensor any = gt(all.count, 0.0);  // (1)
    Tensor batches = in[kBatches];
    if (batches) batches.add_(any.to(Dtype::i64).reshape(batches.shape()));
    if (!in[kRunningMean]) return;
    Tensor share = any.to(Dtype::f64);
    share = momentum >= 0 ? share * momentum
                          : share / at_least_one(batches.to(Dtype::f64).reshape({1}));
    const auto move = [&](Tensor running, const Tensor& value) {
      const Tensor old = running.to(Dtype::f64);
      running.copy_(old + share * (value - old));
    };
    move(in[kRunningMean], all.mean);
    move(in[kRunningVar], all.unbiased);
  }
};

nn::BatchNormFunction synchronised_over(const Communicator& group) {
  return
      [group](const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
              const Tensor& running_var, const BatchNormOptions& options) {
        return sync_batch_norm(x, weight, bias, running_mean, running_var, options, group);
      };
}

void synchronise(nn::BatchNorm& layer, const Communicator& group) {
  layer.set_function(synchronised_over(group), detail::concat("over ", group.size(), " ranks"));
}

}  // namespace

Tensor sync_batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const Tensor& running_mean, const Tensor& running_var,
                       const BatchNormOptions& options, const Communicator& group) {
  if (!options.training || group.size() == 1)
    return batch_norm(x, weight, bias, running_mean, running_var, options);
  check_channels(kOp, x);
  MT_CHECK(!options.momentum || (*options.momentum >= 0 && *options.momentum <= 1), kOp,
           ": expected a momentum in [0, 1], got ", options.momentum.value_or(0));
  const SyncBatchNormOp op{group, options.relu, options.momentum.value_or(-1), options.eps,
                           is_channels_last(x)};
  return apply(
      op, {x, weight, bias, options.residual, running_mean, running_var, options.batches_tracked});
}

SyncBatchNorm::SyncBatchNorm(std::int64_t channels, const Communicator& group,
                             nn::BatchNormConfig config)
    : BatchNorm(channels, config) {
  synchronise(*this, group);
}

int convert_sync_batch_norm(nn::ModuleBase& module, const Communicator& group) {
  int converted = 0;
  module.apply([&](const std::string&, nn::ModuleBase& part) {
    auto* const layer = dynamic_cast<nn::BatchNorm*>(&part);
    if (layer == nullptr) return;
    synchronise(*layer, group);
    ++converted;
  });
  return converted;
}

}  // namespace mixtape::distributed
