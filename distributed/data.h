// Data of data-parallel training: each rank's part of the samples, and its own random numbers.
#pragma once

#include <cstdint>

#include "distributed/communicator.h"
#include "io/data_loader.h"

namespace mixtape::distributed {

/// `options` of a loader for this rank's part of the samples. In step k the ranks' batches together
/// are batch k of one process whose batch size is size() times as large, with the same seed.
///   io::DataLoader loader(train, for_rank({.batch_size = 32, .shuffle = true, .seed = 1}, world));
/// Parts are equal by repeating samples at the front or, with drop_last, by leaving out some at the
/// end of an epoch; with even_shards = false every sample comes exactly once and parts may differ
/// by one. A loader's state (io::Checkpoint) is the same on every rank, so that rank 0's serves
/// all. Samples have random streams of their own (io/sample_random.h): augmentation depends neither
/// on the rank nor on its workers.
io::DataLoaderOptions for_rank(io::DataLoaderOptions options, const Communicator& group);

/// After rank 0's checkpoint was loaded on every rank: gives each rank its own random streams again
/// (those of distributed::seed(seed)), at the position that the checkpoint holds. Where ranks draw
/// equally much in each step, as with equal batches, they go on as if they had never stopped.
void restore_random_streams(std::uint64_t seed, const Communicator& group);

}  // namespace mixtape::distributed
