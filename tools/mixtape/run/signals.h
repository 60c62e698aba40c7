// Signals as things to wait for, and the clock that goes with it.
#pragma once

#include <csignal>
#include <optional>

namespace mixtape::tools {

/// Seconds of a clock that only goes forward.
double now();

/// Takes SIGCHLD, SIGINT, SIGTERM and SIGHUP instead of their usual effect for as long as it lives.
/// What is ignored at its start, as SIGHUP is under nohup, stays ignored.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  /// The next signal that has come; none if there is none.
  std::optional<int> take();
  /// The next signal that asks for an end, within that many seconds.
  std::optional<int> wait_for_stop(double seconds);
  /// Readable when a signal has come.
  int descriptor() const { return descriptor_; }
  /// What was blocked before: what programs start with.
  const sigset_t& mask() const { return before_; }

 private:
  sigset_t before_{};
  int descriptor_ = -1;
};

}  // namespace mixtape::tools
