// A collective over host memory as a list of MPI calls. Counts in MPI are ints and some libraries
// compute bytes in ints too, so long tensors go in pieces; 16-bit reductions are converted to
// float32 piece by piece. Internal.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>

#include "distributed/backend.h"

namespace mixtape::distributed {

class MpiPlan {
 public:
  virtual ~MpiPlan() = default;
  /// Posts the next piece; false when there is none.
  virtual bool post(MPI_Request& request) = 0;
  /// After the piece posted last is done.
  virtual void complete(const MPI_Status& status) = 0;
};

/// One rank's place in an MPI communicator.
struct MpiGroup {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
};

/// `in` and `out` are what the collective reads and writes: its tensors, or host copies of them.
std::unique_ptr<MpiPlan> make_mpi_plan(const Collective& collective, const MpiGroup& group,
                                       const void* in, void* out);

/// The most bytes that one MPI call moves for a rank, 1 GiB unless set. All ranks agree on it.
/// Tests set it to reach the pieces with small tensors.
std::int64_t mpi_piece_bytes();
void set_mpi_piece_bytes(std::int64_t bytes);

}  // namespace mixtape::distributed
