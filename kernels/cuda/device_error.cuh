// Reporting a bad index or label from a kernel (engine/device_error.h): the first report of a
// device wins and is thrown by the next synchronisation.
//
// The winner is found by an atomic on a word of device memory, because the slot is host memory, on
// which atomics are slow and memory checkers refuse them. The word holds the number of the last
// error that was claimed and only grows, so nothing has to clear it when the host takes an error.
#pragma once

#include <cstdint>

#include "engine/device_error.h"
#include "engine/stream.h"

namespace mixtape::kernels::cuda {

/// What a kernel needs to report under an op's name; pass by value.
struct ErrorTarget {
  DeviceError* slot;
  std::uint32_t* claimed;
  std::int32_t op;
};

ErrorTarget error_target(const Stream& stream, const char* op);

/// `value` is outside [0, bound).
__device__ inline void report_error(ErrorTarget target, std::int64_t value, std::int64_t bound) {
  volatile DeviceError* slot = target.slot;
  const std::uint32_t number = slot->taken + 1;
  // An ordinary read first: of a million bad indices few get to the atomic.
  if (*static_cast<volatile std::uint32_t*>(target.claimed) >= number ||
      atomicMax(target.claimed, number) >= number)
    return;
  slot->op = target.op;
  slot->value = value;
  slot->bound = bound;
  __threadfence_system();
  slot->reported = number;
}

/// Whether 0 <= value < bound; reports if not.
__device__ __forceinline__ bool check_index(ErrorTarget target, std::int64_t value,
                                            std::int64_t bound) {
  if (static_cast<std::uint64_t>(value) < static_cast<std::uint64_t>(bound)) return true;
  report_error(target, value, bound);
  return false;
}

}  // namespace mixtape::kernels::cuda
