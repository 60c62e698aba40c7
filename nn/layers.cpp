#include "nn/layers.h"

#include <cmath>

#include "nn/init.h"

namespace mixtape::nn {
namespace {

/// PyTorch's default for linear and convolution layers: uniform within 1 / sqrt(fan in).
void init_weight_and_bias(Tensor& weight, Tensor& bias) {
  const double bound = 1 / std::sqrt(static_cast<double>(init::fans_of(weight).in));
  init::uniform(weight, -bound, bound);
  if (bias) init::uniform(bias, -bound, bound);
}

std::string text(const char* name, const std::string& arguments) {
  return std::string(name) + "(" + arguments + ")";
}

}  // namespace

Linear::Linear(std::int64_t in, std::int64_t out, LinearConfig config) : config_(config) {
  MT_CHECK(in > 0 && out > 0, "Linear: expected at least one input and output feature, got ", in,
           " and ", out);
  weight = empty({out, in});
  if (config.bias) bias = empty({out});
  init_weight_and_bias(weight, bias);
  add_parameter("weight", weight);
  if (bias) add_parameter("bias", bias);
}
std::string Linear::describe() const {
  return text("Linear",
              detail::concat(weight.size(1), ", ", weight.size(0), bias ? "" : ", no bias"));
}

Conv2d::Conv2d(std::int64_t in, std::int64_t out, Conv2dConfig config) : config_(config) {
  MT_CHECK(
      in > 0 && out > 0 && config.groups > 0 && in % config.groups == 0 && out % config.groups == 0,
      "Conv2d: expected channel counts divisible by ", config.groups, " groups, got ", in, " and ",
      out);
  MT_CHECK(config.kernel.size() == 2, "Conv2d: expected a kernel of two sizes, got ",
           config.kernel);
  weight = empty({out, in / config.groups, config.kernel[0], config.kernel[1]});
  if (config.bias) bias = empty({out});
  init_weight_and_bias(weight, bias);
  add_parameter("weight", weight);
  if (bias) add_parameter("bias", bias);
}
Tensor Conv2d::forward(const Tensor& x) {
  return conv2d(x, weight, bias,
                {.stride = config_.stride,
                 .padding = config_.padding,
                 .dilation = config_.dilation,
                 .groups = config_.groups,
                 .act = config_.act});
}
std::string Conv2d::describe() const {
  return text("Conv2d", detail::concat(weight.size(1) * config_.groups, ", ", weight.size(0),
                                       ", kernel ", config_.kernel));
}

std::string MaxPool2d::describe() const {
  return text("MaxPool2d", detail::concat(options_.kernel));
}
std::string AvgPool2d::describe() const {
  return text("AvgPool2d", detail::concat(options_.kernel));
}

std::string AdaptiveAvgPool2d::describe() const {
  return text("AdaptiveAvgPool2d", detail::concat(size_));
}

BatchNorm::BatchNorm(std::int64_t channels, BatchNormConfig config)
    : channels_(channels), config_(config) {
  MT_CHECK(channels > 0, "BatchNorm: expected at least one channel, got ", channels);
  if (config.affine) {
    weight = ones({channels});
    bias = zeros({channels});
    add_parameter("weight", weight);
    add_parameter("bias", bias);
  }
  if (!config.track_running_stats) return;
  running_mean = zeros({channels});
  running_var = ones({channels});
  num_batches_tracked = zeros({}, {.dtype = Dtype::i64});
  add_buffer("running_mean", running_mean);
  add_buffer("running_var", running_var);
  add_buffer("num_batches_tracked", num_batches_tracked);
}
void BatchNorm::set_function(BatchNormFunction function, std::string note) {
  function_ = std::move(function);
  note_ = std::move(note);
}
Tensor BatchNorm::forward(const Tensor& x, const Tensor& residual) {
  const BatchNormOptions options{.training = training() || !running_mean,
                                 .momentum = running_mean ? config_.momentum : 0.0,
                                 .eps = config_.eps,
                                 .relu = config_.relu,
                                 .residual = residual,
                                 .batches_tracked = num_batches_tracked};
  return function_ && training() ? function_(x, weight, bias, running_mean, running_var, options)
                                 : batch_norm(x, weight, bias, running_mean, running_var, options);
}
std::string BatchNorm::describe() const {
  return text("BatchNorm", detail::concat(channels_, config_.relu ? ", relu" : "",
                                          note_.empty() ? "" : ", ", note_));
}

GroupNorm::GroupNorm(std::int64_t groups, std::int64_t channels, GroupNormConfig config)
    : groups_(groups), channels_(channels), config_(config) {
  MT_CHECK(groups > 0 && channels > 0 && channels % groups == 0,
           "GroupNorm: expected channels divisible by groups, got ", channels, " and ", groups);
  if (!config.affine) return;
  weight = ones({channels});
  bias = zeros({channels});
  add_parameter("weight", weight);
  add_parameter("bias", bias);
}
std::string GroupNorm::describe() const {
  return text("GroupNorm", detail::concat(groups_, ", ", channels_));
}

LayerNorm::LayerNorm(const Shape& normalized, LayerNormConfig config)
    : normalized_(normalized), config_(config) {
  weight = ones(normalized);
  add_parameter("weight", weight);
  if (!config.bias) return;
  bias = zeros(normalized);
  add_parameter("bias", bias);
}
std::string LayerNorm::describe() const { return text("LayerNorm", detail::concat(normalized_)); }

RmsNorm::RmsNorm(const Shape& normalized, RmsNormConfig config)
    : normalized_(normalized), config_(config) {
  weight = ones(normalized);
  add_parameter("weight", weight);
}
std::string RmsNorm::describe() const { return text("RmsNorm", detail::concat(normalized_)); }

SwiGlu::SwiGlu(std::int64_t features, std::int64_t hidden, SwiGluConfig config)
    : gate_up(features, 2 * hidden, {.bias = config.bias}),
      down(hidden, features, {.bias = config.bias}) {
  add("gate_up", gate_up);
  add("down", down);
}
std::string SwiGlu::describe() const {
  return text("SwiGlu", detail::concat(down.weight.size(0), ", ", down.weight.size(1)));
}

Embedding::Embedding(std::int64_t count, std::int64_t features, std::int64_t padding_index)
    : padding_index_(padding_index) {
  MT_CHECK(padding_index < count, "Embedding: expected a padding index below ", count, ", got ",
           padding_index);
  weight = empty({count, features});
  init::normal(weight);
  if (padding_index >= 0) weight.select(0, padding_index).zero_();
  add_parameter("weight", weight);
}
std::string Embedding::describe() const {
  return text("Embedding", detail::concat(weight.size(0), ", ", weight.size(1)));
}

Dropout::Dropout(double p) : p_(p) {
  MT_CHECK(p >= 0 && p <= 1, "Dropout: expected a probability in [0, 1], got ", p);
}
std::string Dropout::describe() const { return text("Dropout", detail::concat(p_)); }

Tensor Sequential::forward(const Tensor& x) {
  Tensor y = x;
  for (const Step& step : steps_) y = step.run(y);
  return y;
}

}  // namespace mixtape::nn
