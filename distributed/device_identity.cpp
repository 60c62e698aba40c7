#include "distributed/device_identity.h"

#if defined(MIXTAPE_WITH_CUDA)
#include "engine/cuda/cuda_check.h"
#endif

namespace mixtape::distributed {

#if defined(MIXTAPE_WITH_CUDA)
std::string device_uuid(Device device) {
  if (device.is_cpu()) return "";
  cudaDeviceProp properties{};
  MT_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(properties.uuid.bytes[i]);
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}
#else
std::string device_uuid(Device) { return ""; }
#endif

}  // namespace mixtape::distributed
