#include "tools/mixtape/run/launchers.h"

#include <algorithm>

#include "engine/check.h"

namespace mixtape::tools {
namespace {

constexpr const char* kTorchrun[] = {"RANK",
                                     "WORLD_SIZE",
                                     "LOCAL_RANK",
                                     "LOCAL_WORLD_SIZE",
                                     "MASTER_ADDR",
                                     "MASTER_PORT",
                                     "TORCHELASTIC_USE_AGENT_STORE"};
constexpr const char* kMpi[] = {"OMPI_COMM_WORLD_RANK",
                                "OMPI_COMM_WORLD_SIZE",
                                "OMPI_COMM_WORLD_LOCAL_RANK",
                                "OMPI_COMM_WORLD_LOCAL_SIZE",
                                "PMIX_RANK",
                                "PMI_RANK",
                                "PMI_SIZE",
                                "PMI_FD",
                                "MPI_LOCALRANKID",
                                "MPI_LOCALNRANKS"};

template <std::size_t N>
void unset(ProcessSpec& spec, const char* const (&names)[N]) {
  for (const char* name : names) spec.environment.emplace_back(name, std::nullopt);
}

ProcessSpec mpirun_process(const LaunchOptions& o) {
  ProcessSpec spec;
  spec.command = {o.mpirun};
  if (o.ranks > 0) spec.command.insert(spec.command.end(), {"-n", std::to_string(o.ranks)});
  spec.command.insert(spec.command.end(), o.mpirun_args.begin(), o.mpirun_args.end());
  spec.command.insert(spec.command.end(), o.program.begin(), o.program.end());
  unset(spec, kTorchrun);
  return spec;
}

ProcessSpec local_process(const LaunchOptions& o, int rank, int ranks, int port) {
  ProcessSpec spec{.command = o.program, .rank = rank};
  unset(spec, kMpi);
  unset(spec, kTorchrun);
  const std::string own = std::to_string(rank), all = std::to_string(ranks);
  spec.environment.insert(spec.environment.end(), {{"RANK", own},
                                                   {"WORLD_SIZE", all},
                                                   {"LOCAL_RANK", own},
                                                   {"LOCAL_WORLD_SIZE", all},
                                                   {"MASTER_ADDR", "127.0.0.1"},
                                                   {"MASTER_PORT", std::to_string(port)}});
  return spec;
}

}  // namespace

std::vector<ProcessSpec> processes_of(const LaunchOptions& o, int restart, int port) {
  std::vector<ProcessSpec> specs;
  switch (o.launcher) {
    case RunLauncher::none: specs.push_back({.command = o.program}); break;
    case RunLauncher::mpirun: specs.push_back(mpirun_process(o)); break;
    case RunLauncher::local:
      for (int rank = 0, ranks = std::max(o.ranks, 1); rank < ranks; ++rank)
        specs.push_back(local_process(o, rank, ranks, port));
      break;
  }
  for (ProcessSpec& spec : specs)
    spec.environment.emplace_back("MIXTAPE_RESTART", std::to_string(restart));
  return specs;
}

std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> words;
  bool inside = false;  // a word, which may be empty: ''
  char quote = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote == 0 && (c == ' ' || c == '\t' || c == '\n')) {
      inside = false;
      continue;
    }
    if (!inside) words.emplace_back();
    inside = true;
    if (quote == 0 && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == quote) {
      quote = 0;
    } else if (c == '\\' && quote != '\'' && i + 1 < text.size()) {
      words.back() += text[++i];
    } else {
      words.back() += c;
    }
  }
  MT_CHECK(quote == 0, "expected a closing ", quote, " in ", text);
  return words;
}

}  // namespace mixtape::tools
