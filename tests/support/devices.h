// Where a test runs. ctest runs a binary labelled cpu and cuda once for each, and says which in
// MIXTAPE_TEST_DEVICE; run by hand, a test covers every device of the machine.
#pragma once

#include <cstdlib>
#include <string_view>
#include <vector>

#include "engine/device.h"

namespace mixtape::testing {

/// "cpu", "cuda", or empty when ctest did not choose.
inline std::string_view chosen_device() {
  const char* chosen = std::getenv("MIXTAPE_TEST_DEVICE");
  return chosen == nullptr ? "" : chosen;
}

/// The devices that a test loops over.
inline std::vector<Device> test_devices() {
  std::vector<Device> devices;
  if (chosen_device() != "cuda") devices.push_back(Device::cpu());
  if (chosen_device() != "cpu" && cuda_device_count() > 0) devices.push_back(Device::cuda());
  return devices;
}

}  // namespace mixtape::testing
