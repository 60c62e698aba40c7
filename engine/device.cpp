#include "engine/device.h"

#include <charconv>
#include <ostream>

#include "engine/check.h"
#include "engine/cuda/backend.h"

namespace mixtape {

Device Device::best() {
  return cuda_device_count() > 0 ? Device::cuda(cudart::current_device()) : Device::cpu();
}

Device Device::parse(const std::string& text) {
  if (text == "cpu") return Device::cpu();
  if (text == "cuda") return Device::cuda();
  constexpr std::string_view kPrefix = "cuda:";
  if (text.starts_with(kPrefix)) {
    int index = -1;
    const char* last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data() + kPrefix.size(), last, index);
    if (error == std::errc{} && end == last && index >= 0 && index < cudart::kMaxDevices)
      return Device::cuda(index);
  }
  MT_THROW("Device: expected \"cpu\", \"cuda\" or \"cuda:N\", got \"", text, '"');
}

std::ostream& operator<<(std::ostream& out, Device d) {
  if (d.is_cpu()) return out << "cpu";
  return out << "cuda:" << d.index;
}

int cuda_device_count() {
  static const int count = cudart::device_count();
  return count;
}

void check_device(const char* op, Device d) {
  if (d.is_cpu()) return;
  const int count = cuda_device_count();
  MT_CHECK(count > 0, op, ": cannot use ", d, ": ", cudart::unavailable_reason());
  MT_CHECK(d.index >= 0 && d.index < count, op, ": cannot use ", d, ": this machine has ", count,
           count == 1 ? " CUDA device" : " CUDA devices");
  cudart::check_not_forked();
}

}  // namespace mixtape
