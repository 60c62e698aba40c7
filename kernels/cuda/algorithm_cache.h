// What timed trials have chosen, kept on disk so that the next process starts without them.
//
// One file for each (GPU, driver, library version) in $MIXTAPE_ALGORITHM_CACHE, by default
// $XDG_CACHE_HOME/mixtape or ~/.cache/mixtape; MIXTAPE_ALGORITHM_CACHE=0 turns it off. Records are
// appended whole, so that processes may share a file; one that is cut short or damaged ends the
// file. The cache only saves time: a file that cannot be read or written is as good as none.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <unordered_map>

namespace mixtape::kernels::cuda {

class AlgorithmCache {
 public:
  /// `library`: name and version, part of the file's name. Not yet opened.
  AlgorithmCache(int device, std::string library);

  /// Copies the value stored under `key` to `value`; false if there is none of that size.
  bool find(std::span<const std::byte> key, std::span<std::byte> value);
  void store(std::span<const std::byte> key, std::span<const std::byte> value);

 private:
  void load();
  int device_;
  std::string library_;
  bool loaded_ = false;
  std::string file_;                                     // empty when the cache is off
  std::unordered_map<std::string, std::string> values_;  // by key; the last of a key counts
};

}  // namespace mixtape::kernels::cuda
