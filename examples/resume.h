// Going on from a run's newest whole checkpoint, alone or on all ranks.
#pragma once

#include <cstdio>
#include <filesystem>
#include <string>

#include "distributed/data.h"
#include "examples/ranks.h"
#include "io/checkpoint.h"

namespace examples {

/// Rank 0 finds it in `folder` and all ranks load it; `state` stays as it is where there is none
/// yet. Throws if there are only damaged ones: to begin again is the user's decision.
inline void resume(const char* program, const std::string& folder, mt::io::Checkpoint& state,
                   const Ranks& ranks, std::uint64_t seed) {
  mt::io::WholeCheckpoint newest;
  if (ranks.first()) newest = mt::io::newest_whole_checkpoint(folder);
  for (const auto& skipped : newest.skipped)
    std::fprintf(stderr, "%s: --resume: passed over %s: %s\n", program, skipped.path.c_str(),
                 skipped.reason.c_str());
  MT_CHECK(newest.path || newest.skipped.empty(), "--resume: expected a whole checkpoint in ",
           folder, ", got ", newest.skipped.size(),
           " damaged ones; without --resume the run begins", " again");
  const std::int64_t step = ranks.agree(newest.step);
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
