// distributed/nccl_communicator.h in a build without NCCL.
#include "distributed/nccl_communicator.h"

namespace mixtape::distributed {

std::string nccl_version() { return ""; }
std::unique_ptr<Backend> make_nccl_backend(const NcclOptions&) {
  MT_THROW("NCCL: this build has none; install it (libnccl-dev) and configure again");
}
void abort_nccl() noexcept {}

}  // namespace mixtape::distributed
