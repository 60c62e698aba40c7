// The subcommands of `mixtape`, one file each. A function here adds its options to `app` and
// returns what runs it: called after parsing if the user chose it, it returns the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace mixtape::tools {

using Command = std::function<int()>;

Command add_info(CLI::App& app);

}  // namespace mixtape::tools
