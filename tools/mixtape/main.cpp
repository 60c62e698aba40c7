// The `mixtape` command line. Bad options end with one line and exit code 2, failures with one line
// and exit code 1.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/build_info.h"
#include "tools/mixtape/commands.h"

namespace {

using mixtape::tools::Command;

struct Entry {
  const char *name, *summary;
  Command (*add)(CLI::App&);
};

constexpr Entry kEntries[] = {
    {"info", "what this build can do and what this machine has", mixtape::tools::add_info},
    {"run", "starts a program on several ranks, and again when it fails", mixtape::tools::add_run},
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Mixtape's command line"};
  app.name("mixtape");
  app.set_version_flag("--version", mixtape::build_summary());
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  std::vector<std::pair<CLI::App*, Command>> commands;
  for (const Entry& entry : kEntries) {
    CLI::App* sub = app.add_subcommand(entry.name, entry.summary);
    commands.emplace_back(sub, entry.add(*sub));
  }
  char** const dashes = std::find_if(
      argv, argv + argc, [](const char* argument) { return std::string_view(argument) == "--"; });
  if (dashes != argv + argc) mixtape::tools::program_after_dashes().assign(dashes + 1, argv + argc);
  try {
    app.parse(static_cast<int>(dashes - argv), argv);
    if (dashes != argv + argc && !app.got_subcommand("run"))
      throw CLI::ExtrasError(app.get_subcommands().front()->get_name(), {"--"});
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "mixtape: %s\n", e.what());
    return 2;
  }
  try {
    for (const auto& [sub, run] : commands)
      if (sub->parsed()) return run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mixtape: %s\n", e.what());
    return 1;
  }
  return 0;
}
