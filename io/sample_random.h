// Random numbers for data loading. Every sample has a stream of its own, derived from (seed, epoch,
// index) by Philox, so that augmentation and order depend on neither the worker that makes a sample
// nor the number of workers, and repeat on every platform (std::shuffle and the standard
// distributions do not).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/philox.h"

namespace mixtape::io {

/// A stream of random numbers: Philox words one after the other, 2^26 of them for one sample.
class SampleRandom {
 public:
  explicit SampleRandom(PhiloxState state) : state_(state) {}

  std::uint32_t bits() {
    if (used_ == 4) {
      words_ = philox(state_, block_++);
      used_ = 0;
    }
    return words_.v[used_++];
  }
  std::uint64_t bits64() {
    const std::uint64_t high = bits();
    return high << 32 | bits();
  }
  /// Uniform in [0, 1).
  float uniform() { return uniform_from_bits(bits()); }
  float uniform(float lo, float hi) { return lo + (hi - lo) * uniform(); }
  /// Uniform integer in [0, n), without bias; n >= 1.
  std::uint64_t below(std::uint64_t n);
  bool coin(float probability = 0.5f) { return uniform() < probability; }
  /// Standard normal (Box and Muller); the last bit may differ between C libraries.
  float normal();

 private:
  PhiloxState state_;
  std::uint64_t block_ = 0;
  Philox4 words_{};
  int used_ = 4;
};

/// The streams of one pass over a data set.
class RandomStreams {
 public:
  RandomStreams(std::uint64_t seed, std::int64_t epoch);
  SampleRandom sample(std::int64_t index) const;

 private:
  std::uint64_t key_;
};

/// A random order of 0 .. n - 1 (Fisher and Yates), the same for the same (n, seed, epoch).
std::vector<std::int64_t> shuffled_order(std::int64_t n, std::uint64_t seed, std::int64_t epoch);

}  // namespace mixtape::io
