// One attempt of a run: its processes from their start until none of them, nor of those that they
// started, is left.
#pragma once

#include <sys/types.h>

#include <span>
#include <string>
#include <vector>

#include "tools/mixtape/run/process.h"
#include "tools/mixtape/run/rank_output.h"
#include "tools/mixtape/run/signals.h"

namespace mixtape::tools {

struct JobResult {
  Ending ending = {};   // the first process that ended badly, else a good one
  int stop_signal = 0;  // that this process got, and passed on
};

class Job {
 public:
  /// `grace`: seconds from SIGTERM to SIGKILL.
  Job(Signals& signals, double grace) : signals_(signals), grace_(grace) {}

  /// Starts all of `specs` and waits. When one ends badly the others get SIGTERM and, after the
  /// grace time, SIGKILL; so does what is left of their children at the end. SIGINT, SIGTERM and
  /// SIGHUP are passed on; a second one is SIGKILL. Throws, with none left, if one cannot start.
  JobResult run(std::span<const ProcessSpec> specs);

 private:
  struct Member {
    pid_t pid;
    int rank;
  };
  void start(std::span<const ProcessSpec> specs);
  void wait_for_event(double seconds);
  void take_signals();
  void reap();
  void stop(int signal);
  void end_leftovers();
  void pump();

  Signals& signals_;
  const double grace_;
  std::vector<Member> members_ = {};  // those that still run
  std::vector<RankOutput> outputs_ = {};
  JobResult result_ = {};
  double kill_at_ = 0;  // when SIGKILL follows SIGTERM; 0: nothing was asked to end
};

/// Processes whose parent has died become children of this one, so that a job finds all its own.
void adopt_orphans();

}  // namespace mixtape::tools
