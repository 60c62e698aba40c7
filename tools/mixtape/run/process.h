// Starting a program in a process group of its own, and how processes end.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/check.h"

namespace mixtape::tools {

struct ProcessSpec {
  std::vector<std::string> command = {};  // the program, by path or by its name in PATH
  /// Variables to set or, without a value, to unset.
  std::vector<std::pair<std::string, std::optional<std::string>>> environment = {};
  int rank = -1;  // of a local launch
};

/// The file that a shell would run for `name`, or why there is none.
struct ProgramFile {
  std::string path = {};
  int exit_code = 0;        // 127: not found, 126: cannot be run, as shells have it
  std::string reason = {};  // for people
};
ProgramFile find_program(const std::string& name);

struct StartOptions {
  int death_signal = SIGTERM;  // what the process gets when this one dies
  int out = 1, err = 2;        // its stdout and stderr
  sigset_t mask = {};          // signals that it starts with blocked
};

/// The system cannot run a program: not an executable after all, no memory, too many processes.
class CannotStart : public Error {
 public:
  using Error::Error;
};

/// Starts a process in a new group, with /dev/null as its input; returns once it runs the program.
/// Throws CannotStart with the system's text.
pid_t start_process(const ProcessSpec& spec, const StartOptions& options);

/// How a process ended.
struct Ending {
  int code = 0;    // exit code; 128 + n for signal n
  int signal = 0;  // that ended it
  int rank = -1;   // of a local launch
  bool good() const { return code == 0; }
};
/// From waitpid's status.
Ending ending_of(int status, int rank);
/// "rank 1: signal 9 (Killed)", "exit code 3".
std::string describe(const Ending& ending);

/// Processes below `root`, however deep, that are not zombies.
std::vector<pid_t> descendants(pid_t root);

}  // namespace mixtape::tools
