#include "distributed/process_group.h"

#include <unistd.h>

#include <cstdlib>
#include <numeric>
#include <random>

#include "distributed/exit_hooks.h"
#include "distributed/mpi_communicator.h"
#include "distributed/nccl_communicator.h"
#include "distributed/run.h"
#include "distributed/startup.h"
#include "engine/build_info.h"
#include "engine/cuda/backend.h"
#include "engine/env.h"
#include "engine/generator.h"

namespace mixtape::distributed {
namespace {

constexpr int kDefaultTimeout = 600;  // seconds

std::unique_ptr<Run> the_run;

std::string random_text() {
  std::random_device device;
  std::uint64_t bits = device();
  return std::to_string(bits << 32 | device());
}

/// The text by which ranks without MPI know that they belong together.
std::string run_name(const Launch& launch) {
  std::string name =
      detail::concat(launch.master_address, ':', launch.master_port, ' ', launch.world_size);
  for (const char* variable :
       {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID"})
    if (const char* value = std::getenv(variable)) name += detail::concat(' ', value);
  return name;
}

void check_launchable(const Launch& launch, bool uses_mpi) {
  if (uses_mpi || !launch.master_address.empty()) return;
  MT_THROW("init: ", name_of(launch.launcher), " started ", launch.world_size,
           " ranks, and this build has no MPI by which they could find each other; install MPI "
           "(Debian: libopenmpi-dev) and build again, or start the ranks with RANK, WORLD_SIZE, "
           "LOCAL_RANK, MASTER_ADDR and MASTER_PORT set");
}

/// Rank 0 starts the store; every rank connects to it.
void open_store(Run& run, bool uses_mpi) {
  const Launch& launch = run.launch;
  StoreAddress address;
  StoreServer::Options server{.port = launch.master_port,
                              .world_size = launch.world_size,
                              .run = uses_mpi ? random_text() : run_name(launch),
                              .silence = run.timeout};
  if (uses_mpi) server.port = 0;
  if (launch.rank == 0) run.server = std::make_unique<StoreServer>(server);
  if (uses_mpi) {
    MessageWriter writer;
    if (launch.rank == 0) {
      writer.i64(run.server->port()).text(server.run);
      for (const std::string& host : host_addresses()) writer.text(host);
    }
    const std::string shared = mpi_broadcast_text(writer.body());
    MessageReader reader(shared);
    address.port = static_cast<int>(reader.i64());
    address.run = reader.text();
    while (!reader.empty()) address.hosts.push_back(reader.text());
  } else {
    address = {{launch.master_address}, launch.master_port, server.run};
  }
  if (launch.rank == 0) address.hosts = {"127.0.0.1"};
  run.store = std::make_unique<Store>(address, run.timeout);
  run.watchdog = std::make_unique<Watchdog>(Watchdog::Options{
      .store = address,
      .rank = launch.rank,
      .description =
          detail::concat("rank ", launch.rank, " (", launch.host, ", pid ", getpid(), ')'),
      .timeout = run.timeout,
      .abort = [] { abort_nccl(); }});
}

/// Compares the ranks; throws on all of them when they do not fit together.
std::vector<RankInfo> meet(Run& run, const InitOptions& options, Device device) {
  std::vector<RankInfo> ranks;
  const RankInfo mine = describe_this_rank(run.launch, device);
  const int size = run.launch.world_size;
  if (size == 1) return {mine};
  for (const std::string& text :
       run.store->gather("start", run.launch.rank, size, mine.encode(), run.timeout, "init"))
    ranks.push_back(RankInfo::decode(text));
  const std::string why = refusal(ranks, options.share_devices);
  if (why.empty()) return ranks;
  if (run.launch.rank == 0) MT_THROW(why);
  // Rank 0 says why; a launcher that sees another rank end first would cut it short. Its end closes
  // the store.
  constexpr double kLongest = 5;
  try {
    run.store->wait("never set", kLongest);
  } catch (const Error&) {
  }
  usleep(300'000);
  MT_THROW("init: this run is refused; rank 0 says why");
}

void choose_backends(Communicator::Impl& world, const Run& run, const std::vector<RankInfo>& ranks,
                     std::unique_ptr<Backend> mpi) {
  const int size = world.size();
  const std::string no_mpi =
      build_info().mpi ? "MPI carries them, and the run was started without it; use mpirun or srun"
                       : "MPI carries them, and this build has none (Debian: libopenmpi-dev)";
  world.host = std::move(mpi);
  if (!world.host) world.no_host = no_mpi;
  if (world.device.is_cpu()) {
    world.no_cuda = "this run is on CPUs; InitOptions::device chooses";
  } else if (build_info().nccl && !shares_devices(ranks)) {
    const auto share = [&](const std::string& text) {
      if (size == 1) return text;
      if (world.rank == 0) run.store->set("nccl", text);
      return run.store->get("nccl", run.timeout);
    };
    world.cuda = make_nccl_backend({.name = world.name,
                                    .rank = world.rank,
                                    .size = size,
                                    .device = world.device,
                                    .timeout = run.timeout,
                                    .share = share});
  } else {
    world.cuda = world.host;
    if (!world.cuda)
      world.no_cuda = build_info().nccl ? "ranks share a GPU, and " + no_mpi
                                        : "this build has no NCCL, and " + no_mpi;
  }
}

/// Fills `run` in. Where it throws, MPI stays as it is: ranks can only end it together.
void join(Run& run, const InitOptions& options) {
  const Launch& launch = run.launch;
  const bool several = launch.world_size > 1;
  const bool uses_mpi = build_info().mpi && (launch.has_mpi || (!several && options.force_comm));
  if (several) check_launchable(launch, uses_mpi);
  const Device device = choose_device(options, launch);
  if (device.is_cuda()) cudart::set_current_device(device.index);
  auto world = std::make_shared<Communicator::Impl>();
  world->name = "world";
  world->rank = launch.rank;
  world->device = device;
  world->world_ranks.resize(static_cast<std::size_t>(launch.world_size));
  std::iota(world->world_ranks.begin(), world->world_ranks.end(), 0);
  if (several || options.force_comm) {
    std::unique_ptr<Backend> mpi;
    if (uses_mpi) mpi = make_mpi_backend(launch.rank, launch.world_size, device);
    if (several) {
      open_store(run, uses_mpi);
      install_exit_hooks(run.watchdog.get());
    }
    choose_backends(*world, run, meet(run, options, device), std::move(mpi));
  }
  run.world = Communicator(std::move(world));
}

}  // namespace

Run& current_run() {
  MT_CHECK(the_run != nullptr, "distributed: call mixtape::distributed::init() first");
  return *the_run;
}

void init(const InitOptions& options) {
  MT_CHECK(the_run == nullptr, "init: this process is in a run already");
  MT_CHECK(options.timeout >= 0, "init: expected a timeout in seconds, got ", options.timeout);
  auto run = std::make_unique<Run>();
  run->launch = detect_launch();
  run->timeout = options.timeout > 0 ? options.timeout
                                     : detail::env_positive("MIXTAPE_TIMEOUT_S", kDefaultTimeout);
  run->check_collectives = detail::env_flag("MIXTAPE_CHECK_COLLECTIVES");
  try {
    join(*run, options);
  } catch (...) {
    remove_exit_hooks();
    throw;
  }
  if (run->launch.world_size == 1) install_exit_hooks(nullptr);
  the_run = std::move(run);
}

bool initialized() { return the_run != nullptr; }
Communicator world() { return current_run().world; }
const Launch& launch() { return current_run().launch; }

void finalize() {
  if (!the_run) return;
  Run& run = *the_run;
  {
    const Communicator::Impl& world = run.world.impl();
    const FlightScope scope({.group = world.name,
                             .members = world.world_ranks,
                             .sequence = ++run.world.impl().sequence,
                             .signature = "finalize",
                             .text = "world: finalize"});
    gather_texts(world, "finalize", "", "finalize");
    run.world = Communicator();
    finalize_mpi();
  }
  remove_exit_hooks();
  run.watchdog.reset();
  run.store.reset();
  constexpr double kLeaveSeconds = 5;
  if (run.server) run.server->wait_until_left(kLeaveSeconds);
  the_run.reset();
}

std::uint64_t rank_seed(std::uint64_t seed, int rank) {
  // An odd multiple of a 64-bit constant: rank 0 keeps the seed, and others differ from it and from
  // each other (splitmix64's increment; Steele, Lea and Flood 2014).
  return seed + 0x9e3779b97f4a7c15 * static_cast<std::uint64_t>(rank);
}

void seed(std::uint64_t seed) { manual_seed(rank_seed(seed, current_run().launch.rank)); }

}  // namespace mixtape::distributed
