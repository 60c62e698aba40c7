// `mixtape run`: starts a program on several ranks and, when it fails, starts it again, so that it
// can go on from its last checkpoint. docs/recovery.md is for users.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "distributed/socket.h"
#include "engine/check.h"
#include "io/checkpoint.h"
#include "tools/mixtape/commands.h"
#include "tools/mixtape/run/job.h"
#include "tools/mixtape/run/launchers.h"
#include "tools/mixtape/run/restart_policy.h"

namespace mixtape::tools {
namespace {

struct RunOptions {
  LaunchOptions launch = {};
  RestartOptions restarts = {};
  double grace = 30;
  std::string checkpoints = {};
};

/// Tells the newest checkpoint from any before it, also from one of the same step.
using Mark = std::pair<std::filesystem::path, std::filesystem::file_time_type>;
std::optional<Mark> newest(const std::string& folder) {
  const auto path = io::latest_checkpoint(folder);
  std::error_code error;
  if (!path) return std::nullopt;
  return Mark{*path, std::filesystem::last_write_time(*path, error)};
}

/// A port that nobody listens on.
int free_port() {
  int port = 0;
  distributed::listen_on(port);
  return port;
}

void say(const std::string& text) { std::fprintf(stderr, "mixtape run: %s\n", text.c_str()); }

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

/// Looks up what will be started, before anything is. 0, or the exit code after a message.
int check_programs(const LaunchOptions& o) {
  std::vector<std::string> names{o.program[0]};
  if (o.launcher == RunLauncher::mpirun) names.push_back(o.mpirun);
  for (const std::string& name : names)
    if (const ProgramFile file = find_program(name); file.exit_code != 0) {
      say(file.reason);
      return file.exit_code;
    }
  return 0;
}

/// One attempt, added to the list.
JobResult attempt(const RunOptions& o, Signals& signals, std::vector<Attempt>& attempts) {
  const bool watched = !o.checkpoints.empty();
  const auto before = watched ? newest(o.checkpoints) : std::nullopt;
  const int port = o.launch.launcher == RunLauncher::local ? free_port() : 0;
  Attempt made{.started = now()};
  const JobResult result =
      Job(signals, o.grace).run(processes_of(o.launch, static_cast<int>(attempts.size()), port));
  made.ended = now();
  made.exit_code = result.ending.code;
  if (watched) {
    const auto after = newest(o.checkpoints);
    made.saved = after.has_value() && after != before;
  }
  attempts.push_back(made);
  return result;
}

int run(const RunOptions& o) {
  if (const int code = check_programs(o.launch); code != 0) return code;
  adopt_orphans();
  Signals signals;
  std::vector<Attempt> attempts;
  for (;;) {
    const JobResult result = attempt(o, signals, attempts);
    const auto stopped = [](int signal) {
      say(detail::concat("ended by signal ", signal));
      return 128 + signal;
    };
    if (result.stop_signal != 0) return stopped(result.stop_signal);
    if (result.ending.good()) return 0;
    const Attempt& last = attempts.back();
    const std::string how =
        detail::concat("attempt ", attempts.size(), " ended after ",
                       seconds(last.ended - last.started), ": ", describe(result.ending), "; ");
    const Decision next = after_failure(o.restarts, attempts);
    if (!next.restart) {
      say(how + "no restart: " + next.reason);
      return result.ending.code;
    }
    say(how + "restarts in " + seconds(next.wait));
    if (const auto signal = signals.wait_for_stop(next.wait)) return stopped(*signal);
  }
}

void add_restart_options(CLI::App& app, RestartOptions& o) {
  const auto number = [&]<class T>(const char* name, T& value, const char* what) {
    app.add_option(name, value, what)
        ->check(CLI::Range(T(0), T(1'000'000'000)))
        ->capture_default_str();
  };
  number("--max-restarts", o.max_restarts, "restarts after failures");
  number("--restart-window", o.restart_window,
         "seconds: restarts longer ago do not count; 0: all count");
  number("--backoff", o.backoff,
         "seconds before a restart, doubled by each failure without progress");
  number("--max-backoff", o.max_backoff, "seconds at most");
  number("--give-up", o.give_up,
         "failures in a row without progress that end the run; 0: no limit");
  number("--min-uptime", o.min_uptime, "seconds that count as progress without --checkpoints");
}

/// Options as they are written.
struct Texts {
  std::string launcher = {}, mpirun_args = {};
};

/// Takes them over, and checks what no single option can.
void complete(const CLI::App& app, RunOptions& o, const Texts& texts) {
  o.launch.program = program_after_dashes();
  if (o.launch.program.empty())
    throw CLI::RequiredError("run: -- PROGRAM ARGUMENTS, after the options,");
  o.launch.launcher = texts.launcher == "local" ? RunLauncher::local
                      : texts.launcher == "mpirun" || (texts.launcher.empty() && o.launch.ranks > 0)
                          ? RunLauncher::mpirun
                          : RunLauncher::none;
  if (o.launch.launcher == RunLauncher::none && o.launch.ranks > 1)
    throw CLI::ValidationError(
        "-n", "--launcher none starts one process, got a -n of " + std::to_string(o.launch.ranks));
  for (const char* name : {"--mpirun", "--mpirun-args"})
    if (o.launch.launcher != RunLauncher::mpirun && app.count(name) > 0)
      throw CLI::ValidationError(name, "is an option of --launcher mpirun");
  try {
    o.launch.mpirun_args = split_words(texts.mpirun_args);
  } catch (const Error& e) {
    throw CLI::ValidationError("--mpirun-args", e.what());
  }
}

}  // namespace

std::vector<std::string>& program_after_dashes() {
  static std::vector<std::string> program;
  return program;
}

Command add_run(CLI::App& app) {
  const auto options = std::make_shared<RunOptions>();
  const auto texts = std::make_shared<Texts>();
  RunOptions& o = *options;
  app.footer(
      "What follows -- is the program and its arguments:\n"
      "  mixtape run -n 4 --max-restarts 20 -- ./train --dp --resume --out run");
  app.add_option("-n,--ranks", o.launch.ranks, "processes; default: what mpirun takes, else one")
      ->check(CLI::Range(1, 1000000));
  app.add_option("--launcher", texts->launcher,
                 "mpirun: ranks with MPI (default with -n); local: ranks on this host with RANK, "
                 "WORLD_SIZE and so on, for GPUs; none: PROGRAM alone, which may be srun")
      ->check(CLI::IsMember({"none", "mpirun", "local"}));
  app.add_option("--mpirun", o.launch.mpirun, "the command that starts ranks")
      ->capture_default_str();
  app.add_option("--mpirun-args", texts->mpirun_args, "further arguments for it, in one text");
  add_restart_options(app, o.restarts);
  app.add_option("--checkpoints", o.checkpoints,
                 "folder of the program's checkpoints: a new one is progress");
  app.add_option("--grace", o.grace, "seconds from SIGTERM to SIGKILL")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  app.callback([&app, options, texts] { complete(app, *options, *texts); });
  return [options] {
    try {
      return run(*options);
    } catch (const CannotStart& e) {
      say(e.what());
      return 126;
    }
  };
}

}  // namespace mixtape::tools
