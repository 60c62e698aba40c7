// Going on from a run's newest whole checkpoint, alone or on all ranks.
#pragma once

#include <cstdio>
#include <filesystem>
#include <string>

#include "distributed/data.h"
#include "examples/ranks.h"
#include "io/checkpoint.h"

namespace examples {

/// The step of the newest whole checkpoint in `folder`, -1 where there is none yet. Says which
/// newer ones it passed over. Throws if there are only damaged ones: to begin again is the user's
/// decision.
inline std::int64_t newest_step(const char* program, const std::string& folder) {
  const mt::io::WholeCheckpoint newest = mt::io::newest_whole_checkpoint(folder);
  for (const auto& skipped : newest.skipped)
    std::fprintf(stderr, "%s: --resume: passed over %s: %s\n", program, skipped.path.c_str(),
                 skipped.reason.c_str());
  MT_CHECK(newest.path || newest.skipped.empty(), "--resume: expected a whole checkpoint in ",
           folder, ", got ", newest.skipped.size(),
           " damaged ones; without --resume the run begins", " again");
  return newest.step;
}

/// Loads it; `state` stays as it is where there is none yet.
inline void resume(const char* program, const std::string& folder, mt::io::Checkpoint& state) {
  const std::int64_t step = newest_step(program, folder);
  if (step < 0) return;
  const std::filesystem::path path = mt::io::checkpoint_path(folder, step);
  mt::io::load_checkpoint(path, state);
  std::printf("Resumed       step %lld from %s\n", static_cast<long long>(step), path.c_str());
}

/// The same for all ranks: rank 0 finds it and all load it.
inline void resume(const char* program, const std::string& folder, mt::io::Checkpoint& state,
                   const Ranks& ranks, std::uint64_t seed) {
  const std::int64_t step = ranks.agree(ranks.first() ? newest_step(program, folder) : -1);
  if (step >= 0) {
    const std::filesystem::path path = mt::io::checkpoint_path(folder, step);
    MT_CHECK(std::filesystem::exists(path), "--resume: expected ", path.string(),
             " as on rank 0, got none on rank ", ranks.rank(),
             "; --out has to be a folder that all ranks see");
    mt::io::load_checkpoint(path, state);
    if (ranks.first())
      std::printf("Resumed       step %lld from %s\n", static_cast<long long>(step), path.c_str());
  }
  if (ranks.world()) mt::distributed::restore_random_streams(seed, ranks.world());
}

}  // namespace examples
