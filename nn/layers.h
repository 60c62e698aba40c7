// The standard layers. Parameters are float32 on the CPU until moved; defaults are PyTorch's.
// Legend: N samples, C channels or features, H W image, V vocabulary.
#pragma once

#include <memory>

#include "engine/function.h"
#include "nn/module.h"
#include "ops/ops.h"

namespace mixtape::nn {

/// y = act(x w^T + bias): (.., in) -> (.., out).
struct LinearConfig {
  bool bias = true;
  Act act = Act::none;
};
class Linear : public Module<Linear> {
 public:
  Linear(std::int64_t in, std::int64_t out, LinearConfig config = {});
  Tensor forward(const Tensor& x) { return linear(x, weight, bias, {.act = config_.act}); }
  std::string describe() const override;
  Tensor weight;  // (out, in)
  Tensor bias;    // (out), undefined without

 private:
  LinearConfig config_;
};

/// (N, C, H, W) -> (N, O, P, Q).
struct Conv2dConfig {
  Shape kernel = {3, 3}, stride = {1, 1}, padding = {0, 0}, dilation = {1, 1};
  std::int64_t groups = 1;
  bool bias = true;
  Act act = Act::none;  // none or relu
};
class Conv2d : public Module<Conv2d> {
 public:
  Conv2d(std::int64_t in, std::int64_t out, Conv2dConfig config = {});
  Tensor forward(const Tensor& x);
  std::string describe() const override;
  Tensor weight;  // (O, C / groups, R, S)
  Tensor bias;    // (O), undefined without

 private:
  Conv2dConfig config_;
};

class MaxPool2d : public Module<MaxPool2d> {
 public:
  explicit MaxPool2d(Pool2dOptions options = {}) : options_(options) {}
  Tensor forward(const Tensor& x) { return max_pool2d(x, options_); }
  std::string describe() const override;

 private:
  Pool2dOptions options_;
};
class AvgPool2d : public Module<AvgPool2d> {
 public:
  explicit AvgPool2d(Pool2dOptions options = {}) : options_(options) {}
  Tensor forward(const Tensor& x) { return avg_pool2d(x, options_); }
  std::string describe() const override;

 private:
  Pool2dOptions options_;
};

/// (N, C, H, W) -> (N, C, P, Q) for size {P, Q}.
class AdaptiveAvgPool2d : public Module<AdaptiveAvgPool2d> {
 public:
  explicit AdaptiveAvgPool2d(const Shape& size = {1, 1}) : size_(size) {}
  Tensor forward(const Tensor& x) { return adaptive_avg_pool2d(x, size_); }
  std::string describe() const override;

 private:
  Shape size_;
};

/// Per channel of (N, C, ..) -> the same: by the batch's statistics in training, else by the
/// running ones, which are buffers under PyTorch's names. With relu, forward(x) is rectified, as is
/// forward(x, residual) = normalised x + residual, each in one pass over memory.
struct BatchNormConfig {
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  // std::nullopt: the average of all batches
  bool affine = true;                    // with weight and bias
  bool track_running_stats = true;       // without, the batch's statistics serve in eval() too
  bool relu = false;
};
/// batch_norm(), or what takes its place.
using BatchNormFunction = Function<Tensor(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                          const Tensor& running_mean, const Tensor& running_var,
                                          const BatchNormOptions& options)>;
class BatchNorm : public Module<BatchNorm> {
 public:
  explicit BatchNorm(std::int64_t channels, BatchNormConfig config = {});
  Tensor forward(const Tensor& x) { return forward(x, Tensor()); }
  Tensor forward(const Tensor& x, const Tensor& residual);
  std::string describe() const override;
  /// Computes the layer by `function` in training (distributed/sync_batch_norm.h has one); `note`
  /// shows in describe().
  void set_function(BatchNormFunction function, std::string note);
  Tensor weight, bias;                                    // (C), undefined without affine
  Tensor running_mean, running_var, num_batches_tracked;  // (C), (C), (); undefined if not tracked

 private:
  std::int64_t channels_;
  BatchNormConfig config_;
  BatchNormFunction function_;  // undefined: batch_norm()
  std::string note_;
};
/// One class serves (N, C), (N, C, L) and (N, C, H, W); the names say which is meant.
using BatchNorm1d = BatchNorm;
using BatchNorm2d = BatchNorm;

/// Per sample and group of channels of (N, C, ..) -> the same.
struct GroupNormConfig {
  double eps = 1e-5;
  bool affine = true;
};
class GroupNorm : public Module<GroupNorm> {
 public:
  GroupNorm(std::int64_t groups, std::int64_t channels, GroupNormConfig config = {});
  Tensor forward(const Tensor& x) { return group_norm(x, groups_, weight, bias, config_.eps); }
  std::string describe() const override;
  Tensor weight, bias;  // (C), undefined without affine

 private:
  std::int64_t groups_, channels_;
  GroupNormConfig config_;
};

/// Over the last dimensions `normalized`: (.., normalized) -> the same.
struct LayerNormConfig {
  double eps = 1e-5;
  bool bias = true;
};
class LayerNorm : public Module<LayerNorm> {
 public:
  explicit LayerNorm(const Shape& normalized, LayerNormConfig config = {});
  Tensor forward(const Tensor& x) { return layer_norm(x, normalized_, weight, bias, config_.eps); }
  std::string describe() const override;
  double eps() const { return config_.eps; }
  Tensor weight, bias;

 private:
  Shape normalized_;
  LayerNormConfig config_;
};

/// Over the last dimensions `normalized`: (.., normalized) -> the same.
struct RmsNormConfig {
  double eps = 1e-5;
};
class RmsNorm : public Module<RmsNorm> {
 public:
  explicit RmsNorm(const Shape& normalized, RmsNormConfig config = {});
  Tensor forward(const Tensor& x) { return rms_norm(x, normalized_, weight, config_.eps); }
  std::string describe() const override;
  Tensor weight;

 private:
  Shape normalized_;
  RmsNormConfig config_;
};

/// The gated feed-forward block of Llama: down(silu(gate(x)) * up(x)), with gate and up in one
/// product: (.., features) -> the same.
struct SwiGluConfig {
  bool bias = false;
};
class SwiGlu : public Module<SwiGlu> {
 public:
  SwiGlu(std::int64_t features, std::int64_t hidden, SwiGluConfig config = {});
  Tensor forward(const Tensor& x) { return down(swiglu(gate_up(x))); }
  std::string describe() const override;
  Linear gate_up;  // weight (2 hidden, features): gate's rows first
  Linear down;
};

/// Class indices (..) -> (.., C).
class Embedding : public Module<Embedding> {
 public:
  Embedding(std::int64_t count, std::int64_t features, std::int64_t padding_index = -1);
  Tensor forward(const Tensor& index) { return embedding(weight, index, padding_index_); }
  std::string describe() const override;
  Tensor weight;  // (V, C)

 private:
  std::int64_t padding_index_;
};

class Dropout : public Module<Dropout> {
 public:
  explicit Dropout(double p = 0.5);
  Tensor forward(const Tensor& x) { return dropout(x, p_, training()); }
  std::string describe() const override;

 private:
  double p_;
};

/// (N, d1, d2, ..) -> (N, d1 * d2 * ..).
class Flatten : public Module<Flatten> {
 public:
  Tensor forward(const Tensor& x) { return x.flatten(1); }
};

/// Activations as modules, for Sequential.
#define MT_ACTIVATION_MODULE(Name, function)                \
  class Name : public Module<Name> {                        \
   public:                                                  \
    Tensor forward(const Tensor& x) { return function(x); } \
  };
MT_ACTIVATION_MODULE(Relu, relu)
MT_ACTIVATION_MODULE(Gelu, gelu)
MT_ACTIVATION_MODULE(GeluTanh, gelu_tanh)
MT_ACTIVATION_MODULE(Silu, silu)
MT_ACTIVATION_MODULE(Sigmoid, sigmoid)
MT_ACTIVATION_MODULE(Tanh, tanh)
#undef MT_ACTIVATION_MODULE

/// A list of modules of one type, registered as "0", "1", ...
template <class T>
class ModuleList : public Module<ModuleList<T>> {
 public:
  ModuleList() = default;
  /// Constructs a module in place at the end.
  template <class... Args>
  T& emplace_back(Args&&... args) {
    items_.push_back(std::make_unique<T>(std::forward<Args>(args)...));
    this->add(std::to_string(items_.size() - 1), *items_.back());
    return *items_.back();
  }
  std::size_t size() const { return items_.size(); }
  T& operator[](std::size_t i) { return *items_.at(i); }
  class Iterator {
   public:
    explicit Iterator(std::unique_ptr<T>* at) : at_(at) {}
    T& operator*() const { return **at_; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    friend bool operator==(const Iterator&, const Iterator&) = default;

   private:
    std::unique_ptr<T>* at_;
  };
  Iterator begin() { return Iterator(items_.data()); }
  Iterator end() { return Iterator(items_.data() + items_.size()); }

 private:
  std::vector<std::unique_ptr<T>> items_;
};

/// Modules of any tensor-to-tensor type, run one after the other.
///   Sequential net;  net.push<Linear>(784, 512);  net.push<Relu>();  net.push<Linear>(512, 10);
class Sequential : public Module<Sequential> {
 public:
  Sequential() = default;
  template <class T, class... Args>
  T& push(Args&&... args) {
    auto module = std::make_unique<T>(std::forward<Args>(args)...);
    T& made = *module;
    add(std::to_string(steps_.size()), made);
    steps_.push_back({std::move(module), [&made](const Tensor& x) -> Tensor { return made(x); }});
    return made;
  }
  Tensor forward(const Tensor& x);
  std::size_t size() const { return steps_.size(); }

 private:
  struct Step {
    std::unique_ptr<ModuleBase> module;
    Function<Tensor(const Tensor&)> run;
  };
  std::vector<Step> steps_;
};

}  // namespace mixtape::nn
