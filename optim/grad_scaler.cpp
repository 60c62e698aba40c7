#include "optim/grad_scaler.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/grad_mode.h"
#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "engine/profile_hooks.h"
#include "engine/transfer.h"
#include "kernels/elementwise.h"
#include "ops/ops.h"

namespace mixtape {
namespace {

constexpr int kFields = sizeof(kernels::ScalerState) / sizeof(float);
static_assert(kFields == 5);
constexpr int kScale = 0, kInvScale = 1, kFoundInf = 3;

float* pointer(const Tensor& t) { return static_cast<float*>(t.raw_data()); }

/// Reads what the device has written so far; on a GPU that may be a step or more ago.
void check_skips(const Tensor& last, int limit) {
  float skips = 0;
  std::memcpy(&skips, pointer(last) + 4, sizeof(float));
  MT_CHECK(limit <= 0 || skips < static_cast<float>(limit), "GradScaler::update: ", skips,
           " steps in a row were skipped because gradients were inf or NaN; expected fewer than ",
           limit,
           ". last_step() names the parameters; the model may have diverged, or data may hold NaN");
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(options) {
  MT_CHECK(options.init_scale > 0 && std::isfinite(options.init_scale),
           "GradScaler: expected a positive init_scale, got ", options.init_scale);
  MT_CHECK(options.growth_factor > 1 && options.backoff_factor > 0 && options.backoff_factor < 1,
           "GradScaler: expected growth_factor > 1 and backoff_factor in (0, 1), got ",
           options.growth_factor, " and ", options.backoff_factor);
  MT_CHECK(options.growth_interval >= 1,
           "GradScaler: expected a growth_interval of at least 1, got ", options.growth_interval);
  MT_CHECK(options.min_scale >= 0x1p-126f && options.min_scale <= options.init_scale,
           "GradScaler: expected a min_scale in [2^-126, init_scale], got ", options.min_scale);
}

void GradScaler::ensure_state(Device device) {
  if (state_) {
    MT_CHECK(state_.device() == device, "GradScaler: expected tensors on ", state_.device(),
             ", where its state is, got ", device);
    return;
  }
  const NoGrad no_grad;
  state_ = empty({kFields}, {.device = device});
  last_host_ = zeros({kFields}, {.pinned = device.is_cuda()});
  write_initial_state();
}

void GradScaler::write_initial_state() {
  kernels::set_scaler(
      Stream::current(state_.device()), reinterpret_cast<kernels::ScalerState*>(pointer(state_)),
      {options_.init_scale, 1 / options_.init_scale, initial_tracker_, 0, initial_skips_});
}

Tensor GradScaler::field(int index) const { return make_view(state_, {}, {}, index); }

Tensor GradScaler::scale(const Tensor& loss) {
  if (!options_.enabled) return loss;
  MT_CHECK(is_floating(loss.dtype()), "GradScaler::scale: expected a floating loss, got ",
           loss.describe());
  ensure_state(loss.device());
  const Tensor scaled =
      mul(is_low_precision(loss.dtype()) ? cast(loss, Dtype::f32) : loss, field(kScale));
  if (scaled.impl()->grad_fn) scaled.impl()->grad_fn->scaled_loss = true;
  return scaled;
}

// ---- unscale and step --------------------------------------------------------------------------

GradScaler::PerOptimizer& GradScaler::entry_of(const optim::Optimizer& optimizer) {
  for (PerOptimizer& entry : optimizers_) {
    if (entry.id == optimizer.id()) return entry;
  }
  PerOptimizer& entry = optimizers_.emplace_back();
  entry.id = optimizer.id();
  const NoGrad no_grad;
  entry.found_inf =
      optimizers_.size() == 1 ? field(kFoundInf) : zeros({}, {.device = state_.device()});
  return entry;
}

void GradScaler::scan(PerOptimizer& entry, const std::vector<Tensor>& parameters, bool unscale) {
  const NoGrad no_grad;
  const kernels::GradientTable table = entry.table.refresh(parameters);
  if (!entry.per_range || entry.per_range.numel() < table.count) {
    const OutsideCapture outside(state_.device());
    entry.per_range = zeros({table.count}, {.device = state_.device()});
  }
  if (graph_recorder != nullptr) [[unlikely]]
    graph_recorder->keep(entry.per_range);
  if (table.count > 0) {
    MT_CHECK(entry.table.device() == state_.device(), "GradScaler: expected gradients on ",
             state_.device(), ", got ", entry.table.device());
    kernels::gradient_unscale(Stream::current(state_.device()), table, pointer(entry.found_inf),
                              unscale ? pointer(field(kInvScale)) : nullptr,
                              pointer(entry.per_range));
  }
  if (unscale) {
    for (const Tensor& p : entry.table.listed()) {
      leaf_grad(*p.impl()).scaled = false;
      leaf_grad(*p.impl()).gradient.impl()->storage->bump_version();
    }
  }
  if (reduce_) reduce_(entry.found_inf);
}

void GradScaler::unscale(optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  const OpScope scope("GradScaler::unscale");
  const profile::Range range(ProfileKind::function, "GradScaler::unscale");
  const std::vector<Tensor> parameters = optimizer.parameters();
  MT_CHECK(!parameters.empty(), "GradScaler::unscale: expected an optimizer with parameters");
  ensure_state(parameters[0].device());
  PerOptimizer& entry = entry_of(optimizer);
  MT_CHECK(entry.stage != Stage::unscaled,
           "GradScaler::unscale: already called for this optimizer since the last update(); "
           "if its step was left out, call update() before the next iteration");
  MT_CHECK(entry.stage != Stage::stepped,
           "GradScaler::unscale: called after step(); call update() first");
  scan(entry, parameters, true);
  entry.stage = Stage::unscaled;
}

void GradScaler::step(optim::Optimizer& optimizer) {
  if (!options_.enabled) return optimizer.step();
  const OpScope scope("GradScaler::step");
  const profile::Range range(ProfileKind::function, "GradScaler::step");
  const std::vector<Tensor> parameters = optimizer.parameters();
  MT_CHECK(!parameters.empty(), "GradScaler::step: expected an optimizer with parameters");
  ensure_state(parameters[0].device());
  PerOptimizer& entry = entry_of(optimizer);
  MT_CHECK(entry.stage != Stage::stepped,
           "GradScaler::step: already called for this optimizer since the last update()");
  MT_CHECK(optimizer.accepts_step_control() || options_.allow_sync,
           "GradScaler::step: this optimizer has no step(const StepControl&), so skipping needs to "
           "wait for the device; override "
           "it, or set GradScalerOptions::allow_sync");
  const bool unscaled = entry.stage == Stage::unscaled;
  if (!unscaled) scan(entry, parameters, !optimizer.accepts_step_control());
  if (optimizer.accepts_step_control()) {
    optimizer.step({.found_inf = entry.found_inf,
                    .inv_scale = unscaled ? Tensor() : field(kInvScale),
                    .clip_factor = {}});
  } else if (entry.found_inf.item<float>() == 0) {
    optimizer.step();
  }
  entry.stage = Stage::stepped;
}

// ---- update ------------------------------------------------------------------------------------

void GradScaler::begin_update() {
  MT_CHECK(state_, "GradScaler::update: expected a scale() or step() before it");
  const NoGrad no_grad;
  const Stream stream = Stream::current(state_.device());
  for (std::size_t i = 1; i < optimizers_.size(); ++i) {
    const View into = field(kFoundInf).view();
    kernels::binary(stream, kernels::BinaryOp::maximum, Dtype::f32, into, into,
                    optimizers_[i].found_inf.view());
  }
  copy_bytes(last_host_.raw_data(), Device::cpu(), state_.raw_data(), state_.device(),
             sizeof(kernels::ScalerState), stream);
}

void GradScaler::end_update() {
  const NoGrad no_grad;
  for (std::size_t i = 0; i < optimizers_.size(); ++i) {
    optimizers_[i].stage = Stage::ready;
    if (i > 0) optimizers_[i].found_inf.zero_();
  }
  check_skips(last_host_, options_.max_consecutive_skips);
  if (graph_recorder == nullptr) return;
  for (const Tensor& t : {state_, last_host_}) graph_recorder->keep(t);
  graph_recorder->before_replay(
      [last = last_host_, limit = options_.max_consecutive_skips] { check_skips(last, limit); });
}

void GradScaler::update() {
  if (!options_.enabled) return;
  const OpScope scope("GradScaler::update");
  const profile::Range range(ProfileKind::function, "GradScaler::update");
  begin_update();
  kernels::scaler_update(Stream::current(state_.device()),
                         reinterpret_cast<kernels::ScalerState*>(pointer(state_)),
                         {.growth_factor = options_.growth_factor,
                          .backoff_factor = options_.backoff_factor,
                          .min_scale = options_.min_scale,
                          .growth_interval = options_.growth_interval});
  end_update();
}

void GradScaler::update(float new_scale) {
  if (!options_.enabled) return;
  MT_CHECK(new_scale > 0 && std::isfinite(new_scale),
           "GradScaler::update: expected a positive finite scale, got ", new_scale);
  begin_update();
  field(kScale).fill_(new_scale);
  field(kInvScale).fill_(1 / new_scale);
  field(kFoundInf).fill_(0);
  end_update();
}

// ---- what the user can ask ---------------------------------------------------------------------

float GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return state_ ? field(kScale).item<float>() : options_.init_scale;
}

GradScaler::Report GradScaler::last_step() const {
  Report report;
  if (!state_) return report;
  Stream::current(state_.device()).synchronize();
  const float* last = pointer(last_host_);
  report.scale = last[kScale];
  report.skipped = last[kFoundInf] != 0;
  if (!report.skipped) return report;
  for (const PerOptimizer& entry : optimizers_) {
    if (!entry.per_range) continue;
    const std::vector<float> flags = entry.per_range.to_vector<float>();
    const auto& listed = entry.table.listed();
    int named = 0;
    for (std::size_t i = 0; i < listed.size() && i < flags.size() && named < 8; ++i) {
      if (flags[i] == 0) continue;
      report.names.push_back(listed[i].name().empty() ? detail::concat("parameter ", i)
                                                      : listed[i].name());
      ++named;
    }
  }
  return report;
}

optim::State GradScaler::state_dict() const {
  const std::vector<float> s =
      state_ ? state_.to_vector<float>()
             : std::vector<float>{options_.init_scale, 0, initial_tracker_, 0, initial_skips_};
  return {{"scaler", tensor({s[0], s[2], s[4], options_.growth_factor, options_.backoff_factor,
                             static_cast<float>(options_.growth_interval), options_.min_scale})}};
}

void GradScaler::load_state_dict(const optim::State& state) {
  const auto found =
      std::find_if(state.begin(), state.end(), [](const auto& n) { return n.name == "scaler"; });
  MT_CHECK(found != state.end() && found->tensor.numel() == 7,
           "GradScaler::load_state_dict: expected an entry 'scaler' of 7 numbers");
  const std::vector<float> s = found->tensor.to_vector<float>();
  options_.growth_factor = s[3];
  options_.backoff_factor = s[4];
  options_.growth_interval = static_cast<int>(s[5]);
  options_.min_scale = s[6];
  options_.init_scale = s[0];
  initial_tracker_ = s[1];
  initial_skips_ = s[2];
  if (state_) write_initial_state();
}

}  // namespace mixtape
