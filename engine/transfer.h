// Copies of raw bytes between host and devices, queued on a stream.
#pragma once

#include <cstddef>

#include "engine/device.h"
#include "engine/stream.h"

namespace mixtape {

/// Copies n bytes from src on src_device to dst on dst_device. CPU to CPU is done on return. With a
/// CUDA side the copy is queued on `stream` (of that side; the destination's for device to device).
/// Host memory that is not pinned is safe: the call returns only when it may be reused. Pinned host
/// memory returns at once (the caller keeps it alive through record_stream or an event).
void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, std::size_t n,
                const Stream& stream);
/// Sets n bytes to `value`, queued on `stream`.
void set_bytes(void* dst, int value, std::size_t n, const Stream& stream);

}  // namespace mixtape
