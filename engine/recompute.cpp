#include "engine/recompute.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/backward.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "engine/gradient_uses.h"
#include "engine/op_scope.h"

namespace mixtape {

thread_local constinit GradientUses* GradientUses::current_ = nullptr;

namespace {

using Sources = std::vector<RecomputeSource>;

thread_local constinit bool running_again = false;

struct RunningAgain {
  bool outer = std::exchange(running_again, true);
  RunningAgain() = default;
  ~RunningAgain() { running_again = outer; }
  RunningAgain(const RunningAgain&) = delete;
  RunningAgain& operator=(const RunningAgain&) = delete;
};

bool same_edge(const Edge& a, const Edge& b) {
  return a.node == b.node && a.leaf == b.leaf && a.output == b.output;
}
bool contains(const Sources& sources, const Edge& edge) {
  return std::any_of(sources.begin(), sources.end(),
                     [&](const RecomputeSource& s) { return same_edge(s.edge, edge); });
}

/// Shared by the copies of the op.
struct Recomputation {
  RecomputedFunction function;
  Sources inputs, captured;
  std::vector<RandomDraw> draws;
  Metas outputs;

  void check_unmodified() const;
  std::vector<Tensor> run_again();
};

void Recomputation::check_unmodified() const {
  const auto check = [](const RecomputeSource& s, const std::string& what) {
    MT_CHECK(!s.data || s.data.version() == s.version, "checkpoint: ", what, " (",
             s.data.describe(), ") was modified in place since forward: expected version ",
             s.version, ", got ", s.data.version());
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) check(inputs[i], detail::concat("input ", i));
  for (const RecomputeSource& s : captured) {
    const bool named = s.edge.leaf && s.edge.leaf->leaf && !s.edge.leaf->leaf->name.empty();
    check(s, named ? s.edge.leaf->leaf->name : "a tensor that the function uses");
  }
}

/// The results with their history, which leads on from the inputs to what they were made from.
std::vector<Tensor> Recomputation::run_again() {
  std::vector<Tensor> in;
  for (const RecomputeSource& s : inputs) {
    if (s.edge.leaf) {
      in.emplace_back(s.edge.leaf);
      continue;
    }
    in.push_back(s.data ? s.data.detach() : Tensor());
    if (!s.edge) continue;
    in.back().impl()->grad_fn = s.edge.node;
    in.back().impl()->output_index = s.edge.output;
  }
  const EnableGrad recording;
  const DrawScope replay(draws, DrawScope::Mode::replay);
  const RunningAgain again;
  std::vector<Tensor> results = function(in);
  MT_CHECK(replay.remaining() == 0, "checkpoint: expected the recomputation to make ", draws.size(),
           " random draws as forward did, got ", draws.size() - replay.remaining());
  MT_CHECK(results.size() == static_cast<std::size_t>(outputs.size()),
           "checkpoint: expected the recomputation to give ", outputs.size(),
           " results as forward did, got ", results.size());
  for (int i = 0; i < outputs.size(); ++i) {
    const Tensor& y = results[static_cast<std::size_t>(i)];
    MT_CHECK(!y || (y.shape() == outputs[i].shape && y.dtype() == outputs[i].dtype),
             "checkpoint: expected result ", i, " of the recomputation to be ", outputs[i].dtype,
             outputs[i].shape, " as in forward, got ", y.describe());
  }
  return results;
}

struct Recompute {
  std::shared_ptr<Recomputation> state;
  static constexpr OpInfo info{.name = "checkpoint"};

  void backward(const Saved&, Inputs dy, Grads) const {
    BackwardRun& outer = *BackwardRun::current();
    MT_CHECK(!outer.creates_graph(),
             "checkpoint: second derivatives through a recomputed function are not available; "
             "call the function itself where they are needed");
    state->check_unmodified();
    BackwardRun pass(outer, Node::next_sequence());
    bool any = false;
    {
      const std::vector<Tensor> results = state->run_again();
      for (std::size_t i = 0; i < results.size(); ++i) {
        if (!dy[i] || !results[i].requires_grad()) continue;
        pass.add_root(results[i], dy[i]);
        any = true;
      }
    }
    if (any) pass.run();
    if (!outer.retains()) state->inputs.clear();  // their memory
  }
};

constexpr OpTable kTable{
    .info = &Recompute::info,
    .size = sizeof(Recompute),
    .alignment = alignof(Recompute),
    .infer = nullptr,  // apply_recomputed runs and records it
    .forward = nullptr,
    .view = nullptr,
    .backward = [](const void* op, const Saved& saved, Inputs dy,
                   Grads dx) { static_cast<const Recompute*>(op)->backward(saved, dy, dx); },
    .work = nullptr,
    .copy = [](void* to,
               const void* from) { new (to) Recompute(*static_cast<const Recompute*>(from)); },
    .destroy = [](void* op) { static_cast<Recompute*>(op)->~Recompute(); }};

void add_edges(Node& node, const Sources& sources) {
  for (const RecomputeSource& s : sources) {
    node.edges.push_back(s.edge);
    node.inputs.push_back(s.data ? meta_of(s.data) : Meta{});
  }
}

/// Handles on the results whose history is one node.
std::vector<Tensor> record(const std::shared_ptr<Recomputation>& state,
                           const std::vector<Tensor>& results) {
  const Recompute op{state};
  const Ref<Node> node = Node::create(kTable, &op);
  add_edges(*node, state->inputs);
  add_edges(*node, state->captured);
  for (const Meta& m : state->outputs) node->outputs.push_back(m);
  node->saved = Saved::of(*node);
  std::vector<Tensor> out;
  bool first = true;
  for (const Tensor& y : results) {
    out.push_back(y ? y.detach() : y);  // y itself may be an input
    if (!y) continue;
    if (std::exchange(first, false)) {
      node->device = y.device();
      node->stream = Stream::current(y.device());
    }
    if (!is_floating(y.dtype())) continue;
    out.back().impl()->grad_fn = node;
    out.back().impl()->output_index = static_cast<int>(out.size()) - 1;
  }
  return out;
}

}  // namespace

bool recomputing() { return running_again; }

RecomputeSource::RecomputeSource(const Tensor& t) : edge(gradient_edge(t)) {
  if (!t) return;
  data = t.detach();
  version = t.version();
}

GradientUses::GradientUses()
    : outer_(std::exchange(current_, this)), first_sequence_(Node::next_sequence()) {}
GradientUses::~GradientUses() { current_ = outer_; }

void GradientUses::note(Inputs read) {
  for (const Tensor& t : read) {
    if (!t.requires_grad()) continue;
    const TensorImpl& impl = *t.impl();
    if (impl.grad_fn && impl.grad_fn->sequence >= first_sequence_) continue;
    if (!contains(sources_, gradient_edge(t))) sources_.emplace_back(t);
  }
  if (outer_ != nullptr) outer_->note(read);
}

std::vector<Tensor> apply_recomputed(RecomputedFunction function, Inputs inputs) {
  MT_CHECK(static_cast<bool>(function), "checkpoint: expected a function, got none");
  if (!thread_state.grad || thread_state.inference) return function(inputs);
  const auto state = std::make_shared<Recomputation>();
  state->function = std::move(function);
  for (const Tensor& t : inputs) state->inputs.emplace_back(t);
  std::vector<Tensor> results;
  {
    const NoGrad only_results;
    const DrawScope draws(state->draws, DrawScope::Mode::record);
    GradientUses uses;
    results = state->function(inputs);
    for (RecomputeSource& s : uses.sources()) {
      if (!contains(state->inputs, s.edge)) state->captured.push_back(std::move(s));
    }
  }
  const auto needs_gradient = [](const RecomputeSource& s) { return static_cast<bool>(s.edge); };
  if (state->captured.empty() &&
      std::none_of(state->inputs.begin(), state->inputs.end(), needs_gradient))
    return results;
  for (const Tensor& y : results) state->outputs.push_back(y ? meta_of(y) : Meta{});
  return record(state, results);
}

}  // namespace mixtape
