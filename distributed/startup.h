// The comparison of all ranks at the start: what each one is, and why a run of them is refused.
// Internal.
#pragma once

#include <string>
#include <vector>

#include "distributed/process_group.h"

namespace mixtape::distributed {

/// What one rank tells the others.
struct RankInfo {
  std::string host;
  std::int64_t local_rank = 0;
  std::string device;     // "cpu", "cuda:1"
  std::string device_id;  // the GPU's UUID; empty for the CPU
  std::int64_t gpus = 0;  // that this rank sees
  std::string build;      // differs between different builds of this library
  std::string mpi, nccl;  // versions of the libraries in use; empty where none is

  std::string encode() const;
  static RankInfo decode(const std::string& text);
};

/// The GPU of the local rank where there is one, as the options say.
Device choose_device(const InitOptions& options, const Launch& launch);
RankInfo describe_this_rank(const Launch& launch, Device device);

/// "  rank 0: node1 cuda:0 GPU-5a..." for each rank; long runs are cut.
std::string device_map(const std::vector<RankInfo>& ranks);
/// Why these ranks cannot form a run, with the map; empty when they can.
std::string refusal(const std::vector<RankInfo>& ranks, bool share_devices);
/// Whether a GPU serves two ranks.
bool shares_devices(const std::vector<RankInfo>& ranks);

}  // namespace mixtape::distributed
