#include "nn/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <memory>
#include <sstream>

#include "engine/grad_mode.h"
#include "engine/node.h"
#include "ops/ops.h"

namespace mixtape::nn {

std::string demangled_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? text.get() : mangled;
  const std::size_t arguments = name.find('<');
  const std::size_t colon = name.rfind("::", arguments);
  return colon == std::string::npos ? name : name.substr(colon + 2);
}

// ---- registration ------------------------------------------------------------------------------

void ModuleBase::check_new_name(const std::string& name) const {
  MT_CHECK(!name.empty() && name.find('.') == std::string::npos, describe(),
           ": expected a name without a dot, got '", name, "'");
  const auto taken = [&](const auto& list) {
    return std::any_of(list.begin(), list.end(),
                       [&](const auto& entry) { return entry.first == name; });
  };
  MT_CHECK(!taken(children_) && !taken(parameters_) && !taken(buffers_), describe(), ": the name '",
           name, "' is registered twice");
}

void ModuleBase::add(const std::string& name, ModuleBase& child) {
  check_new_name(name);
  MT_CHECK(&child != this, describe(), ": a module cannot be its own child");
  child.scope_name_ = name;
  children_.emplace_back(name, &child);
}

void ModuleBase::add_parameter(const std::string& name, Tensor& parameter) {
  check_new_name(name);
  MT_CHECK(parameter.defined() && is_floating(parameter.dtype()), describe(),
           ": expected a floating tensor as parameter '", name, "', got ", parameter.describe());
  parameter.set_requires_grad();
  if (parameter.name().empty()) parameter.set_name(name);
  parameters_.emplace_back(name, &parameter);
}

void ModuleBase::add_buffer(const std::string& name, Tensor& buffer) {
  check_new_name(name);
  MT_CHECK(buffer.defined(), describe(), ": expected a tensor as buffer '", name,
           "', got an undefined one");
  buffers_.emplace_back(name, &buffer);
}

// ---- the tree ----------------------------------------------------------------------------------

template <class F>
void ModuleBase::visit(const std::string& prefix, F&& f) const {
  f(prefix, *this);
  for (const auto& [name, child] : children_)
    child->visit(prefix.empty() ? name : prefix + "." + name, f);
}

namespace {
std::string join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}
}  // namespace

std::vector<NamedTensor> ModuleBase::named_parameters() const {
  std::vector<NamedTensor> all;
  visit("", [&](const std::string& path, const ModuleBase& m) {
    for (const auto& [name, tensor] : m.parameters_) {
      const bool tied = std::any_of(all.begin(), all.end(),
                                    [&](const NamedTensor& n) { return n.tensor.same(*tensor); });
      if (!tied) all.push_back({join(path, name), *tensor});
    }
  });
  for (const NamedTensor& n : all) n.tensor.set_name(n.name);
  return all;
}

std::vector<Tensor> ModuleBase::parameters() const {
  std::vector<Tensor> all;
  for (NamedTensor& n : named_parameters()) all.push_back(std::move(n.tensor));
  return all;
}

std::vector<NamedTensor> ModuleBase::named_buffers() const {
  std::vector<NamedTensor> all;
  visit("", [&](const std::string& path, const ModuleBase& m) {
    for (const auto& [name, tensor] : m.buffers_) all.push_back({join(path, name), *tensor});
  });
  return all;
}

void ModuleBase::apply(const Function<void(const std::string&, ModuleBase&)>& f) {
  visit("",
        [&](const std::string& path, const ModuleBase& m) { f(path, const_cast<ModuleBase&>(m)); });
}

std::int64_t ModuleBase::parameter_count() const {
  std::int64_t n = 0;
  for (const Tensor& p : parameters()) n += p.numel();
  return n;
}

// ---- mode and place ----------------------------------------------------------------------------

ModuleBase& ModuleBase::train(bool on) {
  apply([on](const std::string&, ModuleBase& m) { m.training_ = on; });
  return *this;
}

void ModuleBase::move(const Device* device, const Dtype* dtype) {
  const NoGrad no_grad;
  std::vector<std::pair<TensorImpl*, Tensor>> moved;
  const auto plan = [&](const std::string& name, const Tensor& t) {
    const Dtype to_dtype = dtype && is_floating(t.dtype()) ? *dtype : t.dtype();
    const Device to_device = device ? *device : t.device();
    if (to_dtype == t.dtype() && to_device == t.device()) return;
    for (const auto& [impl, value] : moved) {
      if (impl == t.impl().get()) return;
    }
    const LeafGrad* leaf = t.impl()->leaf;
    MT_CHECK(!leaf || !leaf->flat, "to: expected parameters that no optimizer holds, but '", name,
             "' already has a flat gradient; move the module before building the optimizer");
    moved.emplace_back(t.impl().get(), t.detach().to(to_device, to_dtype));
  };
  visit("", [&](const std::string& path, const ModuleBase& m) {
    for (const auto& [name, tensor] : m.parameters_) plan(join(path, name), *tensor);
    for (const auto& [name, tensor] : m.buffers_) plan(join(path, name), *tensor);
  });
  for (auto& [impl, value] : moved) {  // nothing throws from here on
    const TensorImpl& from = *value.impl();
    impl->storage = from.storage;
    impl->offset = from.offset;
    impl->sizes = from.sizes;
    impl->strides = from.strides;
    impl->dtype = from.dtype;
    if (impl->leaf) {
      impl->leaf->shadow = {};
      impl->leaf->gradient = {};
      impl->leaf->state = GradState::none;
    }
  }
}

ModuleBase& ModuleBase::to(Device device) {
  check_device("to", device);
  move(&device, nullptr);
  return *this;
}
ModuleBase& ModuleBase::to(Dtype dtype) {
  MT_CHECK(is_floating(dtype), "to: expected a floating dtype for a module, got ", dtype);
  move(nullptr, &dtype);
  return *this;
}
ModuleBase& ModuleBase::to(Device device, Dtype dtype) {
  check_device("to", device);
  MT_CHECK(is_floating(dtype), "to: expected a floating dtype for a module, got ", dtype);
  move(&device, &dtype);
  return *this;
}

void ModuleBase::zero_grad() {
  for (Tensor& p : parameters()) p.zero_grad();
}

// ---- state -------------------------------------------------------------------------------------

std::vector<NamedTensor> ModuleBase::state_dict() const {
  std::vector<NamedTensor> all;
  visit("", [&](const std::string& path, const ModuleBase& m) {
    for (const auto& [name, tensor] : m.parameters_) all.push_back({join(path, name), *tensor});
    for (const auto& [name, tensor] : m.buffers_) all.push_back({join(path, name), *tensor});
  });
  return all;
}

void ModuleBase::load_state_dict(const std::vector<NamedTensor>& state, bool strict) {
  std::vector<NamedTensor> own = state_dict();
  std::ostringstream faults;
  const auto find = [](const std::vector<NamedTensor>& list, const std::string& name) {
    return std::find_if(list.begin(), list.end(),
                        [&](const NamedTensor& n) { return n.name == name; });
  };
  for (const NamedTensor& n : own) {
    const auto given = find(state, n.name);
    if (given == state.end()) {
      if (strict) faults << "\n  missing: " << n.name << " " << n.tensor.describe();
    } else if (!(given->tensor.shape() == n.tensor.shape())) {
      faults << "\n  shape of " << n.name << ": expected " << n.tensor.shape() << ", got "
             << given->tensor.shape();
    }
  }
  for (const NamedTensor& n : state) {
    if (strict && find(own, n.name) == own.end())
      faults << "\n  unexpected: " << n.name << " " << n.tensor.describe();
  }
  MT_CHECK(faults.str().empty(), "load_state_dict of ", describe(), ":", faults.str());
  const NoGrad no_grad;
  for (NamedTensor& n : own) {
    const auto given = find(state, n.name);
    if (given != state.end()) n.tensor.copy_(given->tensor);
  }
}

std::string ModuleBase::summary() const {
  struct Row {
    std::string name, what, shapes;
    std::int64_t count;
  };
  std::vector<Row> rows;
  visit("", [&](const std::string& path, const ModuleBase& m) {
    std::ostringstream shapes;
    std::int64_t count = 0;
    for (const auto& [name, tensor] : m.parameters_) {
      shapes << (count ? " " : "") << name << tensor->shape();
      count += tensor->numel();
    }
    const auto depth =
        static_cast<std::size_t>(path.empty() ? 0 : 1 + std::count(path.begin(), path.end(), '.'));
    rows.push_back({std::string(2 * depth, ' ') + (path.empty() ? "(this)" : m.scope_name_),
                    m.describe(), shapes.str(), count});
  });
  std::size_t widths[3] = {6, 5, 10};
  for (const Row& r : rows) {
    widths[0] = std::max(widths[0], r.name.size());
    widths[1] = std::max(widths[1], r.what.size());
    widths[2] = std::max(widths[2], r.shapes.size());
  }
  std::ostringstream out;
  const auto line = [&](const std::string& a, const std::string& b, const std::string& c,
                        const std::string& d) {
    out << std::left << std::setw(static_cast<int>(widths[0]) + 2) << a
        << std::setw(static_cast<int>(widths[1]) + 2) << b
        << std::setw(static_cast<int>(widths[2]) + 2) << c << std::right << std::setw(12) << d
        << "\n";
  };
  line("module", "type", "parameters", "count");
  for (const Row& r : rows) line(r.name, r.what, r.shapes, r.count ? std::to_string(r.count) : "");
  line("total", "", "", std::to_string(parameter_count()));
  return out.str();
}

void ModuleBase::register_forward_pre_hook(Function<void(ModuleBase&)> hook) {
  pre_hooks_.push_back(std::move(hook));
}
void ModuleBase::register_forward_hook(Function<void(ModuleBase&)> hook) {
  post_hooks_.push_back(std::move(hook));
}
void ModuleBase::run_pre_hooks() {
  for (const auto& hook : pre_hooks_) hook(*this);
}
void ModuleBase::run_post_hooks() {
  for (const auto& hook : post_hooks_) hook(*this);
}

}  // namespace mixtape::nn
