// Collectives over NCCL, for CUDA tensors with a GPU for each rank. In a build without NCCL the
// functions throw and say what is missing. Internal.
#pragma once

#include <memory>
#include <string>

#include "distributed/backend.h"
#include "engine/function.h"

namespace mixtape::distributed {

/// "2.28.9"; empty in a build without NCCL.
std::string nccl_version();

struct NcclOptions {
  std::string name;
  int rank = 0, size = 1;
  Device device;
  double timeout = 600;  // seconds to set up
  /// Gives rank 0's text to all ranks of the group.
  Function<std::string(const std::string&)> share;
};
std::unique_ptr<Backend> make_nccl_backend(const NcclOptions& options);

/// Aborts all communicators of this process, for a process that is about to end.
void abort_nccl() noexcept;

}  // namespace mixtape::distributed
