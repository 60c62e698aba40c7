// A build without CUPTI.
#include "engine/check.h"
#include "engine/cuda/cupti.h"

namespace mixtape::cupti {

void start() {
  MT_THROW("cupti: this build has no CUPTI; configure it where cupti.h is installed");
}
void discard() {}
Activities take() { return {}; }
void stop() noexcept {}
void push(std::uint64_t) noexcept {}
void pop() noexcept {}

}  // namespace mixtape::cupti
