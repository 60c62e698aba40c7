#include "engine/tensor.h"

#include <sstream>

#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "engine/op_scope.h"
#include "engine/profile_hooks.h"
#include "engine/tensor_detail.h"
#include "engine/transfer.h"

namespace mixtape {

void TensorImpl::destroy(TensorImpl* impl) noexcept {
  delete impl->leaf;
  impl->~TensorImpl();
  pool_free(impl, sizeof(TensorImpl));
}

namespace {
Ref<TensorImpl> new_impl() {
  return Ref<TensorImpl>::adopt(new (pool_allocate(sizeof(TensorImpl))) TensorImpl);
}
}  // namespace

Tensor Tensor::empty(const Shape& sizes, Dtype dtype, Device device) {
  for (std::int64_t s : sizes) MT_CHECK(s >= 0, "empty: expected sizes of at least 0, got ", sizes);
  Ref<TensorImpl> impl = new_impl();
  impl->storage = Storage::create(static_cast<std::size_t>(sizes.numel()) * size_of(dtype), device);
  impl->sizes = sizes;
  impl->strides = contiguous_strides(sizes);
  impl->dtype = dtype;
  impl->inference = thread_state.inference;
  return Tensor(std::move(impl));
}

Tensor make_view(const Tensor& t, const Shape& sizes, const Shape& strides, std::int64_t offset) {
  const TensorImpl& from = t.get();
  Ref<TensorImpl> impl = new_impl();
  impl->storage = from.storage;
  impl->sizes = sizes;
  impl->strides = strides;
  impl->offset = from.offset + offset;
  impl->dtype = from.dtype;
  impl->inference = from.inference || thread_state.inference;
  impl->is_view = true;
  impl->recorded_writes = from.storage->recorded_writes();
  return Tensor(std::move(impl));
}

TensorImpl& Tensor::get() const {
  if (!impl_) [[unlikely]] {
    const char* op = OpScope::current();
    MT_THROW(op ? op : "tensor", ": expected a tensor, got an undefined one");
  }
  return *impl_;
}

std::int64_t Tensor::size(int d) const { return shape()[normalize_dim("size", d, dim())]; }

std::string Tensor::describe() const {
  if (!impl_) return "undefined tensor";
  std::ostringstream out;
  out << dtype() << shape();
  if (!device().is_cpu()) out << " on " << device();
  return out.str();
}

View Tensor::view() const {
  const TensorImpl& t = get();
  View v;
  v.data = raw_data();
  v.sizes = t.sizes;
  v.strides = t.strides;
  v.dtype = t.dtype;
  v.device = t.storage->device();
  v.defined = true;
  return v;
}

void Tensor::check_data_access(const char* what, Dtype wanted) const {
  MT_CHECK(device().is_cpu(), what, ": expected a tensor on the CPU, got ", describe(),
           "; use .cpu()");
  MT_CHECK(dtype() == wanted, what, ": expected element type ", wanted, ", got ", dtype());
  MT_CHECK(is_contiguous(), what, ": expected a contiguous tensor, got ", describe(),
           " with strides ", strides(), "; use .contiguous()");
}

Scalar Tensor::item_scalar() const {
  const OpScope scope("item");
  const profile::Range range(ProfileKind::function, "item");
  MT_CHECK(numel() == 1, "item: expected one element, got ", describe());
  alignas(8) unsigned char bytes[8];
  const Stream stream = Stream::current(device());
  copy_bytes(bytes, Device::cpu(), raw_data(), device(), size_of(dtype()), stream);
  stream.synchronize();
  return dispatch_dtype(dtype(), [&](auto tag) -> Scalar {
    using T = typename decltype(tag)::type;
    const T value = *reinterpret_cast<const T*>(bytes);
    if constexpr (sizeof(T) == 2)
      return Scalar(static_cast<float>(value));
    else
      return Scalar(value);
  });
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  const OpScope scope("to_vector");
  const profile::Range range(ProfileKind::function, "to_vector");
  const Tensor host = detach().to(Device::cpu(), dtype_of<T>).contiguous();
  const T* begin = static_cast<const T*>(host.raw_data());
  return std::vector<T>(begin, begin + host.numel());
}
template std::vector<float> Tensor::to_vector() const;
template std::vector<double> Tensor::to_vector() const;
template std::vector<std::int64_t> Tensor::to_vector() const;
template std::vector<std::int32_t> Tensor::to_vector() const;
template std::vector<std::uint8_t> Tensor::to_vector() const;

// ---- gradients
// -------------------------------------------------------------------------------------

LeafGrad& leaf_grad(TensorImpl& impl) {
  if (!impl.leaf) impl.leaf = new LeafGrad;
  return *impl.leaf;
}

Tensor& Tensor::set_requires_grad(bool on) {
  TensorImpl& t = get();
  MT_CHECK(!on || is_floating(t.dtype), "set_requires_grad: expected a floating dtype, got ",
           describe());
  MT_CHECK(!on || !t.inference, "set_requires_grad: ", describe(), " was made in inference mode");
  MT_CHECK(!t.grad_fn || on, "set_requires_grad: this tensor is a result of ",
           t.grad_fn->table->info->name, "; use detach() to leave the tape");
  if (!t.grad_fn) t.requires_grad = on;
  return *this;
}

Tensor Tensor::grad() const {
  const TensorImpl& t = get();
  if (!t.leaf || t.leaf->state == GradState::none) return {};
  MT_CHECK(t.leaf->state == GradState::valid, "grad: the gradient of ",
           t.leaf->name.empty() ? describe() : t.leaf->name,
           " is incomplete because backward failed; call zero_grad() first");
  return t.leaf->gradient;
}

void Tensor::set_grad(const Tensor& gradient) {
  LeafGrad& leaf = leaf_grad(get());
  if (!gradient) return zero_grad();
  if (graph_recorder != nullptr) [[unlikely]]
    graph_recorder->note_leaf(get(), true);
  MT_CHECK_EQ(gradient.shape(), shape(), "set_grad: shape of the gradient");
  MT_CHECK(gradient.device() == device(), "set_grad: expected a gradient on ", device(), ", got ",
           gradient.describe());
  if (leaf.flat)
    detail::copy_into(leaf.gradient, gradient);
  else
    leaf.gradient = gradient;
  leaf.state = GradState::valid;
  leaf.scaled = false;
}

void Tensor::zero_grad() {
  TensorImpl& t = get();
  if (!t.leaf) return;
  if (graph_recorder != nullptr) [[unlikely]]
    graph_recorder->note_leaf(t, true);
  t.leaf->state = GradState::none;
  t.leaf->scaled = false;
  if (!t.leaf->flat) t.leaf->gradient = {};
}

Tensor Tensor::detach() const {
  Tensor t = make_view(*this, shape(), strides(), 0);
  t.impl_->is_view = get().is_view;
  return t;
}

void Tensor::register_hook(Function<Tensor(const Tensor&)> hook) const {
  TensorImpl& t = get();
  MT_CHECK(requires_grad(), "register_hook: ", describe(), " does not require a gradient");
  if (t.grad_fn)
    t.grad_fn->extra().hooks.push_back({t.output_index, std::move(hook)});
  else
    leaf_grad(t).hooks.push_back(std::move(hook));
}

void Tensor::register_post_accumulate_hook(Function<void(Tensor&)> hook) const {
  TensorImpl& t = get();
  MT_CHECK(!t.grad_fn && t.requires_grad,
           "register_post_accumulate_hook: expected a leaf that requires a gradient, got ",
           describe());
  leaf_grad(t).post_accumulate_hooks.push_back(std::move(hook));
}

void Tensor::retain_grad() const {
  TensorImpl& t = get();
  if (!t.grad_fn) return;
  // The node must not own this tensor (that would be a cycle), so its hook checks `alive`, which
  // this tensor's LeafGrad owns.
  LeafGrad& into = leaf_grad(t);
  if (into.alive) return;
  into.alive = std::make_shared<bool>(true);
  register_hook([&into, alive = std::weak_ptr<bool>(into.alive)](const Tensor& g) -> Tensor {
    if (alive.expired()) return {};
    into.gradient = into.state == GradState::valid ? detail::add_tensors(into.gradient, g) : g;
    into.state = GradState::valid;
    return {};
  });
}

const std::string& Tensor::name() const {
  static const std::string kNone;
  return get().leaf ? get().leaf->name : kNone;
}
void Tensor::set_name(std::string name) const { leaf_grad(get()).name = std::move(name); }

}  // namespace mixtape
