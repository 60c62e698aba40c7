// Errors found by kernels (an index or label out of range). A kernel never reads out of bounds and
// never asserts: it writes the first bad (op, value, bound) to the device's slot, in host-mapped
// memory, and the next synchronisation throws it. Optimizers skip their step while it is set.
#pragma once

#include <cstdint>

#include "engine/device.h"

namespace mixtape {

/// Plain data shared with the device. `set` is claimed by compare-and-swap from 0 to 1, then the
/// fields are written, then `set` becomes 2.
struct DeviceError {
  std::uint32_t set = 0;
  std::int32_t op = 0;  // index into device_error_op_name
  std::int64_t value = 0;
  std::int64_t bound = 0;  // valid values are [0, bound)
};

/// The slot of `device` as the device sees it (host-mapped); for the CPU nullptr: CPU kernels
/// throw.
DeviceError* device_error_slot(Device device);
/// A small number for an op name, to pass into kernels.
std::int32_t device_error_op_id(const char* op);
/// Throws and clears what the slot holds; no synchronisation of its own. No effect for the CPU.
void throw_device_error(Device device);

}  // namespace mixtape
