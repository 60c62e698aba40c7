// Scratch sizes of the reductions by device.
#include "kernels/reduce.h"

namespace mixtape::kernels {

std::size_t reduce_workspace_bytes([[maybe_unused]] const View& out, const View& x) {
#if defined(MIXTAPE_WITH_CUDA)
  if (x.device.is_cuda()) return cuda::reduce_workspace_bytes(out, x);
#endif
  MT_CHECK(x.device.is_cpu(), "reduce: this build has no CUDA backend");
  return 0;
}

}  // namespace mixtape::kernels
