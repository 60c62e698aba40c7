#include "engine/build_info.h"

#include <initializer_list>
#include <utility>

namespace mixtape {

namespace {

constexpr bool kCuda =
#if defined(MIXTAPE_WITH_CUDA)
    true;
#else
    false;
#endif
constexpr bool kCudnn =
#if defined(MIXTAPE_WITH_CUDNN)
    true;
#else
    false;
#endif
constexpr bool kNccl =
#if defined(MIXTAPE_WITH_NCCL)
    true;
#else
    false;
#endif
constexpr bool kMpi =
#if defined(MIXTAPE_WITH_MPI)
    true;
#else
    false;
#endif
constexpr bool kOnednn =
#if defined(MIXTAPE_WITH_ONEDNN)
    true;
#else
    false;
#endif

}  // namespace

const BuildInfo& build_info() {
  static const BuildInfo info{MIXTAPE_VERSION, kCuda, kCudnn, kNccl, kMpi, kOnednn};
  return info;
}

std::string build_summary() {
  const BuildInfo& info = build_info();
  std::string with = "Eigen", without;
  for (const auto& [name, present] :
       std::initializer_list<std::pair<const char*, bool>>{{"oneDNN", info.onednn},
                                                           {"CUDA", info.cuda},
                                                           {"cuDNN", info.cudnn},
                                                           {"NCCL", info.nccl},
                                                           {"MPI", info.mpi}}) {
    if (present) {
      with += std::string(", ") + name;
    } else {
      without += (without.empty() ? "" : ", ") + std::string(name);
    }
  }
  if (!without.empty()) with += "; without " + without;
  return "Mixtape " + info.version + " (" + with + ")";
}

}  // namespace mixtape
