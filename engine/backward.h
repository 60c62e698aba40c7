// One backward pass over the tape.
//
// Nodes run in the reverse order of recording, which is a topological order because a node is
// always recorded after those it reads. The pass runs on the caller's thread; each node on the
// stream of its forward, with events between streams. Per leaf: tensor hooks, accumulate,
// post-accumulate hooks, as soon as its last contribution is in, so that communication can overlap
// the rest.
//
// A node whose backward recomputes what it did (engine/recompute.h) starts a pass of its own over
// the recomputed graph, within the pass that reached it. Gradients that lead out of that graph, to
// leaves and to nodes recorded before, are handed to the outer pass as if its own nodes had made
// them: leaves are complete, and their hooks run, when the outer pass has had all contributions.
#pragma once

#include <unordered_map>
#include <vector>

#include "engine/node.h"

namespace mixtape {

class BackwardRun {
 public:
  /// retain: keep saved tensors; create_graph: record the pass itself; accumulate: add to leaves'
  /// gradients (false: only what capture() asked for is returned).
  BackwardRun(bool retain, bool create_graph, bool accumulate)
      : retain_(retain || create_graph), create_graph_(create_graph), accumulate_(accumulate) {}

  /// A pass over a graph recomputed within `outer`: nodes numbered from `first_sequence` on.
  BackwardRun(BackwardRun& outer, std::uint64_t first_sequence)
      : retain_(false),
        create_graph_(false),
        accumulate_(outer.accumulate_),
        outer_(&outer),
        first_sequence_(first_sequence) {}
  BackwardRun(const BackwardRun&) = delete;
  BackwardRun& operator=(const BackwardRun&) = delete;
  /// This thread's innermost pass under way, or nullptr.
  static BackwardRun* current() { return current_; }
  bool retains() const { return retain_; }
  bool creates_graph() const { return create_graph_; }

  void add_root(const Tensor& output, const Tensor& gradient);
  /// Returns the index of the result for `input` in results().
  int capture(const Tensor& input);
  void run();
  std::vector<Tensor>& results() { return results_; }
  /// f(true) runs once when the outermost pass is whole: leaves and their hooks done, side streams
  /// joined, on the caller's thread and stream; what it throws fails the pass. f(false), which does
  /// not throw, if the pass failed.
  void at_end(Function<void(bool whole)> f) { outermost().at_end_.push_back(std::move(f)); }

 private:
  struct NodeEntry {
    Node* node;
    SmallVector<Tensor, 1> gradients;              // of the node's outputs, summed so far
    SmallVector<std::pair<int, int>, 1> captures;  // (output, result)
    bool needed = false;
  };
  struct LeafEntry {
    TensorImpl* leaf;
    int remaining = 0;  // contributions still to come
    bool touched = false;
    bool needed = false;
    Tensor gradient;  // summed so far, for leaves with hooks or captured ones
    SmallVector<int, 1> captures;
  };

  int node_index(Node* node);
  int leaf_index(TensorImpl* leaf);
  NodeEntry& entry_of(const Node* node);
  LeafEntry& entry_of(const TensorImpl* leaf);
  /// Whether gradients along this edge belong to the outer pass.
  bool leads_out(const Edge& edge) const {
    return outer_ != nullptr && (edge.leaf || edge.node->sequence < first_sequence_);
  }
  BackwardRun& outermost() { return outer_ == nullptr ? *this : outer_->outermost(); }
  bool wanted(const Edge& edge);
  void discover();
  void mark_needed();
  void run_node(NodeEntry& entry);
  void call_backward(NodeEntry& entry, SmallVector<GradDst, 3>& dx);
  void prepare(NodeEntry& entry, SmallVector<GradDst, 3>& dx);
  TensorImpl* direct_leaf(const Edge& edge);
  void deliver(NodeEntry& entry, SmallVector<GradDst, 3>& dx);
  void route(const Edge& edge, Tensor gradient);
  void receive(const Edge& edge, Tensor& gradient);
  void contribute(LeafEntry& entry, const Tensor& gradient);
  void finish_contribution(LeafEntry& entry);
  void add_to_leaf(TensorImpl& leaf, const Tensor& gradient);
  void sum_into(Tensor& total, const Tensor& more) const;
  void finish();
  void follow_stream(const Stream& producer, const Stream& consumer);
  Tensor poison_second_derivative(const NodeEntry& entry, const Tensor& gradient) const;
  void fail();

  static thread_local constinit BackwardRun* current_;

  bool retain_, create_graph_, accumulate_;
  BackwardRun* outer_ = nullptr;
  std::uint64_t first_sequence_ = 0;
  bool scaled_ = false;
  Stream main_stream_;
  std::vector<Stream> side_streams_;
  std::vector<std::pair<Edge, Tensor>> roots_;
  std::vector<NodeEntry> nodes_;
  std::vector<LeafEntry> leaves_;
  std::unordered_map<const void*, int> index_;
  std::vector<Tensor> results_;
  std::vector<Ref<TensorImpl>> captured_leaves_;
  std::vector<Function<void(bool)>> at_end_;
};

}  // namespace mixtape
