#include "distributed/startup.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "distributed/device_identity.h"
#include "distributed/mpi_communicator.h"
#include "distributed/nccl_communicator.h"
#include "distributed/wire.h"
#include "engine/build_info.h"
#include "io/mapped_file.h"

namespace mixtape::distributed {
namespace {

constexpr std::size_t kShownRanks = 64;

/// A hash of the file that holds this library: the program, or libmixtape.so.
std::string library_hash() {
  Dl_info info{};
  std::string path = "/proc/self/exe";
  static const int here = 0;
  if (dladdr(&here, &info) != 0 && info.dli_fname != nullptr &&
      std::strstr(info.dli_fname, ".so") != nullptr)
    path = info.dli_fname;
  const io::MappedFile file("init", path);
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, eight bytes at a time
  const auto bytes = file.bytes();
  for (std::size_t i = 0; i < bytes.size(); i += sizeof hash) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min(sizeof word, bytes.size() - i));
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 29;
  }
  return std::to_string(hash);
}

/// The first rank whose field differs from rank 0's; -1 if none does.
int first_different(const std::vector<RankInfo>& ranks, std::string RankInfo::*field) {
  for (std::size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].*field != ranks[0].*field) return static_cast<int>(r);
  return -1;
}

std::string or_none(const std::string& text) { return text.empty() ? "none" : text; }

/// Ranks whose GPU another rank of their host has too, by host.
std::map<std::string, std::set<std::string>> shared_gpus(const std::vector<RankInfo>& ranks) {
  std::map<std::string, int> users;
  for (const RankInfo& rank : ranks)
    if (!rank.device_id.empty()) ++users[rank.device_id];
  std::map<std::string, std::set<std::string>> shared;
  for (const RankInfo& rank : ranks)
    if (!rank.device_id.empty() && users[rank.device_id] > 1)
      shared[rank.host].insert(rank.device_id);
  return shared;
}

std::string sharing_refusal(const std::vector<RankInfo>& ranks) {
  const auto shared = shared_gpus(ranks);
  if (shared.empty()) return "";
  const std::string& host = shared.begin()->first;
  std::int64_t ranks_here = 0, gpus = 0;
  for (const RankInfo& rank : ranks) {
    if (rank.host != host) continue;
    ++ranks_here;
    gpus = std::max(gpus, rank.gpus);
  }
  std::string text;
  if (ranks_here > gpus)
    text = detail::concat("expected at most one rank for each GPU, got ", ranks_here, " ranks on ",
                          host, " with ", gpus, gpus == 1 ? " GPU" : " GPUs");
  else
    text = detail::concat("expected each rank to have a GPU of its own, got several ranks with ",
                          *shared.begin()->second.begin(), " on ", host,
                          "; check LOCAL_RANK and CUDA_VISIBLE_DEVICES");
  return text + "; start fewer ranks, or set InitOptions::share_devices to share GPUs through MPI";
}

}  // namespace

std::string RankInfo::encode() const {
  MessageWriter writer;
  writer.text(host)
      .i64(local_rank)
      .text(device)
      .text(device_id)
      .i64(gpus)
      .text(build)
      .text(mpi)
      .text(nccl);
  return writer.body();
}

RankInfo RankInfo::decode(const std::string& text) {
  MessageReader reader(text);
  RankInfo info;
  info.host = reader.text();
  info.local_rank = reader.i64();
  info.device = reader.text();
  info.device_id = reader.text();
  info.gpus = reader.i64();
  info.build = reader.text();
  info.mpi = reader.text();
  info.nccl = reader.text();
  return info;
}

Device choose_device(const InitOptions& options, const Launch& launch) {
  if (options.device == DeviceChoice::cpu) return Device::cpu();
  const int gpus = cuda_device_count();
  if (options.device == DeviceChoice::automatic && gpus == 0) return Device::cpu();
  check_device("init", Device::cuda());
  // Launchers that give each rank one visible GPU leave number 0 to all of them; ranks that get the
  // same GPU are found out in the comparison.
  return Device::cuda(launch.local_rank % gpus);
}

RankInfo describe_this_rank(const Launch& launch, Device device) {
  RankInfo info;
  info.host = launch.host;
  info.local_rank = launch.local_rank;
  info.device = detail::concat(device);
  info.device_id = device_uuid(device);
  info.gpus = cuda_device_count();
  info.build = build_summary() + ", " + library_hash();
  info.mpi = mpi_library_version();
  info.nccl = device.is_cuda() ? nccl_version() : "";
  return info;
}

std::string device_map(const std::vector<RankInfo>& ranks) {
  std::string map;
  for (std::size_t r = 0; r < std::min(ranks.size(), kShownRanks); ++r) {
    const RankInfo& rank = ranks[r];
    map += "\n  rank " + std::to_string(r) + ": " + rank.host + ", local rank " +
           std::to_string(rank.local_rank) + ", " + rank.device;
    if (!rank.device_id.empty()) map += " (" + rank.device_id + ')';
  }
  if (ranks.size() > kShownRanks)
    map += "\n  and " + std::to_string(ranks.size() - kShownRanks) + " more";
  return map;
}

std::string refusal(const std::vector<RankInfo>& ranks, bool share_devices) {
  struct Field {
    const char* what;
    std::string RankInfo::*field;
  };
  constexpr Field kFields[] = {{"the same build of Mixtape", &RankInfo::build},
                               {"the same MPI library", &RankInfo::mpi}};
  std::string why;
  const auto compare = [&](const Field& f) {
    const int r = why.empty() ? first_different(ranks, f.field) : -1;
    if (r >= 0)
      why = detail::concat("expected ", f.what, " on all ranks, got \"", or_none(ranks[0].*f.field),
                           "\" on rank 0 and \"",
                           or_none(ranks[static_cast<std::size_t>(r)].*f.field), "\" on rank ", r);
  };
  for (const Field& f : kFields) compare(f);
  for (std::size_t r = 1; r < ranks.size() && why.empty(); ++r)
    if (ranks[r].device_id.empty() != ranks[0].device_id.empty())
      why = detail::concat("expected all ranks on GPUs or all on CPUs, got ", ranks[0].device,
                           " on rank 0 and ", ranks[r].device, " on rank ", r,
                           "; InitOptions::device chooses");
  compare({"the same NCCL version", &RankInfo::nccl});
  if (why.empty() && !share_devices) why = sharing_refusal(ranks);
  return why.empty() ? "" : "init: " + why + device_map(ranks);
}

bool shares_devices(const std::vector<RankInfo>& ranks) { return !shared_gpus(ranks).empty(); }

}  // namespace mixtape::distributed
