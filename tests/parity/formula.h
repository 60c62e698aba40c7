// Weights and tokens by formula, the same as formula.py makes them: what is compared with PyTorch
// needs no stored inputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/module.h"
#include "ops/ops.h"

namespace mixtape::testing {

/// splitmix64 of `n`.
inline std::uint64_t mixed(std::uint64_t n) {
  std::uint64_t z = n * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/// FNV-1a of the name, of which 32 bits are enough.
inline std::uint64_t seed_of(const std::string& name) {
  std::uint64_t h = 0xCBF29CE484222325u;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return h >> 32;
}

/// float32 in [-1, 1), multiples of 2^-23.
inline std::vector<float> uniform(const std::string& name, std::int64_t n) {
  std::vector<float> values;
  const std::uint64_t seed = seed_of(name);
  for (std::int64_t i = 0; i < n; ++i)
    values.push_back(
        static_cast<float>(mixed(seed + static_cast<std::uint64_t>(i)) >> 40) * 0x1p-23f - 1);
  return values;
}

/// A model's initial value: matrices around 0, norms' weights around 1, biases around 0.
inline Tensor formula_weight(const std::string& name, const Shape& shape, float matrix_scale,
                             float vector_scale) {
  std::vector<float> values = uniform(name, shape.numel());
  const bool matrix = shape.size() > 1, centred = matrix || name.ends_with("bias");
  for (float& v : values) {
    v *= matrix ? matrix_scale : vector_scale;
    if (!centred) v += 1;
  }
  return from_vector(values, shape);
}

/// A text to learn: mostly each token follows from the one before, one in eight is drawn.
inline Tensor formula_tokens(const std::string& name, std::int64_t n, std::int64_t vocabulary) {
  std::vector<std::int64_t> all;
  const std::uint64_t seed = seed_of(name), v = static_cast<std::uint64_t>(vocabulary);
  std::uint64_t last = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t bits = mixed(seed + static_cast<std::uint64_t>(i));
    last = bits % 8 == 0 ? (bits >> 8) % v : (5 * last + 3) % v;
    all.push_back(static_cast<std::int64_t>(last));
  }
  return from_vector(all, {n});
}

}  // namespace mixtape::testing
