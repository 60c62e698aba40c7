// Which rank of which run this process is, read from the environment that its launcher left.
#pragma once

#include <string>

#include "engine/function.h"

namespace mixtape::distributed {

enum class Launcher : std::uint8_t {
  none,         // started by hand: one rank
  open_mpi,     // mpirun of Open MPI
  mpich,        // mpirun of MPICH, Intel MPI or MVAPICH (Hydra)
  slurm,        // srun, with PMI or PMIx for MPI, or without either
  environment,  // RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun sets them
};
const char* name_of(Launcher launcher);

struct Launch {
  Launcher launcher = Launcher::none;
  int rank = 0, world_size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  std::string host;                    // this host's name
  /// Where rank 0's store listens; empty and 0 where MPI tells the others.
  std::string master_address;
  int master_port = 0;
  /// The launcher set up MPI for its processes: MPI_Init joins them.
  bool has_mpi = false;
};

/// Value of an environment variable; nullptr when unset.
using Environment = Function<const char*(const char* name)>;

/// Reads the process's environment. Of several launchers' variables, those of RANK/WORLD_SIZE win,
/// then mpirun's, then srun's. Throws mixtape::Error on variables that are missing, are not numbers
/// or contradict each other.
Launch detect_launch();
/// As above with other variables, for tests.
Launch detect_launch(const Environment& environment);

}  // namespace mixtape::distributed
