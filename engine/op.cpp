#include "engine/op.h"

#include "engine/autocast.h"
#include "engine/cast_op.h"
#include "engine/channels_last.h"
#include "engine/gradient_uses.h"
#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "engine/op_profile.h"
#include "engine/op_scope.h"
#include "engine/tensor_detail.h"
#include "kernels/elementwise.h"

namespace mixtape {
namespace {

Device common_device(const char* name, Inputs in) {
  const Tensor* first = nullptr;
  for (const Tensor& t : in) {
    if (!t) continue;
    if (!first) first = &t;
    MT_CHECK(t.device() == first->device(), name, ": expected all tensors on ", first->device(),
             ", got ", t.describe(), " beside ", first->describe());
  }
  MT_CHECK(first != nullptr, name, ": expected at least one tensor, got none");
  return first->device();
}

bool wants_recording(const OpInfo& info, Inputs in) {
  if (!thread_state.grad || !info.differentiable) return false;
  bool wanted = false;
  for (const Tensor& t : in) wanted |= t.requires_grad();
  if (!wanted) return false;
  for (const Tensor& t : in) {
    MT_CHECK(!t || !t.impl()->inference, info.name, ": ", t.describe(),
             " was made in inference mode and cannot be recorded; clone() it outside");
  }
  return true;
}

Ref<Node> make_node(const OpTable& table, const void* op, Inputs in, Device device) {
  Ref<Node> node = Node::create(table, op);
  node->device = device;
  node->stream = Stream::current(device);
  for (const Tensor& t : in) {
    node->edges.push_back(gradient_edge(t));
    node->inputs.push_back(t ? meta_of(t) : Meta{});
  }
  if (profile::mode() != 0) [[unlikely]]
    profile::note_node(*node);
  return node;
}

void attach_outputs(const Ref<Node>& node, Outputs out) {
  for (int i = 0; i < static_cast<int>(out.size()); ++i) {
    Tensor& t = out[static_cast<std::size_t>(i)];
    node->outputs.push_back(meta_of(t));
    if (!is_floating(t.dtype())) continue;
    TensorImpl& impl = *t.impl();
    impl.grad_fn = node;
    impl.output_index = i;
  }
}

}  // namespace

Tensors apply_impl(const OpTable& table, const void* op, Inputs in) {
  const OpInfo& info = *table.info;
  const OpScope scope(info.name);
  const profile::Range range(ProfileKind::op, info.name);
  const Device device = common_device(info.name, in);
  if (graph_recorder != nullptr) [[unlikely]] {
    for (const Tensor& t : in) graph_recorder->note_read(t);
  }
  if (GradientUses* uses = GradientUses::current()) [[unlikely]]
    uses->note(in);

  SmallVector<Tensor, 4> cast_inputs;
  if (thread_state.autocast && &table != &op_table<CastOp>) {
    amp::detail::note_call(info);
    if (info.cast == Cast::low) {
      for (const Tensor& t : in) cast_inputs.push_back(t ? autocast_low(t) : t);
      in = cast_inputs;
    }
  }
  Metas metas = table.infer(op, in);
  if (thread_state.autocast && info.cast == Cast::full) {
    for (Meta& m : metas) m.dtype = is_low_precision(m.dtype) ? Dtype::f32 : m.dtype;
  }
  Tensors out;
  for (const Meta& m : metas) out.push_back(Tensor::empty(m.shape, m.dtype, device));
  if (range.on()) [[unlikely]]
    profile::note_forward(table, op, in, out);

  Saved saved;
  if (!wants_recording(info, in)) {
    table.forward(op, in, out, saved);
    return out;
  }
  const Ref<Node> node = make_node(table, op, in, device);
  saved.node_ = node.get();
  saved.inputs_ = in;
  saved.outputs_ = out;
  {
    const bool grad = std::exchange(thread_state.grad, false);
    struct Restore {
      bool grad;
      ~Restore() { thread_state.grad = grad; }
    } restore{grad};
    table.forward(op, in, out, saved);
  }
  saved.inputs_ = {};
  saved.outputs_ = {};
  node->saved = std::move(saved);
  attach_outputs(node, out);
  return out;
}

Tensor apply_view_impl(const OpTable& table, const void* op, const Tensor& in) {
  const OpInfo& info = *table.info;
  const OpScope scope(info.name);
  const profile::Range range(ProfileKind::op, info.name);
  if (graph_recorder != nullptr) [[unlikely]]
    graph_recorder->note_read(in);
  const Inputs inputs(&in, 1);
  if (GradientUses* uses = GradientUses::current()) [[unlikely]]
    uses->note(inputs);
  if (range.on()) [[unlikely]]
    profile::note_view(in);
  Tensor out = table.view(op, in);
  if (!wants_recording(info, inputs)) return out;
  const Ref<Node> node = make_node(table, op, inputs, in.device());
  node->saved.node_ = node.get();
  attach_outputs(node, Outputs(&out, 1));
  return out;
}

// ---- Saved
// -------------------------------------------------------------------------------------------

void Saved::value(const Tensor& t) {
  if (!node_) return;
  SavedTensor& entry = entries_.emplace_back();
  if (!t) return;
  const TensorImpl& impl = *t.impl();
  entry.storage = impl.storage;
  entry.offset = impl.offset;
  entry.sizes = impl.sizes;
  entry.strides = impl.strides;
  entry.dtype = impl.dtype;
  entry.version = impl.storage->version();
  for (int i = 0; i < static_cast<int>(inputs_.size()); ++i) {
    if (inputs_[static_cast<std::size_t>(i)].same(t)) entry.origin = i;
  }
  for (int j = 0; j < static_cast<int>(outputs_.size()); ++j) {
    if (outputs_[static_cast<std::size_t>(j)].same(t)) entry.origin = -1 - j;
  }
}

Tensor Saved::operator[](int i) const {
  const char* name = node_->table->info->name;
  MT_CHECK(!freed_, name,
           ": backward a second time through a graph whose saved tensors were freed; "
           "pass {.retain_graph = true} to the first backward");
  MT_CHECK(i < entries_.size(), name, ": expected at most ", entries_.size(),
           " saved values, asked for number ", i);
  const SavedTensor& entry = entries_[i];
  if (!entry.storage) return {};
  MT_CHECK(entry.storage->version() == entry.version, name, ": a tensor needed for backward (",
           entry.dtype, entry.sizes,
           entry.origin == SavedTensor::kFresh ? ", a statistic"
           : entry.origin >= 0                 ? ", an input"
                                               : ", the output",
           ") was modified in place: expected version ", entry.version, ", got ",
           entry.storage->version());
  Ref<TensorImpl> impl = Ref<TensorImpl>::adopt(new (pool_allocate(sizeof(TensorImpl))) TensorImpl);
  impl->storage = entry.storage;
  impl->offset = entry.offset;
  impl->sizes = entry.sizes;
  impl->strides = entry.strides;
  impl->dtype = entry.dtype;
  if (thread_state.grad && entry.origin != SavedTensor::kFresh) {  // create_graph: with its history
    if (entry.origin < 0) {
      impl->grad_fn = Ref<Node>::share(node_);
      impl->output_index = -1 - entry.origin;
    } else if (const Edge& edge = node_->edges[entry.origin]) {
      if (edge.leaf) return Tensor(edge.leaf);
      impl->grad_fn = edge.node;
      impl->output_index = edge.output;
    }
  }
  return Tensor(std::move(impl));
}

bool Saved::disposable(int i) const {
  const SavedTensor& entry = entries_[i];
  return last_use_ && entry.storage && entry.storage->use_count() == 1;
}

const Meta& Saved::input(int i) const { return node_->inputs[i]; }
Device Saved::device() const { return node_->device; }

// ---- casts and scratch
// ----------------------------------------------------------------------------------

void CastOp::forward(Inputs in, Outputs out, Saved&) const {
  follow_layout(out[0], in);
  kernels::copy(Stream::current(in[0].device()), out[0].view(), in[0].view());
}

void CastOp::backward(const Saved&, Inputs dy, Grads dx) const {
  if (dx[0]) dx[0].set(dy[0]);  // the engine converts a gradient to its input's dtype
}

Scratch::Scratch(std::size_t bytes, Device device) : bytes_(bytes) {
  if (bytes > 0) storage_ = Storage::create(bytes, device);
}

}  // namespace mixtape
