#include "tools/mixtape/run/signals.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::tools {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Signals::Signals() {
  sigset_t taken;
  sigemptyset(&taken);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&taken, number);
  }
  signal(SIGCHLD, SIG_DFL);  // ignored, children would leave no status
  sigaddset(&taken, SIGCHLD);
  MT_CHECK(sigprocmask(SIG_BLOCK, &taken, &before_) == 0,
           "run: sigprocmask: ", io::errno_text(errno));
  descriptor_ = signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK);
  MT_CHECK(descriptor_ >= 0, "run: signalfd: ", io::errno_text(errno));
}

Signals::~Signals() {
  close(descriptor_);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> Signals::take() {
  signalfd_siginfo info{};
  if (read(descriptor_, &info, sizeof info) != static_cast<ssize_t>(sizeof info))
    return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

std::optional<int> Signals::wait_for_stop(double seconds) {
  const double deadline = now() + seconds;
  for (;;) {
    while (const auto signal = take())
      if (*signal != SIGCHLD) return signal;
    const double left = deadline - now();
    if (left <= 0) return std::nullopt;
    pollfd poller{.fd = descriptor_, .events = POLLIN, .revents = 0};
    poll(&poller, 1, static_cast<int>(std::ceil(std::min(left, 3600.0) * 1000)));
  }
}

}  // namespace mixtape::tools
