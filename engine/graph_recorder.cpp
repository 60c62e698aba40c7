#include "engine/graph_recorder.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "engine/cuda/backend.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "engine/op_scope.h"
#include "kernels/elementwise.h"

namespace mixtape {

thread_local constinit GraphRecorder* graph_recorder = nullptr;

namespace {

std::atomic<std::uint32_t> last_id{0};

std::string name_of(const TensorImpl& leaf) {
  return leaf.leaf && !leaf.leaf->name.empty() ? leaf.leaf->name : "a parameter";
}

const void* address_of(const TensorImpl& t) {
  return static_cast<const char*>(t.storage->data()) +
         t.offset * static_cast<std::int64_t>(size_of(t.dtype));
}

}  // namespace

GraphRecorder::GraphRecorder(Device device) : device_(device), id_(++last_id) {
  // Made before the capture, in memory that nothing of the graph reuses.
  random_ = Tensor::empty({2}, Dtype::i64, device);
}

// ---- notes during the capture ------------------------------------------------------------------

bool GraphRecorder::outside(const Storage& s) const { return s.captured_by() != id_; }

void GraphRecorder::note_read(const Tensor& t) {
  if (!t) return;
  TensorImpl& impl = t.get();
  if (outside(*impl.storage)) reads_.try_emplace(impl.storage.get(), impl.storage);
  if (impl.requires_grad && !impl.grad_fn && !impl.is_view && outside(*impl.storage)) leaf_of(impl);
}

void GraphRecorder::note_write(Storage& storage) {
  if (outside(storage)) writes_.try_emplace(&storage, Ref<Storage>::share(&storage));
}

GraphRecorder::Leaf& GraphRecorder::leaf_of(TensorImpl& impl) {
  const auto [it, fresh] = leaves_.try_emplace(&impl);
  Leaf& leaf = it->second;
  if (fresh) {
    leaf.impl = Ref<TensorImpl>::share(&impl);
    leaf.data = address_of(impl);
    if (impl.leaf) {
      leaf.before = impl.leaf->state;
      leaf.scaled_before = impl.leaf->scaled;
    }
  }
  return leaf;
}

void GraphRecorder::note_leaf(TensorImpl& impl, bool reset) {
  const bool fresh = !leaves_.contains(&impl);
  Leaf& leaf = leaf_of(impl);
  if (fresh && reset) leaf.any_before = true;
}

void GraphRecorder::note_shadow(TensorImpl& impl) {
  Leaf& leaf = leaf_of(impl);
  const Tensor& shadow = impl.leaf->shadow;
  if (!leaf.shadow && outside(*shadow.impl()->storage)) leaf.shadow = shadow;
}

PhiloxState GraphRecorder::draw(std::uint64_t blocks) {
  const PhiloxState state{0, drawn_, static_cast<const std::uint64_t*>(random_.raw_data())};
  drawn_ += blocks;
  return state;
}

void GraphRecorder::finish(const std::vector<Tensor>& outputs) {
  for (auto& [impl, leaf] : leaves_) {
    const LeafGrad* grad = impl->leaf;
    if (grad == nullptr) continue;
    leaf.after = grad->state;
    leaf.scaled_after = grad->scaled;
    if (grad->flat && grad->gradient) leaf.gradient = grad->gradient.raw_data();
    MT_CHECK(leaf.after == GradState::none || grad->flat, "capture: the step leaves a gradient in ",
             name_of(*impl),
             ", which no optimizer holds; build its optimizer before the first call, or call "
             "zero_grad() in the step");
    leaf.shadow_fresh_after = grad->shadow && grad->shadow_version == impl->storage->version() &&
                              outside(*grad->shadow.impl()->storage);
    if (leaf.shadow_fresh_after) leaf.shadow = grad->shadow;
  }
  for (const Tensor& t : outputs) {
    if (t) writes_.try_emplace(t.impl()->storage.get(), t.impl()->storage);
  }
}

void GraphRecorder::abandon() {
  for (auto& [impl, leaf] : leaves_) {
    if (impl->leaf == nullptr) continue;
    impl->leaf->state = leaf.before;
    impl->leaf->scaled = leaf.scaled_before;
    // The versions of what the step would have written have moved; so have the copies' sources.
    impl->leaf->shadow = {};
  }
}

// ---- replays -----------------------------------------------------------------------------------

void GraphRecorder::check(const Leaf& leaf) const {
  const TensorImpl& impl = *leaf.impl;
  MT_CHECK(address_of(impl) == leaf.data, "capture: ", name_of(impl),
           " has moved since the step was captured: expected its memory at ", leaf.data, ", got ",
           address_of(impl), "; call reset() on the captured step");
  const LeafGrad* grad = impl.leaf;
  if (grad == nullptr) return;
  MT_CHECK(
      leaf.gradient == nullptr || (grad->gradient && grad->gradient.raw_data() == leaf.gradient),
      "capture: the gradient of ", name_of(impl),
      " has moved since the step was captured; call reset() on the captured step");
  const auto text = [](GradState s) {
    return s == GradState::none ? "empty" : s == GradState::valid ? "present" : "incomplete";
  };
  MT_CHECK(leaf.any_before || grad->state == leaf.before,
           "capture: the step was captured with the "
           "gradient of ",
           name_of(impl), ' ', text(leaf.before), ", and it is now ", text(grad->state),
           "; expected the same at every call");
}

void GraphRecorder::prepare_replay() {
  const NoGrad no_grad;
  for (auto& [impl, leaf] : leaves_) {
    check(leaf);
    if (!leaf.shadow || impl->leaf == nullptr) continue;
    LeafGrad& grad = *impl->leaf;
    const std::uint32_t version = impl->storage->version();
    if (grad.shadow.same(leaf.shadow) && grad.shadow_version == version) continue;
    kernels::copy(Stream::current(device_), leaf.shadow.view(), Tensor(leaf.impl).view());
    grad.shadow = leaf.shadow;
    grad.shadow_version = version;
  }
  for (const auto& hook : hooks_) hook();
  if (drawn_ == 0) return;
  const PhiloxState now = advance_random(device_, drawn_);
  const auto set = [&](int i, std::uint64_t value) {
    View v = random_.view();
    v.data = static_cast<std::uint64_t*>(v.data) + i;
    v.sizes = {1};
    kernels::fill(Stream::current(device_), v, Scalar(static_cast<std::int64_t>(value)));
  };
  set(0, now.seed);
  set(1, now.offset);
}

void GraphRecorder::complete_replay() {
  for (auto& [storage, ref] : writes_) storage->bump_version();
  for (auto& [impl, leaf] : leaves_) {
    if (impl->leaf == nullptr) continue;
    LeafGrad& grad = *impl->leaf;
    grad.state = leaf.after;
    grad.scaled = leaf.scaled_after;
    if (leaf.shadow_fresh_after) grad.shadow_version = impl->storage->version();
  }
}

// ---- outside -----------------------------------------------------------------------------------

OutsideCapture::OutsideCapture(Device device)
    : device_(device), recorder_(std::exchange(graph_recorder, nullptr)) {
  if (recorder_ == nullptr || device.is_cpu()) return;
  pool_ = cudart::exchange_memory_pool(device.index, 0);
  stream_ = std::make_unique<StreamGuard>(Stream::create(device));
}

OutsideCapture::~OutsideCapture() noexcept(false) {
  struct Restore {
    OutsideCapture* self;
    ~Restore() {
      if (self->stream_) {
        self->stream_.reset();
        cudart::exchange_memory_pool(self->device_.index, self->pool_);
      }
      graph_recorder = self->recorder_;
    }
  } restore{this};
  if (stream_) cudart::synchronize_beside_capture(device_.index, Stream::current(device_).native());
}

}  // namespace mixtape
