#include "distributed/launch.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "engine/check.h"

namespace mixtape::distributed {
namespace {

/// The names that one launcher uses.
struct Names {
  Launcher launcher;
  bool has_mpi;
  const char *rank, *world_size, *local_rank, *local_size;
};

constexpr Names kTorchrun{Launcher::environment, false,        "RANK",
                          "WORLD_SIZE",          "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{Launcher::open_mpi,           true,
                         "OMPI_COMM_WORLD_RANK",       "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kHydra{Launcher::mpich,  true, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                       "MPI_LOCALNRANKS"};
constexpr Names kSlurm{Launcher::slurm,        false,           "SLURM_PROCID",
                       "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"};

class Reader {
 public:
  Reader(const Environment& environment) : environment_(environment) {}

  std::string_view text(const char* name) const {
    const char* value = environment_(name);
    return value == nullptr ? std::string_view() : std::string_view(value);
  }
  std::optional<int> number(const char* name) const {
    const std::string_view value = text(name);
    if (value.empty()) return std::nullopt;
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    MT_CHECK(error == std::errc{} && end == value.data() + value.size() && result >= 0,
             "launch: expected ", name, " to be a number of at least 0, got \"", value, '"');
    return result;
  }
  int need(const char* name, const char* because) const {
    const std::optional<int> value = number(name);
    MT_CHECK(value.has_value(), "launch: ", because, " is set, so expected ", name,
             " to be set too; the launcher sets both, or set them by hand");
    return *value;
  }

 private:
  const Environment& environment_;
};

/// SLURM's "2(x3),1" is tasks for each node: two on three nodes, one on the last. The number for
/// this one, by SLURM_NODEID.
int tasks_on_node(std::string_view list, int node) {
  int at = 0, tasks = 0;
  const char* p = list.data();
  const char* const end = p + list.size();
  while (p < end) {
    auto parsed = std::from_chars(p, end, tasks);
    MT_CHECK(parsed.ec == std::errc{},
             "launch: expected SLURM_STEP_TASKS_PER_NODE as \"2(x3),1\", got \"", list, '"');
    p = parsed.ptr;
    int nodes = 1;
    if (std::string_view(p, end).starts_with("(x")) {
      p = std::from_chars(p + 2, end, nodes).ptr;
      if (p < end) ++p;  // the closing bracket
    }
    at += nodes;
    if (node < at) return tasks;
    if (p < end && *p == ',') ++p;
  }
  return tasks;
}

void check_places(const Launch& launch, const Names& names) {
  MT_CHECK(launch.world_size >= 1, "launch: expected ", names.world_size, " of at least 1, got ",
           launch.world_size);
  MT_CHECK(launch.rank < launch.world_size, "launch: expected ", names.rank, " below ",
           names.world_size, " = ", launch.world_size, ", got ", launch.rank);
  MT_CHECK(launch.local_size >= 1 && launch.local_size <= launch.world_size, "launch: expected ",
           names.local_size, " from 1 to ", names.world_size, " = ", launch.world_size, ", got ",
           launch.local_size);
  MT_CHECK(launch.local_rank < launch.local_size, "launch: expected ", names.local_rank, " below ",
           names.local_size, " = ", launch.local_size, ", got ", launch.local_rank);
}

void read_places(Launch& launch, const Reader& env, const Names& names) {
  launch.launcher = names.launcher;
  launch.has_mpi = names.has_mpi;
  launch.rank = env.need(names.rank, names.world_size);
  launch.world_size = env.need(names.world_size, names.rank);
  if (names.launcher == Launcher::slurm) {
    launch.local_rank = env.need(names.local_rank, names.rank);
    const std::string_view tasks = env.text(names.local_size);
    launch.local_size = tasks.empty()
                            ? launch.local_rank + 1
                            : tasks_on_node(tasks, env.number("SLURM_NODEID").value_or(0));
  } else if (names.launcher == Launcher::environment) {
    MT_CHECK(env.number(names.local_rank) || launch.world_size == 1, "launch: ", names.rank,
             " is set, so expected ", names.local_rank,
             ", the rank among this host's processes, to be set too; it chooses the GPU");
    launch.local_rank = env.number(names.local_rank).value_or(0);
    launch.local_size = env.number(names.local_size).value_or(0);
    if (launch.local_size == 0)  // at least this many; the start-up exchange knows more
      launch.local_size = launch.local_rank + 1;
  } else {
    launch.local_rank = env.number(names.local_rank).value_or(launch.rank);
    launch.local_size = env.number(names.local_size).value_or(launch.world_size);
  }
  check_places(launch, names);
}

void read_master(Launch& launch, const Reader& env, const char* because) {
  launch.master_address = std::string(env.text("MASTER_ADDR"));
  MT_CHECK(!launch.master_address.empty(), "launch: ", because,
           " is set for several ranks, so expected MASTER_ADDR, the name or address of rank 0's "
           "host, to be set too");
  launch.master_port = env.need("MASTER_PORT", "MASTER_ADDR");
  // Newer versions of torchrun serve a store of their own at MASTER_PORT.
  if (env.text("TORCHELASTIC_USE_AGENT_STORE") == "True") ++launch.master_port;
  MT_CHECK(launch.master_port >= 1 && launch.master_port <= 65535,
           "launch: expected MASTER_PORT from 1 to 65535, got ", launch.master_port);
}

/// The first host of SLURM's list: "gpu[07-09,12],login" begins with gpu07.
std::string first_host(std::string_view list) {
  const std::size_t open = list.find_first_of("[,");
  std::string host(list.substr(0, open));
  if (open == std::string_view::npos || list[open] == ',') return host;
  const std::string_view inside = list.substr(open + 1);
  return host + std::string(inside.substr(0, inside.find_first_of("-,]")));
}

void read_slurm_master(Launch& launch, const Reader& env) {
  // srun with PMIx or PMI-2 sets MPI up; --mpi=none leaves the addresses to us.
  launch.has_mpi = !env.text("PMIX_RANK").empty() || !env.text("PMI_RANK").empty() ||
                   !env.text("PMI_FD").empty();
  if (launch.world_size == 1 || launch.has_mpi) return;
  if (!env.text("MASTER_ADDR").empty()) {
    read_master(launch, env, "SLURM_PROCID");
    return;
  }
  std::string_view nodes = env.text("SLURM_STEP_NODELIST");
  if (nodes.empty()) nodes = env.text("SLURM_NODELIST");
  MT_CHECK(!nodes.empty(),
           "launch: SLURM_PROCID is set for several ranks, so expected "
           "SLURM_STEP_NODELIST, or MASTER_ADDR and MASTER_PORT, to be set too");
  launch.master_address = first_host(nodes);
  // The same on all ranks, and different for jobs that share a host.
  constexpr int kFirstPort = 20000, kPorts = 20000;
  launch.master_port = env.number("MASTER_PORT")
                           .value_or(kFirstPort + env.number("SLURM_JOB_ID").value_or(0) % kPorts);
}

std::string host_name() {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0) return "unknown host";
  return name;
}

}  // namespace

const char* name_of(Launcher launcher) {
  constexpr const char* kNames[] = {"no launcher", "mpirun (Open MPI)", "mpirun (Hydra)", "srun",
                                    "RANK and WORLD_SIZE"};
  return kNames[static_cast<int>(launcher)];
}

Launch detect_launch(const Environment& environment) {
  const Reader env(environment);
  Launch launch;
  launch.host = host_name();
  const auto is_set = [&](const char* name) { return !env.text(name).empty(); };
  if (is_set("RANK") || is_set("WORLD_SIZE")) {
    read_places(launch, env, kTorchrun);
    if (launch.world_size > 1) read_master(launch, env, "RANK");
    launch.has_mpi = is_set(kOpenMpi.rank) || is_set(kHydra.rank);
  } else if (is_set(kOpenMpi.rank)) {
    read_places(launch, env, kOpenMpi);
  } else if (is_set(kHydra.local_rank)) {  // its helpers may have been started by srun
    read_places(launch, env, kHydra);
  } else if (is_set(kSlurm.rank) && is_set(kSlurm.world_size)) {
    read_places(launch, env, kSlurm);
    read_slurm_master(launch, env);
  } else if (is_set(kHydra.rank)) {
    read_places(launch, env, kHydra);
  }
  return launch;
}

Launch detect_launch() {
  return detect_launch([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace mixtape::distributed
