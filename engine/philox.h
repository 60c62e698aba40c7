// Counter-based random numbers: Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011). Element i of a draw uses counter offset + i / 4, lane i %
// 4, so the same (seed, offset) gives the same numbers on every backend, in any order and thread
// count.
#pragma once

#include <cstdint>

#include "engine/half.h"

namespace mixtape {

struct Philox4 {
  std::uint32_t v[4];
};

/// State of one draw: key = seed, 64-bit counter = offset + block. In a captured graph `base`
/// points to the replay's {seed, offset} in device memory; the seed is then that one and the offset
/// counts from it, so that each replay draws new numbers.
struct PhiloxState {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::uint64_t* base = nullptr;
  friend bool operator==(const PhiloxState&, const PhiloxState&) = default;
};

MT_HOST_DEVICE inline std::uint32_t philox_mulhi(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(a) * b) >> 32);
}

/// Four 32-bit random words of counter block `block` (the upper 64 counter bits are zero).
MT_HOST_DEVICE inline Philox4 philox(PhiloxState s, std::uint64_t block) {
  if (s.base != nullptr) s = {s.base[0], s.base[1] + s.offset, nullptr};
  const std::uint64_t counter = s.offset + block;
  std::uint32_t c0 = static_cast<std::uint32_t>(counter),
                c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = 0, c3 = 0;
  std::uint32_t k0 = static_cast<std::uint32_t>(s.seed),
                k1 = static_cast<std::uint32_t>(s.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t h0 = philox_mulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const std::uint32_t h1 = philox_mulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Uniform in [0, 1): the upper 24 bits, so that every value is exact in float.
MT_HOST_DEVICE inline float uniform_from_bits(std::uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

/// Element i of a uniform draw.
MT_HOST_DEVICE inline float philox_uniform(PhiloxState s, std::uint64_t i) {
  return uniform_from_bits(philox(s, i / 4).v[i % 4]);
}

/// Number of counter blocks that a draw of n elements uses (what offset advances by).
constexpr std::uint64_t philox_blocks(std::uint64_t n) { return (n + 3) / 4; }

}  // namespace mixtape
