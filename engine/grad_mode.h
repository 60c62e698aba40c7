// Scopes that change what ops record. All are per thread and nest.
#pragma once

#include "engine/thread_state.h"

namespace mixtape {

/// Ops inside record nothing.
class NoGrad {
 public:
  NoGrad() : previous_(thread_state.grad) { thread_state.grad = false; }
  ~NoGrad() { thread_state.grad = previous_; }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool previous_;
};

/// Ops inside record again, within a NoGrad scope.
class EnableGrad {
 public:
  EnableGrad() : previous_(thread_state.grad) { thread_state.grad = true; }
  ~EnableGrad() { thread_state.grad = previous_; }
  EnableGrad(const EnableGrad&) = delete;
  EnableGrad& operator=(const EnableGrad&) = delete;

 private:
  bool previous_;
};

/// As NoGrad, and tensors made inside may not be used in recorded ops later (an error says so).
class InferenceMode {
 public:
  InferenceMode() : previous_(thread_state) {
    thread_state.grad = false;
    thread_state.inference = true;
  }
  ~InferenceMode() {
    thread_state.grad = previous_.grad;
    thread_state.inference = previous_.inference;
  }
  InferenceMode(const InferenceMode&) = delete;
  InferenceMode& operator=(const InferenceMode&) = delete;

 private:
  ThreadState previous_;
};

inline bool grad_enabled() { return thread_state.grad; }

}  // namespace mixtape
