// A process's membership in a run: init() at its start, world() from then on.
//
// The same program runs alone and under any launcher (distributed/launch.h). With more than one
// rank, init() starts a watchdog. It ends this process with a message and a non-zero exit code when
// another rank dies, throws out of main or does not take part in a collective within the timeout:
// the one place where this library ends a process, because a thread that waits for a lost rank
// cannot be made to return. docs/distributed.md has launch command lines and variables.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "distributed/communicator.h"
#include "distributed/launch.h"

namespace mixtape::distributed {

enum class DeviceChoice : std::uint8_t {
  automatic,  // the GPU of the local rank if the machine has one, else the CPU
  cpu,
  cuda,
};

struct InitOptions {
  /// Seconds until a collective or the start counts as failed. 0: MIXTAPE_TIMEOUT_S, else 600.
  double timeout = 0;
  DeviceChoice device = DeviceChoice::automatic;
  /// A run of one rank uses MPI or NCCL too, instead of nothing: for tests and benchmarks.
  bool force_comm = false;
  /// Ranks may share a GPU (through MPI, slowly). Otherwise that is an error.
  bool share_devices = false;
};

/// Joins the run. All ranks call it once, before they use a GPU. Throws on every rank, with the map
/// of ranks, hosts and devices on rank 0, when ranks do not fit together: more ranks than GPUs on a
/// host, one GPU for two ranks, different builds or library versions.
void init(const InitOptions& options = {});
bool initialized();
/// All ranks. Throws before init().
Communicator world();
/// How this process was launched.
const Launch& launch();
/// Waits for outstanding collectives and for all ranks, and leaves the run. Called at the process's
/// end if the program did not; after an error it does not wait for the others.
void finalize();

/// Random streams (engine/generator.h): after seed(s) every rank draws its own numbers, for dropout
/// and augmentation: those of manual_seed(rank_seed(s, rank)). Before seed(), or after
/// manual_seed(s) with the same s on all ranks, all draw the same, which is what equal initial
/// parameters need: manual_seed(s), build the model, then seed(s).
void seed(std::uint64_t seed);
/// The seed of one rank's stream: rank 0 keeps s itself, so that a run of one rank draws what a
/// plain program draws; other ranks get numbers that share no stream with it.
std::uint64_t rank_seed(std::uint64_t seed, int rank);

/// What check_same_on_all_ranks compares.
struct TensorSummary {
  std::string name;
  Shape shape;
  Dtype dtype = Dtype::f32;
  std::uint64_t hash = 0;  // of its values; 0 where they may differ
};
/// Throws on every rank of `group` unless all passed the same list: names the first entry that
/// differs and says what each rank has. `what` begins the message ("DataParallel: parameters").
void check_same_on_all_ranks(const Communicator& group, const std::string& what,
                             std::span<const TensorSummary> tensors);

}  // namespace mixtape::distributed
