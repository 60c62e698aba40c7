// Random generators: one for each device, counter-based, so that a draw is a (seed, offset) pair
// that can be saved, restored and replayed.
#pragma once

#include <cstdint>
#include <vector>

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

/// The draws of a piece of code, so that it can run again on the same numbers. This holds for the
/// thread alone, whatever others draw, and within a captured step, where a draw is relative to the
/// replay's state.
struct RandomDraw {
  Device device;
  std::uint64_t blocks;
  PhiloxState state;
};
/// Until its end notes this thread's draws in `draws`, or (replay) gives it those again in order; a
/// replayed draw of another size, on another device or beyond their number is an error.
class DrawScope {
 public:
  enum class Mode : std::uint8_t { record, replay };
  DrawScope(std::vector<RandomDraw>& draws, Mode mode);
  ~DrawScope();
  DrawScope(const DrawScope&) = delete;
  DrawScope& operator=(const DrawScope&) = delete;
  /// Replayed draws that were not asked for yet.
  std::size_t remaining() const { return draws_.size() - next_; }

 private:
  friend PhiloxState draw_random(Device device, std::int64_t n);
  static PhiloxState draw(DrawScope* scope, Device device, std::uint64_t blocks);

  std::vector<RandomDraw>& draws_;
  Mode mode_;
  std::size_t next_ = 0;
  DrawScope* outer_;
};

}  // namespace mixtape
