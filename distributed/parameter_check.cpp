#include "distributed/parameter_check.h"

#include <cstring>

#include "engine/grad_mode.h"

namespace mixtape::distributed {
namespace {

/// The finaliser of MurmurHash3 (Appleby 2011): every bit of x changes half of the result's.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

}  // namespace

std::uint64_t hash_of(const Tensor& t) {
  const NoGrad no_grad;
  const Tensor host = t.detach().cpu().contiguous();
  const auto* bytes = static_cast<const char*>(host.raw_data());
  const std::size_t size = static_cast<std::size_t>(host.numel()) * size_of(host.dtype());
  std::uint64_t hash = mix(size);
  for (std::size_t i = 0; i < size; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min<std::size_t>(8, size - i));
    hash = mix(hash ^ word) + i;
  }
  return hash;
}

void check_same_tensors(const Communicator& group, const std::string& what,
                        const std::vector<nn::NamedTensor>& tensors, bool values) {
  std::vector<TensorSummary> summaries;
  for (const nn::NamedTensor& n : tensors) {
    const Tensor& t = n.tensor;
    const bool frozen = is_floating(t.dtype()) && !t.requires_grad();
    summaries.push_back({.name = frozen ? n.name + " (frozen)" : n.name,
                         .shape = t.shape(),
                         .dtype = t.dtype(),
                         .hash = values ? hash_of(t) : 0});
  }
  check_same_on_all_ranks(group, what, summaries);
}

}  // namespace mixtape::distributed
