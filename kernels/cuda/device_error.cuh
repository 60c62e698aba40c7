// Reporting a bad index or label from a kernel (engine/device_error.h): the first report of a
// device wins and is thrown by the next synchronisation.
#pragma once

#include <cstdint>

#include "engine/device_error.h"
#include "engine/stream.h"

namespace mixtape::kernels::cuda {

/// What a kernel needs to report under an op's name; pass by value.
struct ErrorTarget {
  DeviceError* slot;
  std::int32_t op;
};

inline ErrorTarget error_target(const Stream& stream, const char* op) {
  return {device_error_slot(stream.device()), device_error_op_id(op)};
}

/// `value` is outside [0, bound).
__device__ inline void report_error(ErrorTarget target, std::int64_t value, std::int64_t bound) {
  volatile DeviceError* slot = target.slot;
  if (slot->set != 0 || atomicCAS_system(&target.slot->set, 0u, 1u) != 0u) return;
  slot->op = target.op;
  slot->value = value;
  slot->bound = bound;
  __threadfence_system();
  slot->set = 2;
}

/// Whether 0 <= value < bound; reports if not.
__device__ __forceinline__ bool check_index(ErrorTarget target, std::int64_t value,
                                            std::int64_t bound) {
  if (static_cast<std::uint64_t>(value) < static_cast<std::uint64_t>(bound)) return true;
  report_error(target, value, bound);
  return false;
}

}  // namespace mixtape::kernels::cuda
