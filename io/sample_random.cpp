#include "io/sample_random.h"

#include <cmath>
#include <numbers>
#include <numeric>

#include "engine/check.h"

namespace mixtape::io {
namespace {

// What a key is for lies in the counter's top bits; below them the epoch.
enum class Purpose : std::uint64_t { samples = 1, order = 2 };

std::uint64_t derive_key(std::uint64_t seed, Purpose purpose, std::int64_t epoch) {
  const Philox4 w =
      philox({seed, static_cast<std::uint64_t>(purpose) << 60}, static_cast<std::uint64_t>(epoch));
  return std::uint64_t{w.v[0]} << 32 | w.v[1];
}

constexpr int kBlocksPerSampleLog2 = 24;

}  // namespace

std::uint64_t SampleRandom::below(std::uint64_t n) {
  MT_CHECK(n > 0, "SampleRandom::below: expected a bound of at least 1, got 0");
  const std::uint64_t reject = (0 - n) % n;  // 2^64 mod n: the values that would favour small ones
  std::uint64_t r;
  do r = bits64();
  while (r < reject);
  return r % n;
}

float SampleRandom::normal() {
  const double u = (bits() + 1.0) * 0x1p-32, v = bits() * 0x1p-32;  // u in (0, 1]
  return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
}

RandomStreams::RandomStreams(std::uint64_t seed, std::int64_t epoch)
    : key_(derive_key(seed, Purpose::samples, epoch)) {}

SampleRandom RandomStreams::sample(std::int64_t index) const {
  return SampleRandom({key_, static_cast<std::uint64_t>(index) << kBlocksPerSampleLog2});
}

std::vector<std::int64_t> shuffled_order(std::int64_t n, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  SampleRandom random({derive_key(seed, Purpose::order, epoch), 0});
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

}  // namespace mixtape::io
