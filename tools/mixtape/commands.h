// The subcommands of `mixtape`, one file each. A function here adds its options to `app` and
// returns what runs it: called after parsing if the user chose it, it returns the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace mixtape::tools {

using Command = std::function<int()>;

Command add_info(CLI::App& app);
Command add_run(CLI::App& app);

/// What follows "--" on the command line: the program of `run` and its arguments. CLI11 does not
/// see it, because it would take some of it for its own.
std::vector<std::string>& program_after_dashes();

}  // namespace mixtape::tools
