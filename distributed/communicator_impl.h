// The state behind a Communicator. Internal.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "distributed/backend.h"
#include "distributed/communicator.h"

namespace mixtape::distributed {

struct Communicator::Impl {
  std::string name;
  int rank = 0;
  std::vector<int> world_ranks;
  Device device;
  /// What carries tensors on the CPU and on CUDA; they may be the same object. Null where nothing
  /// can, and `no_host`, `no_cuda` say why and what to do; all null in a group of one rank that
  /// uses no library.
  std::shared_ptr<Backend> host, cuda;
  std::string no_host, no_cuda;

  std::mutex mutex;  // keeps sequence numbers in the order of the backend's calls
  std::uint64_t sequence = 0;
  /// Messages so far to (first) and from each rank, which number them: a rank that is not their
  /// other end does not see them.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> messages;
  std::uint64_t splits = 0, comparisons = 0;

  int size() const { return static_cast<int>(world_ranks.size()); }
  bool alone() const { return size() == 1 && !host && !cuda; }
  Backend& backend_of(Device d, const char* op) const;
};

}  // namespace mixtape::distributed
