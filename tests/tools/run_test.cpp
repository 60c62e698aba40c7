// What `mixtape run` decides: when to start again, and what.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/check.h"
#include "tools/mixtape/run/launchers.h"
#include "tools/mixtape/run/restart_policy.h"

namespace mixtape::tools {
namespace {

/// Attempts that follow each other without a pause, each that many seconds long.
std::vector<Attempt> failures(std::initializer_list<double> lengths, int exit_code = 1) {
  std::vector<Attempt> attempts;
  double time = 1000;
  for (const double length : lengths) {
    attempts.push_back({.started = time, .ended = time + length, .exit_code = exit_code});
    time += length;
  }
  return attempts;
}

TEST(RestartPolicy, RestartsUntilTheyAreUsedUp) {
  const RestartOptions o{.max_restarts = 2, .min_uptime = 10};
  EXPECT_TRUE(after_failure(o, failures({20})).restart);
  EXPECT_TRUE(after_failure(o, failures({20, 20})).restart);
  const Decision last = after_failure(o, failures({20, 20, 20}));
  EXPECT_FALSE(last.restart);
  EXPECT_NE(last.reason.find("--max-restarts 2"), std::string::npos) << last.reason;
  EXPECT_FALSE(after_failure({.max_restarts = 0}, failures({20})).restart);
}

TEST(RestartPolicy, NoneAfterAUsageError) {
  EXPECT_FALSE(after_failure({}, failures({20}, 2)).restart);
  EXPECT_TRUE(after_failure({}, failures({20}, 3)).restart);
  EXPECT_TRUE(after_failure({}, failures({20}, 128 + 2)).restart);  // SIGINT from elsewhere
}

TEST(RestartPolicy, OldRestartsDoNotCountInAWindow) {
  const RestartOptions o{.max_restarts = 1, .restart_window = 100, .min_uptime = 10};
  EXPECT_TRUE(after_failure(o, failures({20})).restart);
  EXPECT_FALSE(after_failure(o, failures({20, 20})).restart);  // one restart, 20 s ago
  EXPECT_TRUE(after_failure(o, failures({20, 101})).restart);
  EXPECT_TRUE(after_failure(o, failures({20, 20, 101})).restart);
  EXPECT_FALSE(after_failure(o, failures({20, 101, 20})).restart);
}

TEST(RestartPolicy, WaitsTwiceAsLongAfterEachFailureWithoutProgress) {
  const RestartOptions o{
      .max_restarts = 100, .backoff = 3, .max_backoff = 20, .give_up = 0, .min_uptime = 10};
  EXPECT_EQ(after_failure(o, failures({1})).wait, 3);
  EXPECT_EQ(after_failure(o, failures({1, 1})).wait, 6);
  EXPECT_EQ(after_failure(o, failures({1, 1, 1})).wait, 12);
  EXPECT_EQ(after_failure(o, failures({1, 1, 1, 1})).wait, 20);
  EXPECT_EQ(after_failure(o, failures({1, 1, 1, 10})).wait, 3);     // it got somewhere
  EXPECT_EQ(after_failure(o, failures({1, 1, 10, 1, 1})).wait, 6);  // counted from there
  const std::vector<Attempt> many(90, Attempt{.exit_code = 1});
  EXPECT_EQ(after_failure(o, many).wait, 20);
}

TEST(RestartPolicy, GivesUpWithoutProgress) {
  const RestartOptions o{.max_restarts = 100, .give_up = 3, .min_uptime = 10};
  EXPECT_TRUE(after_failure(o, failures({1, 1})).restart);
  const Decision end = after_failure(o, failures({50, 1, 1, 1}));
  EXPECT_FALSE(end.restart);
  EXPECT_NE(end.reason.find("3 failures in a row within 10 s"), std::string::npos) << end.reason;
  EXPECT_TRUE(after_failure(o, failures({1, 1, 50, 1, 1})).restart);
}

TEST(RestartPolicy, CheckpointsAreTheProgressWhereTheyAreWatched) {
  const RestartOptions o{.max_restarts = 100, .backoff = 1, .give_up = 2, .min_uptime = 10};
  std::vector<Attempt> attempts = failures({1, 1, 1, 1});
  for (Attempt& a : attempts) a.saved = true;
  EXPECT_TRUE(after_failure(o, attempts).restart);
  EXPECT_EQ(after_failure(o, attempts).wait, 1);
  attempts = failures({500, 500});  // long, and nothing to show for it
  for (Attempt& a : attempts) a.saved = false;
  const Decision end = after_failure(o, attempts);
  EXPECT_FALSE(end.restart);
  EXPECT_NE(end.reason.find("without a new checkpoint"), std::string::npos) << end.reason;
}

/// The last change of a variable: "NAME=value", "-NAME" where it is taken away, "" without one.
std::string change(const ProcessSpec& spec, const std::string& name) {
  std::string found;
  for (const auto& [variable, value] : spec.environment)
    if (variable == name) found = value ? name + "=" + *value : "-" + name;
  return found;
}

TEST(Launchers, MpirunStartsTheRanks) {
  const auto specs = processes_of({.launcher = RunLauncher::mpirun,
                                   .ranks = 4,
                                   .mpirun = "mpiexec",
                                   .mpirun_args = {"--bind-to", "none"},
                                   .program = {"train", "-n", "3"}},
                                  2, 0);
  ASSERT_EQ(specs.size(), 1u);
  EXPECT_EQ(specs[0].command, (std::vector<std::string>{"mpiexec", "-n", "4", "--bind-to", "none",
                                                        "train", "-n", "3"}));
  EXPECT_EQ(change(specs[0], "RANK"), "-RANK");
  EXPECT_EQ(change(specs[0], "MASTER_PORT"), "-MASTER_PORT");
  EXPECT_EQ(change(specs[0], "MIXTAPE_RESTART"), "MIXTAPE_RESTART=2");
}

TEST(Launchers, LocalStartsAProcessForEachRank) {
  const auto specs =
      processes_of({.launcher = RunLauncher::local, .ranks = 3, .program = {"train"}}, 0, 4711);
  ASSERT_EQ(specs.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    const ProcessSpec& spec = specs[static_cast<std::size_t>(rank)];
    EXPECT_EQ(spec.rank, rank);
    EXPECT_EQ(spec.command, std::vector<std::string>{"train"});
    EXPECT_EQ(change(spec, "RANK"), "RANK=" + std::to_string(rank));
    EXPECT_EQ(change(spec, "LOCAL_RANK"), "LOCAL_RANK=" + std::to_string(rank));
    EXPECT_EQ(change(spec, "WORLD_SIZE"), "WORLD_SIZE=3");
    EXPECT_EQ(change(spec, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE=3");
    EXPECT_EQ(change(spec, "MASTER_PORT"), "MASTER_PORT=4711");
    EXPECT_EQ(change(spec, "MIXTAPE_RESTART"), "MIXTAPE_RESTART=0");
    EXPECT_EQ(change(spec, "OMPI_COMM_WORLD_RANK"), "-OMPI_COMM_WORLD_RANK");
    EXPECT_EQ(change(spec, "TORCHELASTIC_USE_AGENT_STORE"), "-TORCHELASTIC_USE_AGENT_STORE");
  }
}

TEST(Launchers, NoneStartsTheProgramAsItIs) {
  const auto specs = processes_of({.program = {"srun", "-N", "2", "train"}}, 1, 0);
  ASSERT_EQ(specs.size(), 1u);
  EXPECT_EQ(specs[0].command, (std::vector<std::string>{"srun", "-N", "2", "train"}));
  EXPECT_EQ(change(specs[0], "RANK"), "");
}

TEST(Launchers, WordsAreSplitAsAShellDoes) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(split_words(""), Words{});
  EXPECT_EQ(split_words("  a  b\tc\n"), (Words{"a", "b", "c"}));
  EXPECT_EQ(split_words("-x 'A B' \"c 'd'\" e\\ f"), (Words{"-x", "A B", "c 'd'", "e f"}));
  EXPECT_EQ(split_words("a'b'\"c\" ''"), (Words{"abc", ""}));
  EXPECT_EQ(split_words(R"('a\b' "a\"b")"), (Words{"a\\b", "a\"b"}));
  EXPECT_THROW(split_words("a 'b"), Error);
}

TEST(Processes, EndingsReadWell) {
  EXPECT_EQ(describe({.code = 3}), "exit code 3");
  EXPECT_EQ(describe({.code = 137}), "exit code 137, signal 9 (Killed)");
  EXPECT_EQ(describe({.code = 137, .signal = 9, .rank = 1}), "rank 1: signal 9 (Killed)");
  EXPECT_EQ(describe({.code = 255}), "exit code 255");
}

TEST(Processes, ProgramsAreFoundAsAShellFindsThem) {
  EXPECT_EQ(find_program("sh").exit_code, 0);
  EXPECT_EQ(find_program("no-such-program").exit_code, 127);
  EXPECT_EQ(find_program("").exit_code, 127);
  EXPECT_EQ(find_program("/no/such/program").exit_code, 127);
  EXPECT_EQ(find_program("/etc/passwd").exit_code, 126);
  EXPECT_EQ(find_program("/etc").exit_code, 126);
}

}  // namespace
}  // namespace mixtape::tools
