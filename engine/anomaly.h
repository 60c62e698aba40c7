// Anomaly mode: while it is on, every node remembers where it was recorded, and backward stops at
// the first gradient that holds a NaN, naming the op and that place. Slow; for finding a fault.
#pragma once

#include <string>

namespace mixtape {

/// Turns anomaly mode on (for all threads) until the scope ends.
class AnomalyMode {
 public:
  explicit AnomalyMode(bool on = true);
  ~AnomalyMode();
  AnomalyMode(const AnomalyMode&) = delete;
  AnomalyMode& operator=(const AnomalyMode&) = delete;

 private:
  bool previous_;
};
bool anomaly_enabled();

/// Module path and the calling functions, innermost first, without Mixtape's own.
std::string describe_call_site();

}  // namespace mixtape
