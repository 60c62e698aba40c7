// Names of GPUs that are the same for every process that sees them. Internal.
#pragma once

#include <string>

#include "engine/device.h"

namespace mixtape::distributed {

/// "GPU-8d3c..." as nvidia-smi prints it (a MIG slice has its own); empty for the CPU.
std::string device_uuid(Device device);

}  // namespace mixtape::distributed
