#include "engine/autocast.h"

#include <iomanip>
#include <sstream>

#include "engine/cast_op.h"
#include "engine/grad_mode.h"
#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "kernels/elementwise.h"

namespace mixtape {
namespace {

const char* name_of(Cast cast) {
  switch (cast) {
    case Cast::low: return "low";
    case Cast::full: return "full";
    case Cast::widest: return "widest";
    case Cast::keep: return "keep";
  }
  return "?";
}

thread_local std::vector<amp::PolicyUse> uses;
thread_local std::size_t current_use = 0;

/// The leaf's 16-bit copy at its present version, made or remade if needed.
Tensor fresh_shadow(const Tensor& leaf_tensor, Dtype dtype, bool& hit) {
  LeafGrad& leaf = leaf_grad(*leaf_tensor.impl());
  const std::uint32_t version = leaf_tensor.version();
  hit = leaf.shadow && leaf.shadow.dtype() == dtype && leaf.shadow_version == version &&
        leaf.shadow.shape() == leaf_tensor.shape() && leaf.shadow.device() == leaf_tensor.device();
  if (hit) {
    if (graph_recorder != nullptr) [[unlikely]]
      graph_recorder->note_shadow(*leaf_tensor.impl());
    return leaf.shadow;
  }
  const NoGrad no_grad;
  const bool reusable =
      leaf.shadow && leaf.shadow.dtype() == dtype && leaf.shadow.shape() == leaf_tensor.shape() &&
      leaf.shadow.device() == leaf_tensor.device() && leaf.shadow.impl()->use_count() == 1 &&
      leaf.shadow.impl()->storage->use_count() == 1;
  if (!reusable) leaf.shadow = Tensor::empty(leaf_tensor.shape(), dtype, leaf_tensor.device());
  leaf.shadow.impl()->inference = false;
  kernels::copy(Stream::current(leaf_tensor.device()), leaf.shadow.view(), leaf_tensor.view());
  leaf.shadow_version = version;
  return leaf.shadow;
}

/// A handle on `data` whose history is a cast of `source`: what apply(CastOp) would return, without
/// running the kernel.
Tensor record_cast(const Tensor& source, const Tensor& data) {
  Tensor out = data.detach();
  if (!thread_state.grad || !source.requires_grad()) return out;
  const CastOp op{data.dtype()};
  Ref<Node> node = Node::create(op_table<CastOp>, &op);
  node->device = source.device();
  node->stream = Stream::current(source.device());
  node->edges.push_back(gradient_edge(source));
  node->inputs.push_back(meta_of(source));
  node->outputs.push_back(meta_of(out));
  node->saved = Saved::of(*node);
  out.impl()->grad_fn = std::move(node);
  return out;
}

}  // namespace

Autocast::Autocast(Dtype dtype, bool enabled, bool cache) : previous_(thread_state) {
  MT_CHECK(is_low_precision(dtype), "Autocast: expected float16 or bfloat16, got ", dtype);
  if (!previous_.autocast && enabled) uses.clear();
  thread_state.autocast = enabled;
  thread_state.autocast_dtype = dtype;
  thread_state.autocast_cache = cache;
}
Autocast::Autocast(bool enabled) : previous_(thread_state) {
  if (!previous_.autocast && enabled) uses.clear();
  thread_state.autocast = enabled;
}
Autocast::~Autocast() {
  thread_state.autocast = previous_.autocast;
  thread_state.autocast_dtype = previous_.autocast_dtype;
  thread_state.autocast_cache = previous_.autocast_cache;
}

Tensor autocast_low(const Tensor& t) {
  const Dtype dtype = thread_state.autocast_dtype;
  if (!is_floating(t.dtype()) || t.dtype() == Dtype::f64 || t.dtype() == dtype) return t;
  const std::uint64_t bytes = static_cast<std::uint64_t>(t.numel()) * size_of(dtype);
  const TensorImpl& impl = *t.impl();
  if (thread_state.autocast_cache && impl.requires_grad && t.dtype() == Dtype::f32 &&
      !impl.is_view) {
    bool hit = false;
    const Tensor data = fresh_shadow(t, dtype, hit);
    amp::detail::note_cast(hit ? 0 : bytes, hit);
    return record_cast(t, data);
  }
  amp::detail::note_cast(bytes, false);
  return apply(CastOp{dtype}, {t});
}

namespace amp {

std::vector<PolicyUse> last_step() { return uses; }

std::string explain() {
  std::ostringstream out;
  out << std::left << std::setw(24) << "op" << std::setw(8) << "policy" << std::right
      << std::setw(8) << "calls" << std::setw(8) << "casts" << std::setw(10) << "cached"
      << std::setw(16) << "bytes cast"
      << "\n";
  for (const PolicyUse& use : uses) {
    out << std::left << std::setw(24) << use.op << std::setw(8) << name_of(use.cast) << std::right
        << std::setw(8) << use.calls << std::setw(8) << use.casts << std::setw(10) << use.cache_hits
        << std::setw(16) << use.cast_bytes << "\n";
  }
  return out.str();
}

namespace detail {

void note_call(const OpInfo& info) {
  for (std::size_t i = 0; i < uses.size(); ++i) {
    if (uses[i].op == info.name) {
      current_use = i;
      ++uses[i].calls;
      return;
    }
  }
  current_use = uses.size();
  uses.push_back({info.name, info.cast, 1, 0, 0, 0});
}

void note_cast(std::uint64_t bytes, bool cache_hit) {
  if (current_use >= uses.size()) return;
  ++uses[current_use].casts;
  uses[current_use].cast_bytes += bytes;
  uses[current_use].cache_hits += cache_hit;
}

}  // namespace detail
}  // namespace amp
}  // namespace mixtape
