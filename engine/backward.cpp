#include "engine/backward.h"

#include <algorithm>
#include <utility>

#include "engine/anomaly.h"
#include "engine/cast_op.h"
#include "engine/channels_last.h"
#include "engine/grad_mode.h"
#include "engine/op_profile.h"
#include "engine/op_scope.h"
#include "engine/tensor_detail.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace mixtape {

thread_local constinit BackwardRun* BackwardRun::current_ = nullptr;

namespace {

/// True when nobody else can see t's memory, so that a sum may be made in it.
bool uniquely_owned(const Tensor& t) {
  return t.impl()->use_count() == 1 && t.impl()->storage->use_count() == 1 &&
         (t.is_contiguous() || is_channels_last(t));
}

/// Backward of a gradient that came from a fused kernel: always an error.
struct NoSecondDerivative {
  const char* of;
  static constexpr OpInfo info{.name = "second_derivative"};
  Metas infer(Inputs in) const { return {meta_of(in[0])}; }
  void forward(Inputs, Outputs, Saved&) const {}
  void backward(const Saved&, Inputs, Grads) const {
    MT_THROW(
        of,
        ": its backward is a fused kernel, so its second derivative is not available; write the "
        "expression in elementary ops where it is needed");
  }
};

void check_for_nan(const Node& node, const Tensor& gradient, int input) {
  if (gradient.numel() == 0) return;
  const NoGrad no_grad;
  Tensor largest = Tensor::empty(Shape::filled(gradient.dim(), 1), Dtype::f64, gradient.device());
  const View x = gradient.view();
  const Scratch scratch(kernels::reduce_workspace_bytes(largest.view(), x), gradient.device());
  kernels::reduce(Stream::current(gradient.device()), kernels::ReduceOp::max, largest.view(), x,
                  {scratch.data(), scratch.bytes()});
  const double value = largest.item<double>();
  MT_CHECK(value == value, node.table->info->name,
           ": backward produced NaN in the gradient of input ", input, " (", gradient.describe(),
           "); recorded\n",
           node.extras ? node.extras->where : std::string("  outside anomaly mode\n"));
}

}  // namespace

// ---- what the pass covers
// ------------------------------------------------------------------------------

void BackwardRun::add_root(const Tensor& output, const Tensor& gradient) {
  MT_CHECK(output.requires_grad(), "backward: expected an output that requires a gradient, got ",
           output.describe(),
           "; was it computed under NoGrad, or from tensors without set_requires_grad()?");
  Tensor g = gradient;
  if (!g) {
    MT_CHECK(output.numel() == 1,
             "backward: expected a one-element output or an explicit gradient, got ",
             output.describe());
    g = Tensor::empty(output.shape(), output.dtype(), output.device());
    kernels::fill(Stream::current(output.device()), g.view(), Scalar(1.0));
  } else {
    MT_CHECK_EQ(g.shape(), output.shape(), "backward: shape of the gradient");
    MT_CHECK(g.device() == output.device(), "backward: expected a gradient on ", output.device(),
             ", got ", g.describe());
    if (g.dtype() != output.dtype()) g = detail::cast_tensor(g, output.dtype());
  }
  main_stream_ = Stream::current(output.device());
  roots_.emplace_back(gradient_edge(output), std::move(g));
}

int BackwardRun::capture(const Tensor& input) {
  const Edge edge = gradient_edge(input);
  MT_CHECK(static_cast<bool>(edge), "grad: expected inputs that require a gradient, got ",
           input.describe());
  const int result = static_cast<int>(results_.size());
  results_.emplace_back();
  if (edge.leaf) {
    captured_leaves_.push_back(edge.leaf);
    leaves_[static_cast<std::size_t>(leaf_index(edge.leaf.get()))].captures.push_back(result);
  } else {
    nodes_[static_cast<std::size_t>(node_index(edge.node.get()))].captures.push_back(
        {edge.output, result});
  }
  return result;
}

int BackwardRun::node_index(Node* node) {
  const auto [it, fresh] = index_.try_emplace(node, static_cast<int>(nodes_.size()));
  if (fresh) {
    NodeEntry& entry = nodes_.emplace_back();
    entry.node = node;
    entry.gradients.resize(node->outputs.size());
  }
  return it->second;
}

int BackwardRun::leaf_index(TensorImpl* leaf) {
  const auto [it, fresh] = index_.try_emplace(leaf, static_cast<int>(leaves_.size()));
  if (fresh) leaves_.emplace_back().leaf = leaf;
  return it->second;
}

BackwardRun::NodeEntry& BackwardRun::entry_of(const Node* node) {
  const auto it = index_.find(node);
  MT_CHECK(it != index_.end(), "checkpoint: the recomputation used the result of ",
           node->table->info->name, ", which forward did not use; expected the same in both");
  return nodes_[static_cast<std::size_t>(it->second)];
}

BackwardRun::LeafEntry& BackwardRun::entry_of(const TensorImpl* leaf) {
  const auto it = index_.find(leaf);
  MT_CHECK(it != index_.end(), "checkpoint: the recomputation used ",
           leaf->leaf && !leaf->leaf->name.empty() ? leaf->leaf->name : "a leaf",
           ", which forward did not use; expected the same in both");
  return leaves_[static_cast<std::size_t>(it->second)];
}

void BackwardRun::discover() {
  std::vector<Node*> stack;
  std::vector<char> visited;
  const auto visit = [&](Node* node) {
    const auto i = static_cast<std::size_t>(node_index(node));
    if (i >= visited.size()) visited.resize(i + 1);
    if (visited[i]) return;
    visited[i] = 1;
    stack.push_back(node);
  };
  for (std::size_t i = 0, captured = nodes_.size(); i < captured; ++i) visit(nodes_[i].node);
  for (const auto& [edge, gradient] : roots_) {
    if (leads_out(edge)) continue;
    if (edge.leaf)
      ++leaves_[static_cast<std::size_t>(leaf_index(edge.leaf.get()))].remaining;
    else
      visit(edge.node.get());
  }
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->edges) {
      if (!edge || leads_out(edge)) continue;
      if (edge.leaf)
        ++leaves_[static_cast<std::size_t>(leaf_index(edge.leaf.get()))].remaining;
      else
        visit(edge.node.get());
    }
  }
  std::sort(nodes_.begin(), nodes_.end(), [](const NodeEntry& a, const NodeEntry& b) {
    return a.node->sequence > b.node->sequence;
  });
  for (std::size_t i = 0; i < nodes_.size(); ++i) index_[nodes_[i].node] = static_cast<int>(i);
}

void BackwardRun::mark_needed() {
  for (LeafEntry& leaf : leaves_) leaf.needed = accumulate_ || !leaf.captures.empty();
  for (auto entry = nodes_.rbegin(); entry != nodes_.rend(); ++entry) {  // inputs before consumers
    entry->needed = accumulate_ || !entry->captures.empty();
    for (const Edge& edge : entry->node->edges) entry->needed |= wanted(edge);
  }
}

bool BackwardRun::wanted(const Edge& edge) {
  if (!edge) return false;
  if (leads_out(edge)) return outer_->wanted(edge);
  return edge.leaf ? entry_of(edge.leaf.get()).needed : entry_of(edge.node.get()).needed;
}

// ---- the pass
// -------------------------------------------------------------------------------------------

void BackwardRun::run() {
  const profile::Range range(ProfileKind::function, "backward");
  if (range.on()) [[unlikely]]
    profile::note_backward_pass();
  const ThreadState caller = thread_state;
  struct Restore {
    ThreadState state;
    BackwardRun* run;
    ~Restore() {
      thread_state = state;
      current_ = run;
    }
  } restore{caller, std::exchange(current_, this)};
  thread_state.grad = create_graph_;
  thread_state.inference = false;
  try {
    discover();
    mark_needed();
    for (auto& [edge, gradient] : roots_) route(edge, std::move(gradient));
    for (NodeEntry& entry : nodes_) run_node(entry);
    finish();
  } catch (...) {
    fail();
    throw;
  }
}

void BackwardRun::run_node(NodeEntry& entry) {
  Node& node = *entry.node;
  if (!entry.needed) {
    for (const Edge& edge : node.edges) {
      if (edge.leaf && !leads_out(edge)) finish_contribution(entry_of(edge.leaf.get()));
    }
    return;
  }
  const StreamGuard on_forward_stream(node.stream);
  follow_stream(main_stream_, node.stream);
  if (node.extras) {
    for (const NodeExtras::Hook& hook : node.extras->hooks) {
      Tensor& gradient = entry.gradients[hook.output];
      if (!gradient) continue;
      if (Tensor replacement = hook.run(gradient)) gradient = std::move(replacement);
    }
  }
  for (const auto& [output, result] : entry.captures)
    results_[static_cast<std::size_t>(result)] = entry.gradients[output];
  const bool any = std::any_of(entry.gradients.begin(), entry.gradients.end(),
                               [](const Tensor& g) { return g.defined(); });
  SmallVector<GradDst, 3> dx(node.edges.size());
  if (any) {
    outermost().scaled_ |= node.scaled_loss;
    prepare(entry, dx);
    call_backward(entry, dx);
  }
  entry.gradients.clear();
  deliver(entry, dx);
  if (!(node.stream == main_stream_)) {
    if (std::find(side_streams_.begin(), side_streams_.end(), node.stream) == side_streams_.end()) {
      side_streams_.push_back(node.stream);
    }
    main_stream_.wait(Event(node.stream));
  }
  if (any && !retain_) node.free_saved();
}

void BackwardRun::prepare(NodeEntry& entry, SmallVector<GradDst, 3>& dx) {
  Node& node = *entry.node;
  for (int i = 0; i < node.edges.size(); ++i) {
    const Edge& edge = node.edges[i];
    GradDst& dst = dx[i];
    dst.meta_ = node.inputs[i];
    dst.device_ = node.device;
    dst.wanted_ = wanted(edge);
    if (dst.wanted_ && accumulate_ && !create_graph_ && node.stream == outermost().main_stream_)
      dst.direct_ = direct_leaf(edge);
  }
  for (int i = 0; i < dx.size();
       ++i) {  // one leaf twice among the inputs: neither may write it directly
    for (int j = i + 1; j < dx.size(); ++j) {
      if (dx[i].direct_ && dx[i].direct_ == dx[j].direct_) dx[i].direct_ = dx[j].direct_ = nullptr;
    }
  }
}

TensorImpl* BackwardRun::direct_leaf(const Edge& edge) {
  const Edge* last = &edge;
  if (edge.node) {
    if (leads_out(edge)) return outer_->direct_leaf(edge);
    const Node& cast = *edge.node;
    const NodeEntry& cast_entry = entry_of(&cast);
    if (cast.table != &op_table<CastOp> || cast.extras || !cast_entry.captures.empty())
      return nullptr;
    last = &cast.edges[0];
  }
  if (!last->leaf) return nullptr;
  const LeafGrad* leaf = last->leaf->leaf;
  if (!leaf || !leaf->flat || !leaf->hooks.empty() || leaf->state == GradState::incomplete)
    return nullptr;
  return last->leaf.get();
}

void BackwardRun::call_backward(NodeEntry& entry, SmallVector<GradDst, 3>& dx) {
  Node& node = *entry.node;
  const OpInfo& info = *node.table->info;
  const OpScope scope(info.name, true);
  MT_CHECK(!node.saved.freed_, info.name,
           ": backward a second time through a graph whose saved tensors were freed; pass "
           "{.retain_graph = true} to "
           "the first backward");
  if (std::none_of(dx.begin(), dx.end(), [](const GradDst& d) { return static_cast<bool>(d); }))
    return;
  const profile::Range range(ProfileKind::op, info.name);
  const bool opaque = create_graph_ && !info.higher_order;
  if (range.on()) [[unlikely]]
    profile::note_backward(node, entry.gradients, dx, create_graph_ && !opaque);
  thread_state.autocast = node.autocast.autocast;
  thread_state.autocast_dtype = node.autocast.autocast_dtype;
  thread_state.autocast_cache = node.autocast.autocast_cache;
  thread_state.grad = create_graph_ && !opaque;
  node.saved.last_use_ = !retain_;
  node.table->backward(node.op(), node.saved, entry.gradients, dx);
  thread_state.grad = create_graph_;
  thread_state.autocast = false;
  for (int i = 0; i < dx.size(); ++i) {
    GradDst& dst = dx[i];
    if (!dst || dst.written_ != GradDst::Written::tensor) continue;
    if (opaque) dst.result_ = poison_second_derivative(entry, dst.result_);
    MT_CHECK(dst.result_.shape() == dst.meta_.shape, info.name,
             ": backward gave the gradient of input ", i, " a wrong shape: expected ",
             dst.meta_.shape, ", got ", dst.result_.shape());
    MT_CHECK(dst.result_.device() == dst.device_, info.name,
             ": backward gave the gradient of input ", i, " on a wrong device: expected ",
             dst.device_, ", got ", dst.result_.describe());
    if (dst.result_.dtype() != dst.meta_.dtype)
      dst.result_ = detail::cast_tensor(dst.result_, dst.meta_.dtype);
    if (anomaly_enabled()) check_for_nan(node, dst.result_, i);
  }
}

void BackwardRun::deliver(NodeEntry& entry, SmallVector<GradDst, 3>& dx) {
  Node& node = *entry.node;
  for (int i = 0; i < node.edges.size(); ++i) {
    const Edge& edge = node.edges[i];
    GradDst& dst = dx[i];
    if (dst.written_ == GradDst::Written::leaf) {
      outermost().entry_of(dst.direct_).touched = true;
    }
    if (dst.written_ == GradDst::Written::tensor)
      route(edge, std::move(dst.result_));
    else if (edge.leaf && !leads_out(edge))
      finish_contribution(entry_of(edge.leaf.get()));
  }
}

void BackwardRun::route(const Edge& edge, Tensor gradient) {
  receive(edge, gradient);
  gradient = {};
  if (edge.leaf && !leads_out(edge)) finish_contribution(entry_of(edge.leaf.get()));
}

/// Adds a contribution, of this pass or of one within it; may take `gradient` over.
void BackwardRun::receive(const Edge& edge, Tensor& gradient) {
  if (leads_out(edge)) return outer_->receive(edge, gradient);
  if (edge.leaf) {
    LeafEntry& entry = entry_of(edge.leaf.get());
    if (entry.needed) contribute(entry, gradient);
    return;
  }
  Tensor& slot = entry_of(edge.node.get()).gradients[edge.output];
  if (slot)
    sum_into(slot, gradient);
  else
    slot = std::move(gradient);
}

void BackwardRun::sum_into(Tensor& total, const Tensor& more) const {
  if (!create_graph_ && uniquely_owned(total))
    detail::accumulate_into(total, more);
  else
    total = detail::add_tensors(total, more);
}

// ---- leaves
// ---------------------------------------------------------------------------------------------

void BackwardRun::contribute(LeafEntry& entry, const Tensor& gradient) {
  entry.touched = true;
  const bool hold =
      !entry.captures.empty() || (entry.leaf->leaf && !entry.leaf->leaf->hooks.empty());
  if (!hold) return add_to_leaf(*entry.leaf, gradient);
  if (entry.gradient)
    sum_into(entry.gradient, gradient);
  else
    entry.gradient = gradient;
}

void BackwardRun::finish_contribution(LeafEntry& entry) {
  if (--entry.remaining > 0 || !entry.touched) return;
  LeafGrad& leaf = leaf_grad(*entry.leaf);
  if (entry.gradient) {
    for (const auto& hook : leaf.hooks) {
      if (Tensor replacement = hook(entry.gradient)) entry.gradient = std::move(replacement);
    }
    for (const int result : entry.captures)
      results_[static_cast<std::size_t>(result)] = entry.gradient;
    if (accumulate_) add_to_leaf(*entry.leaf, entry.gradient);
    entry.gradient = {};
  }
  if (!accumulate_) return;
  leaf.scaled = scaled_;
  Tensor handle(Ref<TensorImpl>::share(entry.leaf));
  for (const auto& hook : leaf.post_accumulate_hooks) hook(handle);
}

void BackwardRun::add_to_leaf(TensorImpl& impl, const Tensor& gradient) {
  LeafGrad& leaf = leaf_grad(impl);
  MT_CHECK(leaf.state != GradState::incomplete, "backward: the gradient of ",
           leaf.name.empty() ? "a leaf" : leaf.name,
           " is incomplete because an earlier backward failed; call zero_grad() first");
  if (leaf.state == GradState::valid) {
    if (leaf.flat)
      detail::accumulate_into(leaf.gradient, gradient);
    else
      sum_into(leaf.gradient, gradient);
  } else if (leaf.flat) {
    detail::copy_into(leaf.gradient, gradient);
  } else if (create_graph_) {
    leaf.gradient = gradient;
  } else {  // take over memory nobody else sees: this parameter and the caller's argument are two
            // handles
    const bool ours = gradient.impl()->use_count() <= 1 &&
                      gradient.impl()->storage->use_count() == 1 && gradient.is_contiguous();
    leaf.gradient = ours ? gradient : gradient.clone();
  }
  leaf.state = GradState::valid;
}

// ---- streams, failures
// ------------------------------------------------------------------------------------

void BackwardRun::follow_stream(const Stream& producer, const Stream& consumer) {
  if (!(producer == consumer)) consumer.wait(Event(producer));
}

Tensor BackwardRun::poison_second_derivative(const NodeEntry& entry, const Tensor& gradient) const {
  const NoSecondDerivative op{entry.node->table->info->name};
  Ref<Node> node = Node::create(op_table<NoSecondDerivative>, &op);
  node->device = entry.node->device;
  node->stream = entry.node->stream;
  node->saved = Saved::of(*node);
  for (const Tensor& dy : entry.gradients) node->edges.push_back(gradient_edge(dy));
  for (const Edge& edge : entry.node->edges) node->edges.push_back(edge);
  for (int i = 0; i < node->edges.size(); ++i) node->inputs.push_back(meta_of(gradient));
  node->outputs.push_back(meta_of(gradient));
  Tensor result = gradient.detach();
  result.impl()->grad_fn = std::move(node);
  return result;
}

void BackwardRun::finish() {
  for (const Stream& side : side_streams_) main_stream_.wait(Event(side));
  while (!at_end_.empty()) {
    const Function<void(bool)> f = at_end_.front();
    at_end_.erase(at_end_.begin());
    f(true);
  }
}

void BackwardRun::fail() {
  for (LeafEntry& entry : leaves_) {
    if (entry.touched && accumulate_) leaf_grad(*entry.leaf).state = GradState::incomplete;
  }
  for (const Stream& side : side_streams_) main_stream_.wait(Event(side));
  for (const auto& f : std::exchange(at_end_, {})) f(false);
}

// ---- GradDst
// ------------------------------------------------------------------------------------------------

bool GradDst::leaf_slot_usable() const {
  return direct_ != nullptr && direct_->leaf->gradient.defined();
}

Tensor GradDst::out() {
  if (leaf_slot_usable()) {
    LeafGrad& leaf = *direct_->leaf;
    if (leaf.state == GradState::none && leaf.gradient.dtype() == meta_.dtype) {
      leaf.state = GradState::valid;
      leaf.gradient.impl()->storage->bump_version();
      written_ = Written::leaf;
      return leaf.gradient;
    }
  }
  written_ = Written::tensor;
  result_ = Tensor::empty(meta_.shape, meta_.dtype, device_);
  return result_;
}

GradDst::Accumulator GradDst::accumulator() {
  if (leaf_slot_usable()) {
    LeafGrad& leaf = *direct_->leaf;
    const float beta = leaf.state == GradState::valid ? 1.0f : 0.0f;
    leaf.state = GradState::valid;
    leaf.gradient.impl()->storage->bump_version();
    written_ = Written::leaf;
    return {leaf.gradient, beta};
  }
  return {out(), 0.0f};
}

void GradDst::set(const Tensor& gradient) {
  written_ = Written::tensor;
  result_ = gradient;
}

// ---- user-facing
// ----------------------------------------------------------------------------------------------

void Tensor::backward(const Tensor& gradient, BackwardOptions options) const {
  BackwardRun run(options.retain_graph, options.create_graph, true);
  run.add_root(*this, gradient);
  run.run();
}

std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const std::vector<Tensor>& gradients, GradOptions options) {
  MT_CHECK(gradients.empty() || gradients.size() == outputs.size(), "grad: expected ",
           outputs.size(), " gradients, one for each output, got ", gradients.size());
  BackwardRun run(options.retain_graph, options.create_graph, false);
  for (std::size_t i = 0; i < outputs.size(); ++i)
    run.add_root(outputs[i], gradients.empty() ? Tensor() : gradients[i]);
  for (const Tensor& input : inputs) run.capture(input);
  run.run();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    MT_CHECK(run.results()[i].defined() || options.allow_unused, "grad: input ", i, " (",
             inputs[i].describe(),
             ") was not used to compute the outputs; pass {.allow_unused = true} to get an "
             "undefined tensor");
  }
  return std::move(run.results());
}

}  // namespace mixtape
