// Launch variables of each launcher, and what happens when they are wrong.
#include "distributed/launch.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/support/expect_error.h"

namespace mixtape::distributed {
namespace {

using testing::expect_error;
using Variables = std::map<std::string, std::string>;

Launch launch_of(const Variables& variables) {
  return detect_launch([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

void expect_place(const Launch& launch, Launcher launcher, int rank, int size, int local_rank,
                  int local_size) {
  EXPECT_EQ(launch.launcher, launcher);
  EXPECT_EQ(launch.rank, rank);
  EXPECT_EQ(launch.world_size, size);
  EXPECT_EQ(launch.local_rank, local_rank);
  EXPECT_EQ(launch.local_size, local_size);
  EXPECT_FALSE(launch.host.empty());
}

const Variables kTorchrun{{"RANK", "5"},           {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "gpu0"}, {"MASTER_PORT", "29500"}};

Variables with(Variables variables, const char* name, const char* value) {
  variables[name] = value;
  return variables;
}
Variables without(Variables variables, const char* name) {
  variables.erase(name);
  return variables;
}

TEST(Launch, ByHandIsOneRank) { expect_place(launch_of({}), Launcher::none, 0, 1, 0, 1); }

TEST(Launch, OpenMpi) {
  const Launch launch = launch_of({{"OMPI_COMM_WORLD_RANK", "3"},
                                   {"OMPI_COMM_WORLD_SIZE", "4"},
                                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  expect_place(launch, Launcher::open_mpi, 3, 4, 1, 2);
  EXPECT_TRUE(launch.has_mpi);
}

TEST(Launch, HydraAlsoWhereSrunStartedIt) {
  Variables variables{
      {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
  expect_place(launch_of(variables), Launcher::mpich, 3, 4, 1, 2);
  variables["SLURM_PROCID"] = "0";
  variables["SLURM_STEP_NUM_TASKS"] = "2";
  expect_place(launch_of(variables), Launcher::mpich, 3, 4, 1, 2);
}

TEST(Launch, Srun) {
  Variables variables{{"SLURM_PROCID", "6"},
                      {"SLURM_STEP_NUM_TASKS", "7"},
                      {"SLURM_LOCALID", "0"},
                      {"SLURM_NODEID", "3"},
                      {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                      {"SLURM_STEP_NODELIST", "gpu[07-09,12]"},
                      {"SLURM_JOB_ID", "123"}};
  Launch launch = launch_of(variables);
  expect_place(launch, Launcher::slurm, 6, 7, 0, 1);
  EXPECT_FALSE(launch.has_mpi);
  EXPECT_EQ(launch.master_address, "gpu07");
  EXPECT_EQ(launch.master_port, 20123);
  variables["PMIX_RANK"] = "6";
  EXPECT_TRUE(launch_of(variables).has_mpi);
  variables = without(without(variables, "PMIX_RANK"), "SLURM_STEP_NODELIST");
  expect_error([&] { launch_of(variables); }, "expected SLURM_STEP_NODELIST");
  variables["MASTER_ADDR"] = "login1";
  variables["MASTER_PORT"] = "1234";
  EXPECT_EQ(launch_of(variables).master_address, "login1");
}

TEST(Launch, AnSbatchScriptWithoutSrunIsOneRank) {
  expect_place(launch_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}}),
               Launcher::none, 0, 1, 0, 1);
}

TEST(Launch, Torchrun) {
  const Launch launch = launch_of(kTorchrun);
  expect_place(launch, Launcher::environment, 5, 8, 1, 4);
  EXPECT_EQ(launch.master_address, "gpu0");
  EXPECT_EQ(launch.master_port, 29500);
  EXPECT_FALSE(launch.has_mpi);
}

TEST(Launch, TheAgentOfTorchrunKeepsItsPort) {
  EXPECT_EQ(launch_of(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True")).master_port, 29501);
}

TEST(Launch, RankVariablesWinOverMpirun) {
  Variables variables = kTorchrun;
  variables["OMPI_COMM_WORLD_RANK"] = "0";
  variables["OMPI_COMM_WORLD_SIZE"] = "1";
  const Launch launch = launch_of(variables);
  expect_place(launch, Launcher::environment, 5, 8, 1, 4);
  EXPECT_TRUE(launch.has_mpi);
}

TEST(Launch, ErrorsNameTheVariable) {
  const auto fails = [](const Variables& variables, const std::string& text) {
    expect_error([&] { launch_of(variables); }, text);
  };
  fails(with(kTorchrun, "RANK", "8"), "expected RANK below WORLD_SIZE = 8, got 8");
  fails(with(kTorchrun, "RANK", "two"), "expected RANK to be a number of at least 0, got \"two\"");
  fails(with(kTorchrun, "WORLD_SIZE", "-1"), "expected WORLD_SIZE to be a number");
  fails(with(kTorchrun, "WORLD_SIZE", "0"), "expected WORLD_SIZE of at least 1, got 0");
  fails(without(kTorchrun, "WORLD_SIZE"), "RANK is set, so expected WORLD_SIZE to be set too");
  fails(without(kTorchrun, "RANK"), "WORLD_SIZE is set, so expected RANK to be set too");
  fails(without(kTorchrun, "LOCAL_RANK"), "expected LOCAL_RANK");
  fails(without(kTorchrun, "MASTER_ADDR"), "expected MASTER_ADDR");
  fails(without(kTorchrun, "MASTER_PORT"), "expected MASTER_PORT to be set too");
  fails(with(kTorchrun, "MASTER_PORT", "70000"), "expected MASTER_PORT from 1 to 65535, got 70000");
  fails(with(kTorchrun, "LOCAL_RANK", "4"), "expected LOCAL_RANK below LOCAL_WORLD_SIZE = 4");
  fails(with(kTorchrun, "LOCAL_WORLD_SIZE", "9"), "expected LOCAL_WORLD_SIZE from 1 to WORLD_SIZE");
  fails({{"OMPI_COMM_WORLD_RANK", "1"}}, "expected OMPI_COMM_WORLD_SIZE to be set too");
  fails(with({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "0"}},
             "SLURM_STEP_TASKS_PER_NODE", "x2"),
        "expected SLURM_STEP_TASKS_PER_NODE as");
}

}  // namespace
}  // namespace mixtape::distributed
