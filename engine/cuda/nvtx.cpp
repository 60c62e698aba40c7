// What NVTX returns is the depth, or a negative number where no tool listens; neither says whether
// a range was pushed, so both are ignored.
#include "engine/cuda/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace mixtape::nvtx {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("mixtape");
  return handle;
}

}  // namespace

bool available() noexcept { return true; }

void push(const char* name) noexcept {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop() noexcept { nvtxDomainRangePop(domain()); }

}  // namespace mixtape::nvtx
