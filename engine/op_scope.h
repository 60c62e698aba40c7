// Which op and module this thread is running: for error messages, the out-of-memory report, anomaly
// mode and the profiler. Costs two thread-local stores a scope.
#pragma once

#include <string>

namespace mixtape {

/// Names the op that runs until the scope ends; `name` must outlive it (a literal).
class OpScope {
 public:
  explicit OpScope(const char* name, bool backward = false)
      : previous_(current_), was_backward_(backward_) {
    current_ = name;
    backward_ = backward;
  }
  ~OpScope() {
    current_ = previous_;
    backward_ = was_backward_;
  }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;
  /// The innermost op's name, or nullptr.
  static const char* current() { return current_; }
  static bool in_backward() { return backward_; }

 private:
  const char* previous_;
  bool was_backward_;
  static thread_local constinit const char* current_;
  static thread_local constinit bool backward_;
};

/// Adds one name to the path of modules that this thread is inside ("net.layers.0").
class ModuleScope {
 public:
  explicit ModuleScope(const std::string& name);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;
  /// Dotted path of the modules entered, outermost first; empty outside of any.
  static const std::string& path();

 private:
  std::size_t previous_length_;
};

}  // namespace mixtape
