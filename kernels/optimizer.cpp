// Scratch sizes of the optimizer kernels by device.
#include "kernels/optimizer.h"

namespace mixtape::kernels {

std::size_t gradient_norm_workspace_bytes(Device, std::int64_t chunks) {
  return static_cast<std::size_t>(chunks) * sizeof(double);
}

}  // namespace mixtape::kernels
