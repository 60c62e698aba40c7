// The built-in optimizers: the hyper-parameters each checks, the state it keeps and the kernel it
// launches. The step around them is FusedOptimizer's.
#include "optim/optimizer.h"

namespace mixtape::optim {
namespace {
constexpr const char* kSgdState[] = {"momentum"};
constexpr const char* kAdamState[] = {"exp_avg", "exp_avg_sq"};
}  // namespace

Sgd::Sgd(const std::vector<Tensor>& parameters, SgdOptions options)
    : FusedOptimizer("sgd", options.momentum != 0, kSgdState) {
  add_group(parameters, options);
}
void Sgd::add_group(const std::vector<Tensor>& parameters, SgdOptions o) {
  MT_CHECK((o.momentum != 0) == keeps_state(),
           "sgd: expected all groups with momentum or all without, got a group with momentum ",
           o.momentum);
  MT_CHECK(!o.nesterov || (o.momentum > 0 && o.dampening == 0),
           "sgd: expected momentum and no dampening for Nesterov, got ", o.momentum, " and ",
           o.dampening);
  add_parameters(parameters,
                 {.lr = o.lr,
                  .beta1 = 0,
                  .beta2 = 0,
                  .eps = 0,
                  .weight_decay = o.weight_decay,
                  .momentum = o.momentum,
                  .dampening = o.dampening,
                  .reserved = 0},
                 {.nesterov = o.nesterov, .maximize = o.maximize});
}
void Sgd::launch(const Stream& stream, const kernels::ParameterTable& table, const Scalars* scalars,
                 kernels::OptimizerFlags flags, const kernels::StepScalars& step) {
  kernels::sgd_step(stream, table, scalars, flags, step);
}

namespace {
template <class Options>
kernels::OptimizerScalars adam_scalars(const char* name, const Options& o) {
  MT_CHECK(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, name,
           ": expected betas in [0, 1), got ", o.beta1, " and ", o.beta2);
  MT_CHECK(o.eps >= 0, name, ": expected eps of at least 0, got ", o.eps);
  return {.lr = o.lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay,
          .momentum = 0,
          .dampening = 0,
          .reserved = 0};
}
}  // namespace

Adam::Adam(const std::vector<Tensor>& parameters, AdamOptions options)
    : FusedOptimizer("adam", 2, kAdamState) {
  add_group(parameters, options);
}
void Adam::add_group(const std::vector<Tensor>& parameters, AdamOptions o) {
  add_parameters(parameters, adam_scalars("adam", o), {.decoupled = false, .maximize = o.maximize});
}
void Adam::launch(const Stream& stream, const kernels::ParameterTable& table,
                  const Scalars* scalars, kernels::OptimizerFlags flags,
                  const kernels::StepScalars& step) {
  kernels::adam_step(stream, table, scalars, flags, step);
}

AdamW::AdamW(const std::vector<Tensor>& parameters, AdamWOptions options)
    : FusedOptimizer("adamw", 2, kAdamState) {
  add_group(parameters, options);
}
void AdamW::add_group(const std::vector<Tensor>& parameters, AdamWOptions o) {
  add_parameters(parameters, adam_scalars("adamw", o), {.decoupled = true, .maximize = o.maximize});
}
void AdamW::launch(const Stream& stream, const kernels::ParameterTable& table,
                   const Scalars* scalars, kernels::OptimizerFlags flags,
                   const kernels::StepScalars& step) {
  kernels::adam_step(stream, table, scalars, flags, step);
}

}  // namespace mixtape::optim
