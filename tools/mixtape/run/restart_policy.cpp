#include "tools/mixtape/run/restart_policy.h"

#include <algorithm>
#include <cmath>

#include "engine/check.h"

namespace mixtape::tools {
namespace {

bool made_progress(const RestartOptions& o, const Attempt& a) {
  return a.saved.value_or(a.ended - a.started >= o.min_uptime);
}

/// Failures at the end of the list, in a row, without progress.
int fruitless(const RestartOptions& o, std::span<const Attempt> attempts) {
  int count = 0;
  for (auto a = attempts.rbegin(); a != attempts.rend() && !made_progress(o, *a); ++a) ++count;
  return count;
}

/// Restarts so far that count. Every attempt but the first is one.
int restarts(const RestartOptions& o, std::span<const Attempt> attempts) {
  const double now = attempts.back().ended;
  const auto counts = [&](const Attempt& a) {
    return o.restart_window <= 0 || now - a.started <= o.restart_window;
  };
  return static_cast<int>(std::count_if(attempts.begin() + 1, attempts.end(), counts));
}

}  // namespace

Decision after_failure(const RestartOptions& o, std::span<const Attempt> attempts) {
  MT_CHECK(!attempts.empty(), "after_failure: expected at least one attempt, got none");
  if (attempts.back().exit_code == kUsageError)
    return {.reason = "exit code 2 says that its options are wrong"};
  if (o.max_restarts == 0) return {.reason = "--max-restarts is 0"};
  if (restarts(o, attempts) >= o.max_restarts) {
    const std::string within =
        o.restart_window > 0 ? detail::concat(" within ", o.restart_window, " s") : "";
    return {.reason = detail::concat("--max-restarts ", o.max_restarts, " are used up", within)};
  }
  const int failures = fruitless(o, attempts);
  if (o.give_up > 0 && failures >= o.give_up) {
    const std::string lacked = attempts.back().saved
                                   ? std::string("without a new checkpoint")
                                   : detail::concat("within ", o.min_uptime, " s of their start");
    return {.reason = detail::concat(failures, " failures in a row ", lacked, " (--give-up)")};
  }
  const double wait = o.backoff * std::exp2(std::max(0, failures - 1));
  return {.restart = true, .wait = std::min(wait, o.max_backoff)};
}

}  // namespace mixtape::tools
