// Errors found by kernels (an index or label out of range). A kernel never reads out of bounds and
// never asserts: it writes the first bad (op, value, bound) to the device's slot, in host-mapped
// memory, and the next synchronisation throws it. Optimizers skip their step while it is set.
#pragma once

#include <cstdint>

#include "engine/device.h"
#include "engine/half.h"

namespace mixtape {

/// Plain data shared with the device. Errors are numbered from 1: the device writes the fields of
/// number `taken` + 1, if any, and then that number to `reported`; the host throws it and raises
/// `taken`. Each counter has one writer, and no report can land in a slot that is being cleared.
struct DeviceError {
  std::uint32_t reported = 0;  // written by the device
  std::uint32_t taken = 0;     // written by the host
  std::int32_t op = 0;         // device_error_op_id
  std::int64_t value = 0;
  std::int64_t bound = 0;  // valid values are [0, bound)
};
/// Whether the slot holds an error that was not thrown yet; as of now, on either side.
MT_HOST_DEVICE inline bool is_pending(const volatile DeviceError& error) {
  return error.reported != error.taken;
}

/// The slot of `device` as the device sees it (host-mapped); for the CPU nullptr: CPU kernels
/// throw.
DeviceError* device_error_slot(Device device);
/// A small number for an op name, to pass into kernels.
std::int32_t device_error_op_id(const char* op);
/// Throws and clears what the slot holds; no synchronisation of its own. No effect for the CPU.
void throw_device_error(Device device);

}  // namespace mixtape
