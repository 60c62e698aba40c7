// The op contract. An op is one struct; apply() does the rest in a fixed order: check devices,
// autocast the inputs per info.cast (as recorded casts), infer, allocate, forward, and record on
// the tape only if grad mode is on and an input needs it.
//
//   struct Scale {                                        // y = factor * x
//     float factor;
//     static constexpr OpInfo info{.name = "scale", .cast = Cast::keep};
//     Metas infer(Inputs in) const { return {meta_of(in[0])}; }
//     void forward(Inputs in, Outputs out, Saved&) const { ... out[0] ... }
//     void backward(const Saved&, Inputs dy, Grads dx) const { dx[0].set(mul(dy[0], factor)); }
//   };
//   Tensor scale(const Tensor& x, float factor) { return apply(Scale{factor}, {x}); }
//
// User code outside the library defines ops in the same way and needs nothing else. An op may add
// OpWork work(const OpCall&) const, which tells the profiler its FLOPs.
#pragma once

#include <span>
#include <type_traits>

#include "engine/tensor.h"

namespace mixtape {

/// What autocast does with an op.
enum class Cast : std::uint8_t {
  low,   // float32 inputs are cast to the autocast dtype (matrix products, convolutions)
  full,  // computed in float32 from whatever comes in; 16-bit outputs become float32 (losses, exp)
  widest,  // inputs meet in the widest dtype among them, as without autocast
  keep,    // nothing: the kernel accumulates in float32 whatever the storage type (norms, softmax)
};

struct OpInfo {
  const char* name;
  Cast cast = Cast::keep;
  bool differentiable = true;  // false: outputs never require gradients (comparisons, argmax)
  /// backward() is written in ops whenever grad mode is on, so create_graph goes through it. False:
  /// it calls a fused kernel, and differentiating its result throws an error that says so.
  bool higher_order = false;
};

/// Shape and dtype of an output. Its device is the inputs'.
struct Meta {
  Shape shape;
  Dtype dtype = Dtype::f32;
};
using Metas = SmallVector<Meta, 2>;
using Tensors = SmallVector<Tensor, 2>;
/// Inputs of an op (undefined where an optional one is absent), or gradients of its outputs
/// (undefined where nobody used one).
using Inputs = std::span<const Tensor>;
/// Outputs to write, contiguous and uninitialised. An op may replace one by a tensor it already
/// has.
using Outputs = std::span<Tensor>;

inline Meta meta_of(const Tensor& t) { return {t.shape(), t.dtype()}; }

/// One call of an op, for work().
struct OpCall {
  std::span<const Meta> in, out;  // Meta{} where an optional input is absent
  bool backward = false;
  unsigned wanted = 0;  // backward: bit i is set when input i gets a gradient
  bool wants(int i) const { return (wanted >> i & 1u) != 0; }
};
/// What a call costs: floating-point operations (a multiplication and an addition are two) and
/// bytes read and written; negative: every tensor of the call once.
struct OpWork {
  double flops = 0, bytes = -1;
};

class BackwardRun;
struct SavedTensor {
  Ref<Storage> storage;
  std::int64_t offset = 0;
  Shape sizes, strides;
  Dtype dtype = Dtype::f32;
  std::uint32_t version = 0;
  /// Input i: i; output j: -1 - j; neither: kFresh. Says where its history is for create_graph.
  int origin = kFresh;
  static constexpr int kFresh = 1 << 20;
};

/// What backward needs: the least possible. Entries are numbered in the order they were saved.
class Saved {
 public:
  Saved() = default;
  /// Saved with no values, for a node that records itself.
  static Saved of(Node& node) {
    Saved saved;
    saved.node_ = &node;
    return saved;
  }
  /// False when nothing is recorded: values() are then dropped, and statistics need not be
  /// computed.
  bool recording() const { return node_ != nullptr; }
  /// Keeps t's memory and checks in backward that nobody wrote to it since. t is an input, an
  /// output or a tensor made by forward; an undefined t is kept as undefined.
  void value(const Tensor& t);
  /// The i-th value. Throws when its memory was modified since, or was freed by an earlier
  /// backward.
  Tensor operator[](int i) const;
  int size() const { return entries_.size(); }
  /// True when backward may overwrite the i-th value's memory: nothing else sees it and this pass
  /// frees it. Ask before taking the value with [].
  bool disposable(int i) const;
  /// Shape and dtype of input i, which need no saving.
  const Meta& input(int i) const;
  Device device() const;

 private:
  friend struct Node;
  friend class BackwardRun;
  friend Tensors apply_impl(const struct OpTable&, const void*, Inputs);
  friend Tensor apply_view_impl(const struct OpTable&, const void*, const Tensor&);
  Node* node_ = nullptr;
  Inputs inputs_;    // during forward
  Outputs outputs_;  // during forward
  bool freed_ = false;
  bool last_use_ = false;  // set by a backward pass that does not retain the graph
  SmallVector<SavedTensor, 3> entries_;
};

/// Where the gradient of one input goes. False when that input wants none.
class GradDst {
 public:
  explicit operator bool() const { return wanted_; }
  const Meta& meta() const { return meta_; }

  /// A contiguous tensor of the input's shape and dtype to overwrite: new memory, or the leaf's own
  /// gradient when that is empty and of this dtype.
  Tensor out();

  struct Accumulator {
    Tensor tensor;  // contiguous
    float beta;     // 0: overwrite, 1: add to what is there
  };
  /// For kernels that can add: the leaf's gradient itself, seen through a cast, in its own dtype (a
  /// float32 buffer under autocast); else out() with beta 0.
  Accumulator accumulator();

  /// Hands over a computed gradient of the input's shape (any strides; cast if its dtype differs).
  void set(const Tensor& gradient);

 private:
  friend class BackwardRun;
  enum class Written : std::uint8_t { no, tensor, leaf };
  bool leaf_slot_usable() const;
  bool wanted_ = false;
  Written written_ = Written::no;
  Meta meta_;
  Device device_;
  TensorImpl* direct_ = nullptr;  // leaf whose gradient may be written in place
  Tensor result_;
};
using Grads = std::span<GradDst>;

/// An op's functions with its type erased.
struct OpTable {
  const OpInfo* info;
  std::size_t size, alignment;
  Metas (*infer)(const void* op, Inputs in);
  void (*forward)(const void* op, Inputs in, Outputs out, Saved& saved);
  Tensor (*view)(const void* op, const Tensor& in);  // of a ViewOp; then infer and forward are null
  void (*backward)(const void* op, const Saved& saved, Inputs dy, Grads dx);
  OpWork (*work)(const void* op, const OpCall& call);  // null: no FLOPs, every tensor once
  void (*copy)(void* to, const void* from);
  void (*destroy)(void* op);
};

template <class Op>
concept HasBackward = requires(const Op& op, const Saved& saved, Inputs dy, Grads dx) {
  op.backward(saved, dy, dx);
};
/// An op that allocates nothing: its output is another view of its input's memory.
template <class Op>
concept ViewOp = requires(const Op& op, const Tensor& in) {
  { op.view(in) } -> std::same_as<Tensor>;
};

/// An op whose cost the profiler can tell from its shapes.
template <class Op>
concept HasWork = requires(const Op& op, const OpCall& call) {
  { op.work(call) } -> std::same_as<OpWork>;
};

template <class Op>
consteval OpTable make_op_table() {
  static_assert(
      HasBackward<Op> || !Op::info.differentiable,
      "this op has no backward(const Saved&, Inputs dy, Grads dx) const; write one, or mark "
      "its info .differentiable = false");
  OpTable table{};
  table.info = &Op::info;
  table.size = sizeof(Op);
  table.alignment = alignof(Op);
  if constexpr (ViewOp<Op>) {
    table.view = [](const void* op, const Tensor& in) {
      return static_cast<const Op*>(op)->view(in);
    };
  } else {
    table.infer = [](const void* op, Inputs in) { return static_cast<const Op*>(op)->infer(in); };
    table.forward = [](const void* op, Inputs in, Outputs out, Saved& saved) {
      static_cast<const Op*>(op)->forward(in, out, saved);
    };
  }
  if constexpr (HasBackward<Op>) {
    table.backward = [](const void* op, const Saved& saved, Inputs dy, Grads dx) {
      static_cast<const Op*>(op)->backward(saved, dy, dx);
    };
  }
  if constexpr (HasWork<Op>) {
    table.work = [](const void* op, const OpCall& call) {
      return static_cast<const Op*>(op)->work(call);
    };
  }
  table.copy = [](void* to, const void* from) { new (to) Op(*static_cast<const Op*>(from)); };
  table.destroy = [](void* op) { static_cast<Op*>(op)->~Op(); };
  return table;
}
template <class Op>
inline constexpr OpTable op_table = make_op_table<Op>();

Tensors apply_impl(const OpTable& table, const void* op, Inputs in);
Tensor apply_view_impl(const OpTable& table, const void* op, const Tensor& in);

/// Runs an op with one output. Call it qualified (mt::apply) when `in` is a standard container or
/// span, so that std::apply is not considered.
template <class Op>
Tensor apply(const Op& op, Inputs in) {
  return apply_impl(op_table<Op>, &op, in)[0];
}
template <class Op>
Tensor apply(const Op& op, std::initializer_list<Tensor> in) {
  return apply(op, Inputs(in.begin(), in.size()));
}
/// Runs an op with any number of outputs.
template <class Op>
Tensors apply_multiple(const Op& op, std::initializer_list<Tensor> in) {
  return apply_impl(op_table<Op>, &op, Inputs(in.begin(), in.size()));
}
template <ViewOp Op>
Tensor apply_view(const Op& op, const Tensor& in) {
  return apply_view_impl(op_table<Op>, &op, in);
}

/// Builds a view of t's memory for ViewOp::view.
Tensor make_view(const Tensor& t, const Shape& sizes, const Shape& strides, std::int64_t offset);

/// Scratch for a kernel: freed, in stream order, at the end of the full expression's scope.
class Scratch {
 public:
  Scratch(std::size_t bytes, Device device);
  void* data() const { return storage_ ? storage_->data() : nullptr; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  Ref<Storage> storage_;
};

}  // namespace mixtape
