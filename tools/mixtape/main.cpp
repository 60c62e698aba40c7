// The `mixtape` command line. Bad options end with one line and exit code 2, failures with one line
// and exit code 1.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
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
  try {
    app.parse(argc, argv);
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
