#include "engine/op_scope.h"

#include "engine/profile_hooks.h"
#include "engine/thread_state.h"

namespace mixtape {

thread_local constinit const char* OpScope::current_ = nullptr;
thread_local constinit bool OpScope::backward_ = false;
thread_local constinit ThreadState thread_state;

namespace {
thread_local std::string module_path;
}

ModuleScope::ModuleScope(const std::string& name) : previous_length_(module_path.size()) {
  if (!module_path.empty()) module_path += '.';
  module_path += name;
  if (profile::mode() == 0) [[likely]]
    return;
  try {
    profile::open(this, ProfileKind::module, nullptr, name.empty() ? "(model)" : name);
  } catch (...) {
    module_path.resize(previous_length_);
    throw;
  }
}

ModuleScope::~ModuleScope() {
  if (profile::any_open()) [[unlikely]]
    profile::close(this);
  module_path.resize(previous_length_);
}

const std::string& ModuleScope::path() { return module_path; }

}  // namespace mixtape
