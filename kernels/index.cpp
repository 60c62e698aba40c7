// Scratch sizes of the index kernels by device.
#include "kernels/index.h"

namespace mixtape::kernels {

std::size_t index_add_workspace_bytes([[maybe_unused]] Device device, std::int64_t count,
                                      std::int64_t rows, [[maybe_unused]] std::int64_t width) {
#if defined(MIXTAPE_WITH_CUDA)
  if (device.is_cuda()) return cuda::index_add_workspace_bytes(count, rows, width);
#endif
  return static_cast<std::size_t>(count + rows + 2) * sizeof(std::int64_t);
}

}  // namespace mixtape::kernels
