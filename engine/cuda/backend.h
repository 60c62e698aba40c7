// The CUDA runtime as the rest of engine/ sees it: no CUDA types, so that it is included
// everywhere. engine/cuda/*.cpp implements it over the runtime, engine/cuda/absent.cpp for builds
// without CUDA, where device_count() is 0 and the rest throws. Streams and events are passed as
// opaque pointers with the device they belong to. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/device_error.h"
#include "engine/stream.h"

namespace mixtape::detail {
class CachingAllocator;
}

namespace mixtape::cudart {

inline constexpr int kMaxDevices = 64;

/// Usable devices; 0 without a driver. Never throws.
int device_count() noexcept;
/// Why device_count() is 0: "this build has no CUDA ...", or the driver's text.
std::string unavailable_reason();
int current_device();
void set_current_device(int device);
/// As set_current_device for the end of a scope: an error of earlier work is left for the next
/// call.
void restore_current_device(int device) noexcept;
/// Throws in a child process forked after CUDA was initialised, where CUDA cannot work.
void check_not_forked();
bool in_forked_child() noexcept;

/// From a pool of 32 a device and priority, handed out in turn.
void* create_stream(int device, bool high_priority);
void synchronize_stream(int device, void* stream);
void synchronize_device(int device);
/// Waits for a stream that is not part of the capture that this thread has under way.
void synchronize_beside_capture(int device, void* stream);
bool is_capturing(int device, void* stream);

/// A recorded graph, ready to launch.
struct CapturedGraph {
  void* executable = nullptr;
  std::size_t nodes = 0;
};
/// The stream that captures of `device` record on; nothing else uses it.
void* capture_stream(int device);
void begin_capture(int device, void* stream);
CapturedGraph end_capture(int device, void* stream);
/// Ends a capture that failed.
void abandon_capture(int device, void* stream) noexcept;
void launch_graph(int device, void* executable, void* stream);
void destroy_graph(int device, void* executable) noexcept;
/// Waits and leaves errors for the next call that reports them.
void synchronize_device_quietly(int device) noexcept;

/// Events without timing are recycled through a pool.
void* acquire_event(int device, bool timing);
void release_event(int device, bool timing, void* event) noexcept;
void record_event(int device, void* event, void* stream);
bool event_done(int device, void* event);
void synchronize_event(int device, void* event);
void wait_event(int device, void* stream, void* event);
double elapsed_ms(void* from, void* to);

void copy(void* dst, Device dst_device, const void* src, Device src_device, std::size_t n,
          const Stream& stream);
void set(int device, void* dst, int value, std::size_t n, void* stream);

/// Host-mapped and zeroed; lives until the process ends.
DeviceError* error_slot(int device);
/// Throws a launch error and, when `wait`, waits for the stream and throws what it reports.
void check_kernel(const char* kernel, int device, void* stream, bool wait);

detail::CachingAllocator& device_allocator(int device);
/// A pool of a device's memory that only the threads that entered it allocate from
/// (engine/memory_pool.h). Number 0 is the common one.
std::uint64_t create_memory_pool(int device);
void release_memory_pool(int device, std::uint64_t pool) noexcept;
/// Enters a pool on this thread and returns the one it was in.
std::uint64_t exchange_memory_pool(int device, std::uint64_t pool) noexcept;
detail::CachingAllocator& pinned_allocator();

}  // namespace mixtape::cudart
