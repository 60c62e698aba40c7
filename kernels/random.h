// Random fills and dropout, counter-based (engine/philox.h): element i of a draw depends on (seed,
// offset, i) alone. Uniforms are bit-equal on both backends; normals (Box-Muller on lane pairs)
// agree within 2 ulp of float. `out` is contiguous, any dtype; values are made in float and rounded
// once.
#pragma once

#include "engine/philox.h"
#include "kernels/kernel.h"

namespace mixtape::kernels {

#define MT_DECLARE_RANDOM                                                                          \
  /* lo + (hi - lo) * u, u in [0, 1); never hi even after rounding to a 16-bit type. */            \
  void uniform(const Stream&, View out, PhiloxState state, double lo, double hi);                  \
  void normal(const Stream&, View out, PhiloxState state, double mean, double std);                \
  /* Integers in [lo, hi), hi - lo <= 2^32, by 64-bit multiply-shift of one word. */               \
  void randint(const Stream&, View out, PhiloxState state, std::int64_t lo, std::int64_t hi);      \
  /* out = x / (1 - p) where element i is kept, else 0. It is kept if 16 random bits of its own */ \
  /* (random_math.h) are at least 2^16 p rounded: with probability 1 - p to 2^-17, exactly for */  \
  /* p = 0, which keeps all, p = 1, which gives zeros, and multiples of 2^-16. The mask is the */  \
  /* same on both backends and for every dtype. Contiguous. The backward pass is this kernel on */ \
  /* dy: the mask is remade from `state`, never stored. */                                         \
  void dropout(const Stream&, View out, View x, double p, PhiloxState state);

namespace cpu {
MT_DECLARE_RANDOM
}
namespace cuda {
MT_DECLARE_RANDOM
}
#undef MT_DECLARE_RANDOM

inline constexpr Kernel uniform{"uniform", cpu::uniform, MT_CUDA(cuda::uniform)};
inline constexpr Kernel normal{"normal", cpu::normal, MT_CUDA(cuda::normal)};
inline constexpr Kernel randint{"randint", cpu::randint, MT_CUDA(cuda::randint)};
inline constexpr Kernel dropout{"dropout", cpu::dropout, MT_CUDA(cuda::dropout)};

}  // namespace mixtape::kernels
