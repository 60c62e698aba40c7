#include "engine/transfer.h"

#include <cstring>

#include "engine/check.h"
#include "engine/cuda/backend.h"

namespace mixtape {

void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, std::size_t n,
                const Stream& stream) {
  if (n == 0) return;
  if (dst_device.is_cpu() && src_device.is_cpu()) {
    std::memcpy(dst, src, n);
    return;
  }
  check_device("copy_bytes", dst_device);
  check_device("copy_bytes", src_device);
  const Device side = dst_device.is_cuda() ? dst_device : src_device;
  MT_CHECK(stream.device() == side, "copy_bytes: expected a stream of ", side, ", got one of ",
           stream.device());
  cudart::copy(dst, dst_device, src, src_device, n, stream);
}

void set_bytes(void* dst, int value, std::size_t n, const Stream& stream) {
  if (n == 0) return;
  if (stream.device().is_cpu())
    std::memset(dst, value, n);
  else
    cudart::set(stream.device().index, dst, value, n, stream.native());
}

}  // namespace mixtape
