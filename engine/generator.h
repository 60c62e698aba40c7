// Random generators: one for each device, counter-based, so that a draw is a (seed, offset) pair
// that can be saved, restored and replayed.
#pragma once

#include <cstdint>

#include "engine/device.h"
#include "engine/philox.h"

namespace mixtape {

/// Seeds the generators of all devices and sets their offsets to 0.
void manual_seed(std::uint64_t seed);

/// Takes the state for a draw of n elements from the device's generator and advances it.
/// Thread-safe.
PhiloxState draw_random(Device device, std::int64_t n);

/// Takes the state and advances it by `blocks` Philox counters.
PhiloxState advance_random(Device device, std::uint64_t blocks);

/// The generator's state: the next draw starts from it. Save it in checkpoints.
PhiloxState random_state(Device device);
void set_random_state(Device device, PhiloxState state);

}  // namespace mixtape
