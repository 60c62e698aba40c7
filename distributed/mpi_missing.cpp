// distributed/mpi_communicator.h in a build without MPI.
#include "distributed/mpi_communicator.h"

namespace mixtape::distributed {
namespace {
constexpr const char* kMissing =
    "MPI: this build has none; install it (Debian: libopenmpi-dev) and configure again, or set "
    "MIXTAPE_MPI=ON to see why it was not found";
}

std::unique_ptr<Backend> make_mpi_backend(int, int, Device) { MT_THROW(kMissing); }
std::string mpi_broadcast_text(const std::string&) { MT_THROW(kMissing); }
std::string mpi_library_version() { return ""; }
void finalize_mpi() {}

}  // namespace mixtape::distributed
