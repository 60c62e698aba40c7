// Kernel times from CUPTI's activity interface. The library is loaded when a profile starts, so
// that a program does not need it to run; whatever is missing or refused (library, device,
// permission, another tool) is an Error that says what. One recording at a time. Internal:
// engine/profiler.h.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/profile_events.h"

namespace mixtape::cupti {

struct Activities {
  std::vector<DeviceActivity> device;
  std::vector<ApiCall> calls;  // those from within a range
  std::uint64_t lost = 0;      // records that CUPTI dropped
};

/// Begins to record on all devices. Throws Error, with everything off again.
void start();
/// Waits for CUPTI's buffers, and drops or hands over what they hold. The devices must be idle.
void discard();
Activities take();
/// Ends recording; what was not taken is dropped.
void stop() noexcept;

/// Names the range (HostRange::id) that this thread's CUDA calls belong to until pop(). They nest.
void push(std::uint64_t range) noexcept;
void pop() noexcept;

}  // namespace mixtape::cupti
