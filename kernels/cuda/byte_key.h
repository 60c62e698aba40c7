// Hash and equality of plan-cache keys by their bytes. A key has no padding and is
// value-initialised.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mixtape::kernels::cuda {

struct ByteHash {
  template <class Key>
  std::size_t operator()(const Key& key) const {
    static_assert(std::has_unique_object_representations_v<Key> && sizeof(Key) % 8 == 0);
    std::uint64_t words[sizeof(Key) / 8];
    std::memcpy(words, &key, sizeof(key));
    std::uint64_t h = 0x9E3779B97F4A7C15u;
    for (std::uint64_t word : words) {
      h = (h ^ word) * 0xFF51AFD7ED558CCDu;
      h ^= h >> 32;
    }
    return h;
  }
};
struct ByteEqual {
  template <class Key>
  bool operator()(const Key& a, const Key& b) const {
    return std::memcmp(&a, &b, sizeof(Key)) == 0;
  }
};

}  // namespace mixtape::kernels::cuda
