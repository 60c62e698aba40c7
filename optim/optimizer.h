// Optimizers: parameter groups, state, and a step that a device can carry out without the host.
//
// Parameters get permanent gradients in one flat buffer when an optimizer is built on them. State
// is fp32 whatever the parameters' dtype; 16-bit parameters get fp32 master weights, which are what
// is updated. A 16-bit parameter that somebody else has written since (weights loaded, clamped,
// averaged) takes its master along: where its values are no longer the rounded master. A parameter
// that had no gradient since zero_grad() is left alone, its step count too. A step is taken for all
// groups or for none; they are on one device.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/tensor.h"
#include "kernels/optimizer.h"
#include "nn/module.h"

namespace mixtape::optim {

/// Device scalars (one float each) that accompany a step; undefined where unused. A non-zero
/// found_inf skips the step. Gradients are multiplied by inv_scale and clip_factor on the way.
struct StepControl {
  Tensor found_inf, inv_scale, clip_factor;
  bool empty() const { return !found_inf && !inv_scale && !clip_factor; }
};

/// What a checkpoint holds of an optimizer or scaler.
using State = std::vector<nn::NamedTensor>;

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One update from the gradients that are there.
  virtual void step() = 0;
  /// The same with device scalars. The default throws: an optimizer written without it works with
  /// GradScaler only if that may synchronise (GradScalerOptions::allow_sync).
  virtual void step(const StepControl& control);
  virtual bool accepts_step_control() const { return false; }
  virtual std::vector<Tensor> parameters() const = 0;
  /// All that the next step depends on besides parameters and gradients. The defaults throw: an
  /// optimizer written without them cannot be put into a checkpoint.
  virtual State state_dict() const;
  virtual void load_state_dict(const State& state);
  /// 'No gradient' for every parameter: the next backward overwrites.
  void zero_grad();
  /// Distinguishes optimizers for GradScaler, also after one is destroyed.
  std::uint64_t id() const { return id_; }

 protected:
  Optimizer();

 private:
  std::uint64_t id_;
};

/// Base of the built-in optimizers: one fused launch a step and group. Building one, or adding a
/// group, throws unless all parameters are contiguous leaves on one device, each in one group.
class FusedOptimizer : public Optimizer {
 public:
  void step() override { step(StepControl{}); }
  void step(const StepControl& control) override;
  bool accepts_step_control() const override { return true; }
  std::vector<Tensor> parameters() const override;

  std::size_t group_count() const { return groups_.size(); }
  /// Learning rate of one group or of all; takes effect with the next step, without waiting.
  float lr(std::size_t group = 0) const;
  void set_lr(float lr);
  void set_lr(std::size_t group, float lr);

  /// Moments, master weights, step counts and hyper-parameters by parameter name (or index).
  State state_dict() const override;
  /// Copies state back bit for bit; throws, before changing anything, on missing names, shapes or
  /// dtypes.
  void load_state_dict(const State& state) override;

 protected:
  using Scalars = kernels::OptimizerScalars;
  /// state_count: fp32 state tensors per parameter (0 to 2), called state_names in state_dict.
  FusedOptimizer(const char* name, int state_count, const char* const* state_names);
  void add_parameters(const std::vector<Tensor>& parameters, const Scalars& scalars,
                      kernels::OptimizerFlags flags);
  bool keeps_state() const { return state_count_ > 0; }
  virtual void launch(const Stream& stream, const kernels::ParameterTable& table,
                      const Scalars* scalars, kernels::OptimizerFlags flags,
                      const kernels::StepScalars& step) = 0;

 private:
  struct Group {
    std::vector<Tensor> parameters;
    std::vector<Tensor> state[2];  // fp32, of each parameter's shape
    std::vector<Tensor> masters;   // fp32, defined for 16-bit parameters
    // The version at which each 16-bit parameter was its master, rounded.
    mutable std::vector<std::uint32_t> rounded_at;
    Tensor steps;  // (count) f32 on the device
    Scalars scalars{}, uploaded{};
    bool scalars_sent = false;
    Tensor device_scalars;  // u8, one Scalars
    kernels::OptimizerFlags flags;
    std::vector<kernels::ParameterEntry> entries, sent_entries;
    Tensor device_entries;  // u8
  };
  void send_scalars(Group& group);
  void refresh_masters(const Group& group) const;
  void fill_entries(Group& group) const;
  kernels::ParameterTable upload(Group& group) const;
  kernels::StepScalars decide(const StepControl& control);
  void step_group(Group& group, const kernels::StepScalars& step);
  void note_bytes(const std::vector<kernels::ParameterEntry>& entries) const;  // for the profiler
  void note_step(Group& group);
  void repeat_on_replays(Group& group);
  std::vector<std::pair<std::string, Tensor>> named_state() const;

  const char* name_;
  int state_count_;
  const char* const* state_names_;
  std::vector<Group> groups_;
  Tensor skip_;  // f32 on the device, of several groups: whether this step is skipped
  std::shared_ptr<const char> alive_ = std::make_shared<const char>('y');
};

struct SgdOptions {
  float lr = 1e-2f, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
};
/// Stochastic gradient descent; PyTorch's momentum rule (Sutskever et al. 2013, velocity without
/// lr).
class Sgd : public FusedOptimizer {
 public:
  explicit Sgd(const std::vector<Tensor>& parameters, SgdOptions options = {});
  void add_group(const std::vector<Tensor>& parameters, SgdOptions options);

 private:
  void launch(const Stream&, const kernels::ParameterTable&, const Scalars*,
              kernels::OptimizerFlags, const kernels::StepScalars&) override;
};

struct AdamOptions {
  float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0;
  bool maximize = false;
};
/// Adam (Kingma and Ba 2015); weight decay is added to the gradient (L2).
class Adam : public FusedOptimizer {
 public:
  explicit Adam(const std::vector<Tensor>& parameters, AdamOptions options = {});
  void add_group(const std::vector<Tensor>& parameters, AdamOptions options);

 private:
  void launch(const Stream&, const kernels::ParameterTable&, const Scalars*,
              kernels::OptimizerFlags, const kernels::StepScalars&) override;
};

struct AdamWOptions {
  float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 1e-2f;
  bool maximize = false;
};
/// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
class AdamW : public FusedOptimizer {
 public:
  explicit AdamW(const std::vector<Tensor>& parameters, AdamWOptions options = {});
  void add_group(const std::vector<Tensor>& parameters, AdamWOptions options);

 private:
  void launch(const Stream&, const kernels::ParameterTable&, const Scalars*,
              kernels::OptimizerFlags, const kernels::StepScalars&) override;
};

}  // namespace mixtape::optim
