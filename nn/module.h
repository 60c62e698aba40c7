// Modules: named parameters and buffers in a tree, with train/eval, device moves and state_dict.
//
//   struct Mlp : mt::nn::Module<Mlp> {
//     mt::nn::Linear in{784, 512}, out{512, 10};
//     Mlp() { add("in", in); add("out", out); }
//     mt::Tensor forward(const mt::Tensor& x) { return out(mt::relu(in(x))); }   // (B, 784) -> (B,
//     10)
//   };
//
// Children are registered by address, so modules are neither copied nor moved.
#pragma once

#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "engine/function.h"
#include "engine/op_scope.h"
#include "engine/tensor.h"

namespace mixtape::nn {

struct NamedTensor {
  std::string name;  // dotted path: "layers.0.weight"
  Tensor tensor;
};

class ModuleBase {
 public:
  virtual ~ModuleBase() = default;
  ModuleBase(const ModuleBase&) = delete;
  ModuleBase& operator=(const ModuleBase&) = delete;

  // ---- registration, in constructors ------------------------------------------------------------
  /// Names must be new in this module, not empty and without a dot.
  void add(const std::string& name, ModuleBase& child);
  void add_parameter(const std::string& name, Tensor& parameter);  // then requires a gradient
  void add_buffer(const std::string& name, Tensor& buffer);

  // ---- the tree ---------------------------------------------------------------------------------
  /// All parameters in registration order, own first; a tensor registered twice (tied) comes once.
  std::vector<Tensor> parameters() const;
  std::vector<NamedTensor> named_parameters() const;
  std::vector<NamedTensor> named_buffers() const;
  std::vector<std::pair<std::string, ModuleBase*>> children() const { return children_; }
  /// Calls f(path, module) for this module (path "") and every one below, parents first.
  void apply(const Function<void(const std::string&, ModuleBase&)>& f);
  std::int64_t parameter_count() const;

  // ---- mode and place ---------------------------------------------------------------------------
  ModuleBase& train(bool on = true);
  ModuleBase& eval() { return train(false); }
  bool training() const { return training_; }
  /// Moves parameters and buffers (floating ones to `dtype`). Tensors keep their identity. Do it
  /// before building an optimizer: parameters with a flat gradient cannot move (an error says so).
  ModuleBase& to(Device device);
  ModuleBase& to(Dtype dtype);
  ModuleBase& to(Device device, Dtype dtype);
  void zero_grad();

  // ---- state ------------------------------------------------------------------------------------
  /// Every parameter and buffer by path (handles, not copies).
  std::vector<NamedTensor> state_dict() const;
  /// Copies values in, converting device and dtype; throws, before changing anything, with the list
  /// of missing, unexpected and misshapen names. strict = false skips names that are missing or
  /// unknown.
  void load_state_dict(const std::vector<NamedTensor>& state, bool strict = true);

  /// A table of modules with parameter shapes and counts.
  std::string summary() const;
  /// What summary() calls this module: "Linear(784, 512)".
  virtual std::string describe() const = 0;

  /// Run before and after forward of this module (sharding, profiling, inspection).
  void register_forward_pre_hook(Function<void(ModuleBase&)> hook);
  void register_forward_hook(Function<void(ModuleBase&)> hook);

 protected:
  ModuleBase() = default;
  const std::string& scope_name() const { return scope_name_; }
  void run_pre_hooks();
  void run_post_hooks();

 private:
  void check_new_name(const std::string& name) const;
  template <class F>
  void visit(const std::string& prefix, F&& f) const;
  void move(const Device* device, const Dtype* dtype);

  std::vector<std::pair<std::string, ModuleBase*>> children_;
  std::vector<std::pair<std::string, Tensor*>> parameters_, buffers_;
  std::vector<Function<void(ModuleBase&)>> pre_hooks_, post_hooks_;
  std::string scope_name_;  // the name its parent gave it
  bool training_ = true;
};

std::string demangled_name(const char* mangled);

template <class Derived>
class Module : public ModuleBase {
 public:
  /// Enters this module's scope and calls Derived::forward(args...).
  template <class... Args>
  auto operator()(Args&&... args) {
    const ModuleScope scope(scope_name());
    run_pre_hooks();
    auto result = static_cast<Derived&>(*this).forward(std::forward<Args>(args)...);
    run_post_hooks();
    return result;
  }
  std::string describe() const override { return demangled_name(typeid(Derived).name()); }
};

}  // namespace mixtape::nn
