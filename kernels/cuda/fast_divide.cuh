// Division by a number that is fixed for a kernel launch: one multiply-high, one add, one shift
// instead of some twenty instructions. Granlund and Montgomery, "Division by invariant integers
// using multiplication" (PLDI 1994). Dividends below 2^31.
#pragma once

#include <cstdint>

#include "engine/half.h"

namespace mixtape::kernels::cuda {

struct FastDivide {
  std::uint32_t divisor = 1, magic = 1, shift = 0;

  FastDivide() = default;
  /// 1 <= d < 2^31.
  explicit FastDivide(std::int64_t d) : divisor(static_cast<std::uint32_t>(d)) {
    while (shift < 31 && (1u << shift) < divisor) ++shift;
    const std::uint64_t one = 1;
    magic = static_cast<std::uint32_t>(((one << 32) * ((one << shift) - divisor)) / divisor + 1);
  }

  MT_HOST_DEVICE std::uint32_t quotient(std::uint32_t n) const {
#if defined(__CUDA_ARCH__)
    return (__umulhi(n, magic) + n) >> shift;
#else
    return static_cast<std::uint32_t>((((static_cast<std::uint64_t>(n) * magic) >> 32) + n) >>
                                      shift);
#endif
  }
  /// n / divisor; n becomes n % divisor.
  MT_HOST_DEVICE std::uint32_t divide(std::uint32_t& n) const {
    const std::uint32_t q = quotient(n);
    n -= q * divisor;
    return q;
  }
};

}  // namespace mixtape::kernels::cuda
