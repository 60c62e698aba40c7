// Collective communication between the ranks of a run.
//
//   mt::distributed::init();                                  // under mpirun, srun or alone
//   mt::distributed::Communicator world = mt::distributed::world();
//   world.all_reduce(gradient, mt::distributed::ReduceOp::avg);
//   mt::distributed::Work work = world.all_reduce_async(bucket);   // overlaps with what follows
//   ...  work.wait();
//
// Rules that hold for every collective:
// - All ranks of the communicator call it, in the same order, with the same dtype and sizes. A rank
//   that does not ends the whole run within the timeout, with a message that names it.
// - Tensors are contiguous. They are handles: what a call writes, it writes to their memory,
// outside
//   of the tape (distributed/collective_ops.h has the differentiable forms).
// - CPU tensors go through MPI. CUDA tensors go through NCCL or, where ranks share a GPU or NCCL is
//   not built in, through MPI; that form waits for the device and cannot be captured.
// - float16 and bfloat16 are reduced in float32 by MPI and in NCCL's own accumulation by NCCL.
// - A Work may be dropped: its tensors' memory is kept until the collective is done. Until wait()
//   has returned, the tensors are neither read nor written.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/tensor.h"

namespace mixtape::distributed {

/// How values of the ranks are combined. avg is for floating dtypes and does not overflow where the
/// average itself fits a 16-bit dtype (values are divided before they are added; MPI adds float32
/// and float64 first). Of bool, sum and max are 'or' and min is 'and'. What min and max give for
/// NaN is the library's choice.
enum class ReduceOp : std::uint8_t { sum, avg, min, max };
const char* name_of(ReduceOp op);

class WorkState;

/// A collective under way. Copies name the same one.
class Work {
 public:
  Work() = default;  // nothing to wait for
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}
  /// CPU tensors: blocks until the result is there. CUDA tensors: later work on the current stream
  /// waits for it; the host does not, except where MPI carries it. Throws what went wrong.
  void wait();
  /// True when the result is there.
  bool done() const;

 private:
  std::shared_ptr<WorkState> state_;
};

/// A group of ranks. A small value: copies name the same group. Calls come from one thread at a
/// time, or in an order that all ranks share.
class Communicator {
 public:
  struct Impl;
  Communicator() = default;  // no member of any group
  explicit Communicator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  bool defined() const { return static_cast<bool>(impl_); }
  explicit operator bool() const { return defined(); }
  /// This process's number in the group, 0 .. size() - 1.
  int rank() const;
  int size() const;
  /// The members' ranks in world(), by their rank here.
  const std::vector<int>& world_ranks() const;
  /// "world", or for a part of it "world/2.1": the second split's colour 1.
  const std::string& name() const;
  /// The device that init() chose for this rank.
  Device device() const;

  // ---- collectives; each _async form returns at once
  // ---------------------------------------------
  /// t = op over all ranks' t.
  void all_reduce(const Tensor& t, ReduceOp op = ReduceOp::sum) { all_reduce_async(t, op).wait(); }
  Work all_reduce_async(const Tensor& t, ReduceOp op = ReduceOp::sum);
  /// t of `root` = op over all ranks' t; what the others' t then holds is unspecified.
  void reduce(const Tensor& t, int root, ReduceOp op = ReduceOp::sum) {
    reduce_async(t, root, op).wait();
  }
  Work reduce_async(const Tensor& t, int root, ReduceOp op = ReduceOp::sum);
  /// t = root's t.
  void broadcast(const Tensor& t, int root = 0) { broadcast_async(t, root).wait(); }
  Work broadcast_async(const Tensor& t, int root = 0);
  /// out (size() x in.numel(), any shape) = the ranks' `in` in rank order. `in` may be this rank's
  /// part of out.
  void all_gather(const Tensor& out, const Tensor& in) { all_gather_async(out, in).wait(); }
  Work all_gather_async(const Tensor& out, const Tensor& in);
  /// out = this rank's part of the reduced in (size() x out.numel()). out may be that part of in.
  void reduce_scatter(const Tensor& out, const Tensor& in, ReduceOp op = ReduceOp::sum) {
    reduce_scatter_async(out, in, op).wait();
  }
  Work reduce_scatter_async(const Tensor& out, const Tensor& in, ReduceOp op = ReduceOp::sum);
  /// Part r of out = part `rank()` of rank r's in; both hold size() equal parts and do not overlap.
  void all_to_all(const Tensor& out, const Tensor& in) { all_to_all_async(out, in).wait(); }
  Work all_to_all_async(const Tensor& out, const Tensor& in);
  /// To one rank, which calls recv with the same dtype and size. Between two ranks messages arrive
  /// in the order they were sent.
  void send(const Tensor& t, int to) { send_async(t, to).wait(); }
  Work send_async(const Tensor& t, int to);
  void recv(const Tensor& t, int from) { recv_async(t, from).wait(); }
  Work recv_async(const Tensor& t, int from);
  /// Returns when every rank has called it. Does not wait for CUDA work.
  void barrier();

  // ---- parts of the group
  // -------------------------------------------------------------------------
  /// Ranks with the same colour form a group, ordered by key and then by rank here. All ranks call
  /// it; color < 0 joins none and gets an undefined Communicator.
  Communicator split(int color, int key = 0) const;
  /// The group of `ranks` (of this group, in that order). All ranks of this group call it with the
  /// same list; those not in it get an undefined Communicator.
  Communicator subgroup(std::span<const int> ranks) const;

  Impl& impl() const;  // throws when undefined

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace mixtape::distributed
