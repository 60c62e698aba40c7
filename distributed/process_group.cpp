#include "distributed/process_group.h"

#include <cstdlib>
#include <numeric>

#include "distributed/communicator_impl.h"
#include "distributed/mpi_communicator.h"

namespace mixtape::distributed {
namespace {

struct ProcessGroup {
  Launch launch;
  Communicator world;
};
ProcessGroup* process_group = nullptr;

Device choose_device(const InitOptions& options, const Launch& launch) {
  const int gpus = cuda_device_count();
  if (options.device == DeviceChoice::cpu) return Device::cpu();
  if (options.device == DeviceChoice::automatic && gpus == 0) return Device::cpu();
  MT_CHECK(gpus > 0, "init: expected a GPU on ", launch.host, ", found none");
  MT_CHECK(launch.local_rank < gpus || options.share_devices, "init: expected at most ", gpus,
           " ranks on ", launch.host, ", one for each GPU, got local rank ", launch.local_rank);
  return Device::cuda(launch.local_rank % gpus);
}

}  // namespace

void init(const InitOptions& options) {
  MT_CHECK(process_group == nullptr, "init: called twice");
  auto group = std::make_unique<ProcessGroup>();
  group->launch = detect_launch();
  const Launch& launch = group->launch;
  auto impl = std::make_shared<Communicator::Impl>();
  impl->name = "world";
  impl->rank = launch.rank;
  impl->device = choose_device(options, launch);
  impl->world_ranks.resize(static_cast<std::size_t>(launch.world_size));
  std::iota(impl->world_ranks.begin(), impl->world_ranks.end(), 0);
  if (launch.world_size > 1 || options.force_comm)
    impl->host = impl->cuda = make_mpi_backend(launch.rank, launch.world_size, impl->device);
  group->world = Communicator(std::move(impl));
  process_group = group.release();
  std::atexit([] { finalize(); });
}

bool initialized() { return process_group != nullptr; }

Communicator world() {
  MT_CHECK(initialized(), "world: call mixtape::distributed::init() first");
  return process_group->world;
}

const Launch& launch() {
  MT_CHECK(initialized(), "launch: call mixtape::distributed::init() first");
  return process_group->launch;
}

void finalize() {
  if (!initialized()) return;
  finalize_mpi();
  delete process_group;
  process_group = nullptr;
}

}  // namespace mixtape::distributed
