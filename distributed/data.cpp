#include "distributed/data.h"

#include "distributed/process_group.h"
#include "engine/generator.h"

namespace mixtape::distributed {

io::DataLoaderOptions for_rank(io::DataLoaderOptions options, const Communicator& group) {
  MT_CHECK(options.shard_count == 1, "for_rank: expected options of a whole data set, got shard ",
           options.shard, " of ", options.shard_count);
  options.shard = group.rank();
  options.shard_count = group.size();
  return options;
}

void restore_random_streams(std::uint64_t seed, const Communicator& group) {
  std::vector<Device> devices = {Device::cpu()};
  for (int i = 0; i < cuda_device_count(); ++i) devices.push_back(Device::cuda(i));
  for (const Device device : devices) {
    PhiloxState state = random_state(device);
    state.seed = rank_seed(seed, group.rank());
    set_random_state(device, state);
  }
}

}  // namespace mixtape::distributed
