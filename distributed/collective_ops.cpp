#include "distributed/collective_ops.h"

#include "engine/grad_mode.h"
#include "ops/op_support.h"

namespace mixtape::distributed {
namespace {

void check_input(const char* op, const Tensor& x) { check_floating(op, "x", x); }

/// Sizes of x with dimension 0 times `by` over `over`.
Shape resized(const char* op, const Tensor& x, int by, int over) {
  MT_CHECK(x.dim() >= 1, op, ": expected x of at least one dimension, got ", x.describe());
  MT_CHECK(x.size(0) % over == 0, op, ": expected dimension 0 in ", over, " equal parts, got ",
           x.describe());
  Shape sizes = x.shape();
  sizes[0] = sizes[0] / over * by;
  return sizes;
}

/// Contiguous, outside of the tape, in new memory.
Tensor copy_of(const Tensor& t) {
  const NoGrad no_grad;
  Tensor copy = Tensor::empty(t.shape(), t.dtype(), t.device());
  copy.copy_(t.detach());
  return copy;
}

void check_summable(const char* op, ReduceOp reduce) {
  MT_CHECK(reduce == ReduceOp::sum || reduce == ReduceOp::avg, op,
           ": only sum and avg have a gradient, got ", name_of(reduce),
           "; call the Communicator's method on a detached tensor");
}

struct AllReduce {
  Communicator group;
  ReduceOp op;
  AllReduceBackward back;
  static constexpr OpInfo info{.name = "all_reduce"};

  Metas infer(Inputs in) const {
    check_input("all_reduce", in[0]);
    check_summable("all_reduce", op);
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved&) const {
    out[0].copy_(in[0].detach());
    Communicator(group).all_reduce(out[0], op);
  }
  void backward(const Saved&, Inputs dy, Grads dx) const {
    Tensor d = copy_of(dy[0]);
    if (back == AllReduceBackward::all_reduce)
      Communicator(group).all_reduce(d, op);
    else if (op == ReduceOp::avg)
      d.div_(group.size());
    if (dx[0]) dx[0].set(d);
  }
};

struct CopyToRanks {
  Communicator group;
  static constexpr OpInfo info{.name = "copy_to_ranks"};

  Metas infer(Inputs in) const {
    check_input("copy_to_ranks", in[0]);
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved&) const { out[0].copy_(in[0].detach()); }
  void backward(const Saved&, Inputs dy, Grads dx) const {
    const Tensor d = copy_of(dy[0]);
    Communicator(group).all_reduce(d);
    if (dx[0]) dx[0].set(d);
  }
};

struct AllGather {
  Communicator group;
  static constexpr OpInfo info{.name = "all_gather"};

  Metas infer(Inputs in) const {
    check_input("all_gather", in[0]);
    return {{resized("all_gather", in[0], group.size(), 1), in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved&) const {
    Communicator(group).all_gather(out[0], in[0].detach().contiguous());
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Meta& x = saved.input(0);
    const Tensor d = Tensor::empty(x.shape, x.dtype, dy[0].device());
    Communicator(group).reduce_scatter(d, dy[0].contiguous());
    if (dx[0]) dx[0].set(d);
  }
};

struct ReduceScatter {
  Communicator group;
  ReduceOp op;
  static constexpr OpInfo info{.name = "reduce_scatter"};

  Metas infer(Inputs in) const {
    check_input("reduce_scatter", in[0]);
    check_summable("reduce_scatter", op);
    return {{resized("reduce_scatter", in[0], 1, group.size()), in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved&) const {
    Communicator(group).reduce_scatter(out[0], in[0].detach().contiguous(), op);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Meta& x = saved.input(0);
    Tensor d = Tensor::empty(x.shape, x.dtype, dy[0].device());
    Communicator(group).all_gather(d, dy[0].contiguous());
    if (op == ReduceOp::avg) d.div_(group.size());
    if (dx[0]) dx[0].set(d);
  }
};

struct AllToAll {
  Communicator group;
  static constexpr OpInfo info{.name = "all_to_all"};

  Metas infer(Inputs in) const {
    check_input("all_to_all", in[0]);
    return {{resized("all_to_all", in[0], group.size(), group.size()), in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved&) const {
    Communicator(group).all_to_all(out[0], in[0].detach().contiguous());
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Meta& x = saved.input(0);
    const Tensor d = Tensor::empty(x.shape, x.dtype, dy[0].device());
    Communicator(group).all_to_all(d, dy[0].contiguous());
    if (dx[0]) dx[0].set(d);
  }
};

struct Broadcast {
  Communicator group;
  int root;
  static constexpr OpInfo info{.name = "broadcast"};

  Metas infer(Inputs in) const {
    check_input("broadcast", in[0]);
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved&) const {
    out[0].copy_(in[0].detach());
    Communicator(group).broadcast(out[0], root);
  }
  void backward(const Saved&, Inputs dy, Grads dx) const {
    Tensor d = copy_of(dy[0]);
    Communicator(group).reduce(d, root);
    if (!dx[0]) return;
    if (group.rank() != root) d.zero_();
    dx[0].set(d);
  }
};

}  // namespace

Tensor all_reduce(const Tensor& x, const Communicator& group, ReduceOp op,
                  AllReduceBackward backward) {
  return apply(AllReduce{group, op, backward}, {x});
}
Tensor copy_to_ranks(const Tensor& x, const Communicator& group) {
  return apply(CopyToRanks{group}, {x});
}
Tensor all_gather(const Tensor& x, const Communicator& group) {
  return apply(AllGather{group}, {x});
}
Tensor reduce_scatter(const Tensor& x, const Communicator& group, ReduceOp op) {
  return apply(ReduceScatter{group, op}, {x});
}
Tensor all_to_all(const Tensor& x, const Communicator& group) {
  return apply(AllToAll{group}, {x});
}
Tensor broadcast(const Tensor& x, const Communicator& group, int root) {
  return apply(Broadcast{group, root}, {x});
}

}  // namespace mixtape::distributed
