// What `mixtape run` starts for an attempt: mpirun, the program itself, or one process for each
// rank.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/mixtape/run/process.h"

namespace mixtape::tools {

enum class RunLauncher : std::uint8_t {
  none,    // the program, once: it may be srun or torchrun
  mpirun,  // mpirun starts the ranks
  local,   // a process for each rank on this host, with torchrun's variables
};

struct LaunchOptions {
  RunLauncher launcher = RunLauncher::none;
  int ranks = 0;  // 0: mpirun's own default; one for local
  std::string mpirun = "mpirun";
  std::vector<std::string> mpirun_args = {};  // before the program
  std::vector<std::string> program = {};      // and its arguments
};

/// The processes of an attempt; `restart` is 0 for the first. Each gets MIXTAPE_RESTART; variables
/// of other launchers, which would tell ranks that they are somebody else, are taken away.
/// `port` is rank 0's of a local launch.
std::vector<ProcessSpec> processes_of(const LaunchOptions& options, int restart, int port);

/// `text` in words, as a shell splits them: at spaces, with '...', "..." and a backslash. Throws
/// where a quote is not closed.
std::vector<std::string> split_words(std::string_view text);

}  // namespace mixtape::tools
