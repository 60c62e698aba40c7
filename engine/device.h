// Where a tensor lives. A build without CUDA still has Device::cuda(): using it says what is
// missing.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

namespace mixtape {

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  std::int16_t index = 0;

  static Device cpu() { return {}; }
  /// The index-th visible CUDA device.
  static Device cuda(int index = 0) { return {DeviceType::cuda, static_cast<std::int16_t>(index)}; }
  /// The current CUDA device if this build has CUDA and the machine a usable device, else the CPU.
  static Device best();
  /// "cpu", "cuda" or "cuda:N"; throws on anything else.
  static Device parse(const std::string& text);

  bool is_cpu() const { return type == DeviceType::cpu; }
  bool is_cuda() const { return type == DeviceType::cuda; }
  friend bool operator==(const Device&, const Device&) = default;
};

std::ostream& operator<<(std::ostream& out, Device d);

/// Number of usable CUDA devices; 0 in a build without CUDA or on a machine without a driver.
int cuda_device_count();

/// Throws unless d can be used here: "... this build has no CUDA", "... machine has N CUDA
/// devices".
void check_device(const char* op, Device d);

}  // namespace mixtape
