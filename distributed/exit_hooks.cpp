#include "distributed/exit_hooks.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <string>

#include "distributed/process_group.h"
#include "distributed/watchdog.h"

namespace mixtape::distributed {
namespace {

std::atomic<Watchdog*> the_watchdog{nullptr};
std::terminate_handler previous_terminate = nullptr;
bool handles_sigterm = false;
pid_t owner = 0;

std::string current_error() {
  const std::exception_ptr error = std::current_exception();
  if (!error) return "called std::terminate";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return std::string("ended by an exception: ") + e.what();
  } catch (...) {
    return "ended by an exception of unknown type";
  }
}

void announce(const std::string& text) {
  Watchdog* watchdog = the_watchdog.load();
  if (watchdog != nullptr && getpid() == owner) watchdog->announce_failure(text);
}

void on_terminate() {
  announce(current_error());
  if (previous_terminate != nullptr) previous_terminate();
  std::abort();
}

void on_sigterm(int) {
  Watchdog* watchdog = the_watchdog.load();
  if (watchdog != nullptr && getpid() == owner) {
    watchdog->note_terminated();
    return;
  }
  signal(SIGTERM, SIG_DFL);  // in a forked child
  raise(SIGTERM);
}

void at_end(int status, void*) {
  if (!initialized() || (owner != 0 && getpid() != owner)) return;
  if (status != 0) {
    announce("ended with exit code " + std::to_string(status & 0xFF));
    return;  // MPI_Finalize would wait for ranks that end now
  }
  try {
    finalize();
  } catch (const std::exception& e) {
    const std::string line = std::string("mixtape: at exit: ") + e.what() + '\n';
    [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, line.data(), line.size());
    announce(std::string("failed at exit: ") + e.what());
    std::_Exit(EXIT_FAILURE);
  }
}

}  // namespace

void install_exit_hooks(Watchdog* watchdog) {
  owner = getpid();
  the_watchdog = watchdog;
  static const int registered = on_exit(&at_end, nullptr);
  static_cast<void>(registered);
  if (watchdog == nullptr) return;
  previous_terminate = std::set_terminate(&on_terminate);
  struct sigaction current {};
  if (sigaction(SIGTERM, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
    struct sigaction action {};
    action.sa_handler = &on_sigterm;
    action.sa_flags = SA_RESTART;
    handles_sigterm = sigaction(SIGTERM, &action, nullptr) == 0;
  }
}

void remove_exit_hooks() {
  if (the_watchdog.exchange(nullptr) == nullptr) return;
  std::set_terminate(previous_terminate);
  if (handles_sigterm) signal(SIGTERM, SIG_DFL);
  handles_sigterm = false;
}

}  // namespace mixtape::distributed
