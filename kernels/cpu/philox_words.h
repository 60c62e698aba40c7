// Philox on a SIMD register's worth of counters at once, for random fills and for dropout inside
// other kernels. The words are those of philox() in engine/philox.h.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "engine/philox.h"
#include "kernels/cpu/packet.h"

namespace mixtape::kernels::cpu {

using PhiloxWords = Packet::UInts;
typedef std::uint64_t PhiloxPairs __attribute__((vector_size(Packet::kLanes * 4)));

/// Products of the even lanes, 64 bits each.
inline PhiloxPairs philox_multiply_even(PhiloxWords a, PhiloxWords b) {
#if defined(__AVX512F__)
  return (PhiloxPairs)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (PhiloxPairs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return ((PhiloxPairs)a & 0xFFFFFFFFu) * ((PhiloxPairs)b & 0xFFFFFFFFu);
#endif
}

/// Upper and lower words of the 64-bit products a * b.
struct PhiloxProduct {
  PhiloxWords high, low;
  PhiloxProduct(PhiloxWords a, std::uint32_t factor) {
    const PhiloxWords b = PhiloxWords{} + factor;
    const PhiloxPairs even = philox_multiply_even(a, b),
                      odd = philox_multiply_even((PhiloxWords)((PhiloxPairs)a >> 32), b);
    const PhiloxPairs lower = PhiloxPairs{} + 0xFFFFFFFFu;
    high = (PhiloxWords)((even >> 32) | (odd & ~lower));
    low = (PhiloxWords)((even & lower) | (odd << 32));
  }
};

/// The words of counter blocks [first, first + Packet::kLanes): words[4 * block + lane]. As
/// philox() of engine/philox.h.
inline void philox_words(PhiloxState state, std::uint64_t first, std::uint32_t* words) {
  std::array<PhiloxWords, 4> c{};
  for (std::int64_t k = 0; k < Packet::kLanes; ++k) {
    const std::uint64_t counter = state.offset + first + static_cast<std::uint64_t>(k);
    c[0][k] = static_cast<std::uint32_t>(counter);
    c[1][k] = static_cast<std::uint32_t>(counter >> 32);
  }
  auto k0 = static_cast<std::uint32_t>(state.seed);
  auto k1 = static_cast<std::uint32_t>(state.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const PhiloxProduct p0(c[0], 0xD2511F53u), p1(c[2], 0xCD9E8D57u);
    c = {p1.high ^ c[1] ^ k0, p1.low, p0.high ^ c[3] ^ k1, p0.low};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  std::uint32_t lanes[4][Packet::kLanes];
  std::memcpy(lanes, c.data(), sizeof lanes);
  for (std::int64_t k = 0; k < Packet::kLanes; ++k)
    for (std::int64_t l = 0; l < 4; ++l) words[4 * k + l] = lanes[l][k];
}

}  // namespace mixtape::kernels::cpu
