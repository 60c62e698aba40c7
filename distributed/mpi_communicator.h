// Collectives over MPI, for CPU tensors and, by way of pinned host memory, for CUDA tensors.
// In a build without MPI the functions throw and say what is missing. Internal.
#pragma once

#include <memory>
#include <string>

#include "distributed/backend.h"

namespace mixtape::distributed {

/// Joins MPI_COMM_WORLD (starts MPI if needed), for tensors on the CPU and on `device`. Throws
/// unless this process has the expected place in it.
std::unique_ptr<Backend> make_mpi_backend(int rank, int world_size, Device device);

/// Text that MPI_COMM_WORLD's rank 0 gives to all ranks.
std::string mpi_broadcast_text(const std::string& text);
/// Version of the MPI library in use; empty where MPI was not started.
std::string mpi_library_version();
/// Ends MPI if it was started here. Blocks until all ranks do the same.
void finalize_mpi();

}  // namespace mixtape::distributed
