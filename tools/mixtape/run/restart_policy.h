// Whether a run that failed is started again, and when: a function of how its attempts ended.
#pragma once

#include <optional>
#include <span>
#include <string>

namespace mixtape::tools {

struct RestartOptions {
  int max_restarts = 3;
  double restart_window = 0;  // seconds: restarts longer ago do not count; 0: all count
  double backoff = 1;         // seconds before a restart, doubled by each failure without progress
  double max_backoff = 60;    // seconds
  int give_up = 5;            // failures in a row without progress that end the run; 0: no limit
  double min_uptime = 10;     // seconds that count as progress where no checkpoints are watched
};

/// One attempt that is over. Times are seconds of one clock.
struct Attempt {
  double started = 0, ended = 0;
  int exit_code = 0;            // 128 + n for signal n
  std::optional<bool> saved{};  // it left a new checkpoint; none: nobody watched
};

struct Decision {
  bool restart = false;
  double wait = 0;          // seconds
  std::string reason = {};  // why not, for people
};

/// The program's exit code for options that it does not take: starting it again would not help.
inline constexpr int kUsageError = 2;

/// What follows the last of `attempts`, all of which failed, the oldest first.
Decision after_failure(const RestartOptions& options, std::span<const Attempt> attempts);

}  // namespace mixtape::tools
