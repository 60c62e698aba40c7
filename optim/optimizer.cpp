#include "optim/optimizer.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "engine/device_error.h"
#include "engine/grad_mode.h"
#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "engine/profile_recording.h"
#include "engine/transfer.h"
#include "ops/ops.h"

namespace mixtape::optim {
namespace {

std::atomic<std::uint64_t> next_id{1};

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

float* scalar_pointer(const Tensor& t) {
  if (!t) return nullptr;
  MT_CHECK(t.dtype() == Dtype::f32 && t.numel() == 1,
           "step: expected device scalars of one float32, got ", t.describe());
  return static_cast<float*>(t.raw_data());
}

std::string parameter_name(const Tensor& p, std::size_t group, std::size_t index) {
  return p.name().empty() ? detail::concat("group", group, ".", index) : p.name();
}

}  // namespace

Optimizer::Optimizer() : id_(next_id.fetch_add(1)) {}

void Optimizer::step(const StepControl& control) {
  MT_CHECK(
      control.empty(),
      "step: this optimizer has no step(const StepControl&), which a skipped or scaled step needs; "
      "override it, or set GradScalerOptions::allow_sync");
  step();
}

State Optimizer::state_dict() const {
  MT_THROW("state_dict: this optimizer has none; override state_dict() and load_state_dict()");
}

void Optimizer::load_state_dict(const State&) {
  MT_THROW("load_state_dict: this optimizer has none; override state_dict() and load_state_dict()");
}

void Optimizer::zero_grad() {
  for (Tensor& p : parameters()) p.zero_grad();
}

FusedOptimizer::FusedOptimizer(const char* name, int state_count, const char* const* state_names)
    : name_(name), state_count_(state_count), state_names_(state_names) {}

std::vector<Tensor> FusedOptimizer::parameters() const {
  std::vector<Tensor> all;
  for (const Group& g : groups_) all.insert(all.end(), g.parameters.begin(), g.parameters.end());
  return all;
}

// ---- groups and state --------------------------------------------------------------------------

void FusedOptimizer::add_parameters(const std::vector<Tensor>& parameters, const Scalars& scalars,
                                    kernels::OptimizerFlags flags) {
  MT_CHECK(!parameters.empty(), name_, ": expected at least one parameter, got none");
  const Device device = (groups_.empty() ? parameters : groups_[0].parameters)[0].device();
  for (const Tensor& p : parameters) {
    MT_CHECK(p.device() == device, name_, ": expected all parameters on ", device, ", got ",
             p.describe());
    MT_CHECK(p.is_leaf() && p.requires_grad(), name_,
             ": expected leaves that require gradients, got ", p.describe());
    MT_CHECK(p.is_contiguous() && p.dtype() != Dtype::f64, name_,
             ": expected contiguous float32, float16 or bfloat16 parameters, got ", p.describe());
    for (const Tensor& q : this->parameters())
      MT_CHECK(!p.same(q), name_, ": the parameter ", p.name(), " is in two groups");
  }
  attach_flat_gradients(parameters);
  const NoGrad no_grad;
  Group& g = groups_.emplace_back();
  g.scalars = scalars;
  g.flags = flags;
  for (const Tensor& p : parameters) {
    bool listed = false;
    for (const Tensor& q : g.parameters) listed |= p.same(q);
    if (listed) continue;
    g.parameters.push_back(p);
    for (int i = 0; i < state_count_; ++i)
      g.state[i].push_back(zeros(p.shape(), {.device = device}));
    g.masters.push_back(is_low_precision(p.dtype()) ? p.detach().to(Dtype::f32) : Tensor());
    g.rounded_at.push_back(p.version());
  }
  g.steps = zeros({static_cast<std::int64_t>(g.parameters.size())}, {.device = device});
  g.device_scalars =
      zeros({static_cast<std::int64_t>(sizeof(Scalars))}, {.dtype = Dtype::u8, .device = device});
  if (groups_.size() > 1 && !skip_) skip_ = zeros({1}, {.device = device});
}

float FusedOptimizer::lr(std::size_t group) const {
  MT_CHECK(group < groups_.size(), name_, ": expected a group below ", groups_.size(), ", got ",
           group);
  return groups_[group].scalars.lr;
}
void FusedOptimizer::set_lr(float lr) {
  for (Group& g : groups_) g.scalars.lr = lr;
}
void FusedOptimizer::set_lr(std::size_t group, float lr) {
  MT_CHECK(group < groups_.size(), name_, ": expected a group below ", groups_.size(), ", got ",
           group);
  groups_[group].scalars.lr = lr;
}

// ---- the step ----------------------------------------------------------------------------------

void FusedOptimizer::step(const StepControl& control) {
  const OpScope scope(name_);
  const profile::Range range(ProfileKind::function, name_);
  const NoGrad no_grad;
  for (Group& g : groups_) {  // what can fail comes before the first update
    refresh_masters(g);
    fill_entries(g);
  }
  const kernels::StepScalars step = decide(control);
  for (Group& g : groups_)
    if (!g.entries.empty()) step_group(g, step);
  for (Group& g : groups_) note_step(g);
}

/// What accompanies every group's launch. Of several groups each would look for itself whether an
/// error is pending, and one may come up in between: the first launch looks for all of them.
kernels::StepScalars FusedOptimizer::decide(const StepControl& control) {
  const Device device = groups_[0].parameters[0].device();
  kernels::StepScalars step{scalar_pointer(control.found_inf), scalar_pointer(control.inv_scale),
                            scalar_pointer(control.clip_factor), device_error_slot(device)};
  if (groups_.size() == 1) return step;
  if (graph_recorder != nullptr) [[unlikely]]
    graph_recorder->keep(skip_);
  float* skip = scalar_pointer(skip_);
  kernels::decide_step(Stream::current(device), skip, step);
  step.found_inf = skip;
  step.device_error = nullptr;
  return step;
}

/// Makes masters follow parameters that were written since the last step: an element that is still
/// its master, rounded, leaves that as exact as it is. Versions are known on the host, so that a
/// step without such writes costs the device nothing.
void FusedOptimizer::refresh_masters(const Group& g) const {
  for (std::size_t i = 0; i < g.parameters.size(); ++i) {
    const Tensor& p = g.parameters[i];
    if (!g.masters[i] || p.version() == g.rounded_at[i]) continue;
    std::optional<OutsideCapture> outside;
    if (graph_recorder != nullptr && !graph_recorder->writes(*p.impl()->storage))
      outside.emplace(p.device());  // a write from before the captured step is taken over once
    const Tensor value = p.detach();
    Tensor master = g.masters[i];
    master.copy_(where(eq(cast(master, p.dtype()), value), master, cast(value, Dtype::f32)));
    g.rounded_at[i] = p.version();
  }
}

void FusedOptimizer::fill_entries(Group& g) const {
  g.entries.clear();
  std::int64_t chunk = 0;
  for (std::size_t i = 0; i < g.parameters.size(); ++i) {
    const Tensor& p = g.parameters[i];
    if (graph_recorder != nullptr) [[unlikely]]
      graph_recorder->note_leaf(*p.impl());
    const LeafGrad& leaf = leaf_grad(*p.impl());
    if (leaf.state == GradState::none || p.numel() == 0) continue;
    MT_CHECK(leaf.state == GradState::valid, name_, ": the gradient of ", parameter_name(p, 0, i),
             " is incomplete because backward failed; call zero_grad() first");
    MT_CHECK(leaf.flat && leaf.gradient.device() == p.device(), name_, ": ",
             parameter_name(p, 0, i), " was moved after the optimizer was built");
    kernels::ParameterEntry e;
    std::memset(static_cast<void*>(&e), 0,
                sizeof(e));  // padding too: entries are compared as bytes
    e.parameter = p.raw_data();
    e.master = g.masters[i] ? static_cast<float*>(g.masters[i].raw_data()) : nullptr;
    e.gradient = leaf.gradient.raw_data();
    for (int s = 0; s < state_count_; ++s)
      e.state[s] = static_cast<float*>(g.state[s][i].raw_data());
    const bool fresh =
        leaf.shadow && leaf.shadow_version == p.version() && leaf.shadow.device() == p.device();
    e.shadow = fresh ? leaf.shadow.raw_data() : nullptr;
    e.step = static_cast<float*>(g.steps.raw_data()) + i;
    e.numel = p.numel();
    e.first_chunk = chunk;
    e.dtype = p.dtype();
    e.gradient_dtype = leaf.gradient.dtype();
    e.shadow_dtype = fresh ? leaf.shadow.dtype() : Dtype::f32;
    chunk += (p.numel() + kernels::kChunk - 1) / kernels::kChunk;
    g.entries.push_back(e);
  }
}

kernels::ParameterTable FusedOptimizer::upload(Group& g) const {
  kernels::ParameterTable table;
  table.host = table.device = g.entries.data();
  table.count = static_cast<std::int64_t>(g.entries.size());
  const auto& last = g.entries.back();
  table.chunks = last.first_chunk + (last.numel + kernels::kChunk - 1) / kernels::kChunk;
  const Device device = g.parameters[0].device();
  if (device.is_cpu()) return table;
  const std::size_t bytes = g.entries.size() * sizeof(kernels::ParameterEntry);
  if (!same_bytes(g.entries, g.sent_entries)) {
    const OutsideCapture outside(device);
    g.device_entries = Tensor::empty({static_cast<std::int64_t>(bytes)}, Dtype::u8, device);
    copy_bytes(g.device_entries.raw_data(), device, g.entries.data(), Device::cpu(), bytes,
               Stream::current(device));
    g.sent_entries = g.entries;
  }
  if (graph_recorder != nullptr) [[unlikely]]
    graph_recorder->keep(g.device_entries);
  table.device = static_cast<const kernels::ParameterEntry*>(g.device_entries.raw_data());
  return table;
}

void FusedOptimizer::send_scalars(Group& g) {
  if (g.scalars_sent && std::memcmp(&g.scalars, &g.uploaded, sizeof(Scalars)) == 0) return;
  kernels::set_scalars(Stream::current(g.device_scalars.device()),
                       static_cast<Scalars*>(g.device_scalars.raw_data()), g.scalars);
  g.uploaded = g.scalars;
  g.scalars_sent = true;
}

void FusedOptimizer::note_bytes(const std::vector<kernels::ParameterEntry>& entries) const {
  profile::RecordedRange* range = profile::innermost();
  if (range == nullptr) return;
  for (const kernels::ParameterEntry& e : entries) {
    std::size_t each = size_of(e.gradient_dtype) + 2 * size_of(e.dtype);  // read; read, written
    each += static_cast<std::size_t>(state_count_) * 2 * sizeof(float);
    if (e.master != nullptr) each += 2 * sizeof(float) - size_of(e.dtype);
    if (e.shadow != nullptr) each += size_of(e.shadow_dtype);
    range->bytes += static_cast<double>(e.numel) * static_cast<double>(each);
  }
}

void FusedOptimizer::step_group(Group& g, const kernels::StepScalars& step) {
  if (graph_recorder == nullptr) send_scalars(g);
  if (profile::mode() & profile::kWork) [[unlikely]]
    note_bytes(g.entries);
  launch(Stream::current(g.parameters[0].device()), upload(g),
         static_cast<const Scalars*>(g.device_scalars.raw_data()), g.flags, step);
  for (const Tensor& p : g.parameters) {
    LeafGrad& leaf = leaf_grad(*p.impl());
    if (leaf.state != GradState::valid) continue;
    const bool shadow_written = leaf.shadow && leaf.shadow_version == p.version();
    p.impl()->storage->bump_version();
    if (!shadow_written) continue;
    leaf.shadow.impl()->storage->bump_version();
    leaf.shadow_version = p.version();
  }
}

/// Once all groups are updated: parameters of two groups may share a storage and its version.
void FusedOptimizer::note_step(Group& g) {
  for (std::size_t i = 0; i < g.parameters.size(); ++i) g.rounded_at[i] = g.parameters[i].version();
  if (graph_recorder != nullptr && !g.entries.empty()) [[unlikely]]
    repeat_on_replays(g);
}

void FusedOptimizer::repeat_on_replays(Group& g) {
  std::vector<std::size_t> written;  // by the graph, and by nothing in it after this step
  for (std::size_t i = 0; i < g.parameters.size(); ++i)
    if (graph_recorder->writes(*g.parameters[i].impl()->storage)) written.push_back(i);
  const auto number = static_cast<std::size_t>(&g - groups_.data());  // groups may move
  graph_recorder->before_replay([this, number, name = name_, alive = std::weak_ptr(alive_), written,
                                 first = true]() mutable {
    MT_CHECK(!alive.expired(), "capture: the ", name, " optimizer of the captured step is gone");
    Group& group = groups_[number];
    const auto version = [&](std::size_t i) { return group.parameters[i].version(); };
    if (std::exchange(first, false))  // directly after the capture
      std::erase_if(written, [&](std::size_t i) { return group.rounded_at[i] != version(i); });
    refresh_masters(group);
    send_scalars(group);
    for (const std::size_t i : written) group.rounded_at[i] = version(i) + 1;  // as the replay will
  });
}

// ---- checkpoints -------------------------------------------------------------------------------

std::vector<std::pair<std::string, Tensor>> FusedOptimizer::named_state() const {
  std::vector<std::pair<std::string, Tensor>> all;
  std::set<std::string> taken;
  for (std::size_t gi = 0; gi < groups_.size(); ++gi) {
    const Group& g = groups_[gi];
    for (std::size_t i = 0; i < g.parameters.size(); ++i) {
      std::string name = parameter_name(g.parameters[i], gi, i);
      // Parameters of two models may share a name; the position tells them apart.
      if (!taken.insert(name).second) name = detail::concat("group", gi, ".", i, ".", name);
      for (int s = 0; s < state_count_; ++s)
        all.emplace_back(name + "." + state_names_[s], g.state[s][i]);
      if (g.masters[i]) all.emplace_back(name + ".master", g.masters[i]);
      all.emplace_back(name + ".step", make_view(g.steps, {}, {}, static_cast<std::int64_t>(i)));
    }
  }
  return all;
}

State FusedOptimizer::state_dict() const {
  const NoGrad no_grad;
  for (const Group& g : groups_) refresh_masters(g);
  State state;
  for (auto& [name, tensor] : named_state()) state.push_back({name, tensor});
  for (std::size_t gi = 0; gi < groups_.size(); ++gi) {
    const auto& s = groups_[gi].scalars;
    state.push_back(
        {detail::concat("group", gi, ".hyper"),
         tensor({s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.momentum, s.dampening})});
  }
  return state;
}

void FusedOptimizer::load_state_dict(const State& state) {
  const auto find = [&](const std::string& name) -> const Tensor& {
    for (const nn::NamedTensor& n : state) {
      if (n.name == name) return n.tensor;
    }
    MT_THROW(name_, ": load_state_dict: expected an entry '", name, "', got none");
  };
  const auto own = named_state();
  for (const auto& [name, tensor] : own) {
    const Tensor& given = find(name);
    MT_CHECK(given.shape() == tensor.shape() && given.dtype() == tensor.dtype(), name_,
             ": load_state_dict: expected ", tensor.describe(), " for '", name, "', got ",
             given.describe());
  }
  std::vector<std::vector<float>> hyper;
  for (std::size_t gi = 0; gi < groups_.size(); ++gi) {
    hyper.push_back(find(detail::concat("group", gi, ".hyper")).to_vector<float>());
    MT_CHECK(hyper.back().size() == 7, name_,
             ": load_state_dict: expected 7 hyper-parameters, got ", hyper.back().size());
  }
  const NoGrad no_grad;
  for (const auto& [name, tensor] : own) Tensor(tensor).copy_(find(name));
  for (std::size_t gi = 0; gi < groups_.size(); ++gi) {
    const auto& h = hyper[gi];
    groups_[gi].scalars = {h[0], h[1], h[2], h[3], h[4], h[5], h[6], 0};
    for (std::size_t i = 0; i < groups_[gi].parameters.size(); ++i)  // masters as they were saved
      groups_[gi].rounded_at[i] = groups_[gi].parameters[i].version();
  }
}

}  // namespace mixtape::optim
