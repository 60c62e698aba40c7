#include "tools/mixtape/run/job.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::tools {
namespace {

constexpr double kPoll = 0.02;    // seconds between looks at processes that are not our children
constexpr double kIdle = 3600;    // seconds that a wait may last when there is no deadline
constexpr double kStubborn = 10;  // seconds after SIGKILL when it is time to say what is waited for

}  // namespace

void adopt_orphans() {
  MT_CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, "run: prctl: ", io::errno_text(errno));
}

JobResult Job::run(std::span<const ProcessSpec> specs) {
  try {
    start(specs);
  } catch (...) {
    stop(SIGKILL);
    end_leftovers();
    throw;
  }
  while (!members_.empty()) {
    const bool kill = kill_at_ > 0 && now() >= kill_at_;
    if (kill) stop(SIGKILL);
    wait_for_event(kill || kill_at_ == 0 ? kIdle : kill_at_ - now());
    take_signals();
    reap();
    pump();
  }
  end_leftovers();
  for (RankOutput& output : outputs_)
    while (output.pump()) continue;
  return result_;
}

void Job::start(std::span<const ProcessSpec> specs) {
  for (const ProcessSpec& spec : specs) {
    StartOptions options{.mask = signals_.mask()};
    if (spec.rank >= 0) {
      outputs_.emplace_back(spec.rank, STDOUT_FILENO);
      options.out = outputs_.back().writer();
      outputs_.emplace_back(spec.rank, STDERR_FILENO);
      options.err = outputs_.back().writer();
      options.death_signal = SIGKILL;  // a launcher has ranks to end first, a rank has not
    }
    members_.push_back({start_process(spec, options), spec.rank});
    for (RankOutput& output : outputs_) output.close_writer();
  }
}

void Job::wait_for_event(double seconds) {
  std::vector<pollfd> pollers{{.fd = signals_.descriptor(), .events = POLLIN, .revents = 0}};
  for (const RankOutput& output : outputs_)  // poll() passes over -1
    pollers.push_back({.fd = output.reader(), .events = POLLIN, .revents = 0});
  poll(pollers.data(), pollers.size(), static_cast<int>(std::ceil(std::max(seconds, 0.0) * 1000)));
}

void Job::take_signals() {
  while (const auto signal = signals_.take()) {
    if (*signal == SIGCHLD) continue;
    const bool again = result_.stop_signal != 0;
    if (!again) result_.stop_signal = *signal;
    stop(again ? SIGKILL : *signal);
  }
}

void Job::reap() {
  Ending first{};  // of those that ended since the last call
  int status = 0;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    const auto member = std::find_if(members_.begin(), members_.end(),
                                     [&](const Member& m) { return m.pid == pid; });
    if (member == members_.end()) continue;  // adopted
    const Ending ending = ending_of(status, member->rank);
    members_.erase(member);
    // A killed rank is why others, which noticed, end in the same moment.
    if (!ending.good() && (first.good() || (first.signal == 0 && ending.signal != 0)))
      first = ending;
  }
  if (first.good() || !result_.ending.good()) return;
  result_.ending = first;
  if (result_.stop_signal == 0) stop(SIGTERM);
}

/// Sends the signal to those that run; from the first one on, the time to SIGKILL runs.
void Job::stop(int signal) {
  for (const Member& member : members_) kill(-member.pid, signal);
  if (kill_at_ == 0) kill_at_ = now() + grace_;
}

void Job::end_leftovers() {
  double asked = 0, killed = 0;
  bool said = false;
  for (;;) {
    take_signals();
    reap();
    pump();
    const std::vector<pid_t> left = descendants(getpid());
    if (left.empty()) return;
    const double time = now();
    if (asked == 0) {
      for (const pid_t pid : left) kill(pid, SIGTERM);
      asked = time;
    } else if (time - asked >= grace_ || (result_.stop_signal != 0 && time >= kill_at_)) {
      for (const pid_t pid : left) kill(pid, SIGKILL);
      if (killed == 0) killed = time;
    }
    if (killed > 0 && time - killed > kStubborn && !said) {
      std::fprintf(stderr, "mixtape run: waiting for process %d, which SIGKILL has not ended yet\n",
                   static_cast<int>(left.front()));
      said = true;
    }
    wait_for_event(kPoll);
  }
}

void Job::pump() {
  for (RankOutput& output : outputs_) (void)output.pump();
}

}  // namespace mixtape::tools
