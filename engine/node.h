// The tape: one Node for each recorded op. A node holds its op, what it saved, and edges to where
// its inputs came from; nothing points forwards, so that dropping a result frees what only it used.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/function.h"
#include "engine/op.h"
#include "engine/thread_state.h"

namespace mixtape {

/// Where an input's gradient goes: output `output` of `node`, or a leaf.
struct Edge {
  Ref<Node> node;
  Ref<TensorImpl> leaf;
  int output = 0;
  explicit operator bool() const { return node || leaf; }
};

/// Kept apart because few nodes have it.
struct NodeExtras {
  std::string where;  // anomaly mode: module path and call stack at recording
  struct Hook {
    int output;
    Function<Tensor(const Tensor&)> run;
  };
  std::vector<Hook> hooks;
};

struct Node : RefCounted {
  static Ref<Node> create(const OpTable& table, const void* op);
  /// Nodes created on this thread from now on have at least this sequence, those before less.
  static std::uint64_t next_sequence();
  /// Iterative: a graph of any depth is freed in constant stack.
  static void destroy(Node* node) noexcept;

  const OpTable* table;
  std::uint64_t sequence;    // order of recording
  Stream stream;             // forward's; backward runs on it
  bool scaled_loss = false;  // output of GradScaler::scale: gradients below it carry the loss scale
  std::uint32_t module = 0;  // profile::module_id() when it was recorded
  SmallVector<Edge, 3> edges;
  SmallVector<Meta, 3> inputs;
  SmallVector<Meta, 1> outputs;
  Device device;
  Saved saved;
  ThreadState autocast;  // as in forward: ops in backward run under the same autocast dtype
  std::unique_ptr<NodeExtras> extras;

  const void* op() const;
  std::int64_t saved_bytes() const;
  /// Drops saved memory; later use throws.
  void free_saved();
  NodeExtras& extra();

 private:
  Node() = default;
  static std::size_t bytes(const OpTable& table);
};

/// The edge that gradients of t follow; empty when t needs none.
Edge gradient_edge(const Tensor& t);

enum class GradState : std::uint8_t { none, valid, incomplete };

/// The gradient of a leaf and what belongs to it.
struct LeafGrad {
  GradState state = GradState::none;
  bool flat = false;    // `gradient` is a permanent view of a flat buffer
  bool scaled = false;  // carries a loss scale that has not been divided out
  Tensor gradient;      // memory even in state none, when flat
  std::vector<Function<Tensor(const Tensor&)>> hooks;
  std::vector<Function<void(Tensor&)>> post_accumulate_hooks;
  std::string name;
  std::shared_ptr<bool> alive;  // of a result with retain_grad
  // 16-bit copy of a float32 parameter for autocast, valid while the version matches.
  Tensor shadow;
  std::uint32_t shadow_version = 0;
};
LeafGrad& leaf_grad(TensorImpl& impl);

/// Gives every parameter a permanent gradient in one flat buffer per (dtype, device), in reverse
/// order, each 256-byte aligned. Parameters that already have one keep it; a gradient held
/// otherwise is copied in. `dtype_of_gradient`: f32 for 16-bit parameters with fp32 masters, else
/// the parameter's.
void attach_flat_gradients(const std::vector<Tensor>& parameters);

}  // namespace mixtape
