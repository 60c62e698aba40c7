// Flat gradient buffers: see attach_flat_gradients in engine/node.h.
#include <map>
#include <utility>

#include "engine/node.h"
#include "engine/op.h"
#include "engine/tensor_detail.h"

namespace mixtape {
namespace {

constexpr std::int64_t kAlignment = 256;

/// 16-bit parameters accumulate their gradients in fp32 (they have fp32 masters).
Dtype gradient_dtype(const Tensor& p) {
  return is_low_precision(p.dtype()) ? Dtype::f32 : p.dtype();
}

std::int64_t padded_elements(const Tensor& p) {
  const std::int64_t unit = kAlignment / static_cast<std::int64_t>(size_of(gradient_dtype(p)));
  return (p.numel() + unit - 1) / unit * unit;
}

}  // namespace

void attach_flat_gradients(const std::vector<Tensor>& parameters) {
  using Key = std::pair<int, std::pair<int, int>>;
  std::map<Key, std::vector<Tensor>> groups;
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    MT_CHECK(p->is_leaf() && p->requires_grad(),
             "attach_flat_gradients: expected leaves that require gradients, got ", p->describe());
    if (leaf_grad(*p->impl()).flat) continue;
    const Device d = p->device();
    auto& group =
        groups[{static_cast<int>(gradient_dtype(*p)), {static_cast<int>(d.type), d.index}}];
    bool seen = false;
    for (const Tensor& q : group) seen |= q.same(*p);
    if (!seen) group.push_back(*p);
  }
  for (auto& [key, group] : groups) {
    std::int64_t total = 0;
    for (const Tensor& p : group) total += padded_elements(p);
    const Tensor flat = Tensor::empty({total}, gradient_dtype(group[0]), group[0].device());
    std::int64_t offset = 0;
    for (const Tensor& p : group) {
      LeafGrad& leaf = leaf_grad(*p.impl());
      Tensor view = make_view(flat, p.shape(), contiguous_strides(p.shape()), offset);
      offset += padded_elements(p);
      if (leaf.state == GradState::valid) detail::copy_into(view, leaf.gradient);
      leaf.gradient = std::move(view);
      leaf.flat = true;
    }
  }
}

}  // namespace mixtape
