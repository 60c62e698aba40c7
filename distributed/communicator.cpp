// Checks a call, numbers and names it, and hands it to the backend that its device needs.
#include "distributed/communicator.h"

#include "distributed/communicator_impl.h"
#include "distributed/flight_recorder.h"
#include "distributed/run.h"
#include "engine/grad_mode.h"

namespace mixtape::distributed {
namespace {

void check_tensor(const char* op, const char* what, const Tensor& t) {
  MT_CHECK(t.defined(), op, ": expected ", what, " to be a tensor, got an undefined one");
  MT_CHECK(t.is_contiguous(), op, ": expected ", what, " to be contiguous, got ", t.describe(),
           " with strides ", t.strides(), "; pass contiguous() and copy the result back");
}

void check_written(const char* op, const Tensor& t) {
  MT_CHECK(!(grad_enabled() && t.requires_grad()), op, ": writes to ", t.describe(),
           ", which is on the tape; use detach(), a NoGrad scope or the differentiable form in "
           "distributed/collective_ops.h");
}

void check_op(const char* op, ReduceOp reduce, const Tensor& t) {
  MT_CHECK(reduce != ReduceOp::avg || is_floating(t.dtype()), op,
           ": expected a floating dtype for avg, got ", t.describe());
}

void check_peer(const char* op, const char* what, int peer, int size) {
  MT_CHECK(peer >= 0 && peer < size, op, ": expected ", what, " from 0 to ", size - 1, ", got ",
           peer);
}

void check_parts(const char* op, const Tensor& whole, const Tensor& part, int size) {
  MT_CHECK(whole.dtype() == part.dtype() && whole.device() == part.device(), op,
           ": expected in and out of one dtype on one device, got ", whole.describe(), " and ",
           part.describe());
  MT_CHECK(whole.numel() == part.numel() * size, op, ": expected ", size, " x ", part.numel(),
           " elements for ", size, " ranks with ", part.describe(), " each, got ",
           whole.describe());
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto bytes = [](const Tensor& t) {
    return static_cast<std::size_t>(t.numel()) * size_of(t.dtype());
  };
  const char *x = static_cast<const char*>(a.raw_data()),
             *y = static_cast<const char*>(b.raw_data());
  return x < y + bytes(b) && y < x + bytes(a);
}

/// Part `rank` of whole and nothing else, or no memory in common.
void check_alias(const char* op, const Tensor& whole, const Tensor& part, int rank) {
  const char* mine = static_cast<const char*>(whole.raw_data()) +
                     rank * part.numel() * static_cast<std::int64_t>(size_of(part.dtype()));
  MT_CHECK(part.raw_data() == mine || !overlap(whole, part), op,
           ": in and out overlap; expected separate memory, or this rank's part of the larger one");
}

bool is_message(const Collective& c) {
  return c.kind == CollectiveKind::send || c.kind == CollectiveKind::recv;
}

/// "all_reduce(avg)"; what ranks must agree on besides the tensor.
std::string call_name(const Collective& c) {
  std::string text = name_of(c.kind);
  switch (c.kind) {
    case CollectiveKind::all_reduce:
    case CollectiveKind::reduce:
    case CollectiveKind::reduce_scatter: return text + '(' + name_of(c.op) + ')';
    default: return text;
  }
}

std::string peer_text(const Collective& c) {
  switch (c.kind) {
    case CollectiveKind::reduce:
    case CollectiveKind::broadcast: return " with root " + std::to_string(c.peer);
    case CollectiveKind::send: return " to rank " + std::to_string(c.peer);
    case CollectiveKind::recv: return " from rank " + std::to_string(c.peer);
    default: return "";
  }
}

/// "world: all_reduce(avg) #12 of 'fc.weight' float32[10, 784]".
std::string describe(const std::string& group, const Collective& c, std::uint64_t sequence) {
  std::string text = group + ": " + call_name(c) + " #" + std::to_string(sequence);
  if (!c.in) return text;
  text += " of ";
  const std::string& name = c.in.name().empty() ? c.out.name() : c.in.name();
  if (!name.empty()) text += '\'' + name + "' ";
  return text + detail::concat(c.in.dtype(), c.in.shape()) + peer_text(c);
}

/// Equal on all ranks that are in step.
std::string signature(const Collective& c) {
  if (is_message(c)) return "";
  std::string text = call_name(c) + peer_text(c);
  if (c.in) text += detail::concat(' ', c.in.dtype(), " x ", c.in.numel());
  return text;
}

std::uint64_t next_number(Communicator::Impl& group, const Collective& c) {
  if (!is_message(c)) return ++group.sequence;
  group.messages.resize(group.world_ranks.size());
  auto& [to, from] = group.messages[static_cast<std::size_t>(c.peer)];
  return c.kind == CollectiveKind::send ? ++to : ++from;
}

/// Under MIXTAPE_CHECK_COLLECTIVES=1: throws on all ranks, before anything is moved, when they do
/// not call the same.
void check_with_others(const Communicator::Impl& group, const Collective& c, std::uint64_t number) {
  if (group.size() == 1 || is_message(c) || !current_run().check_collectives) return;
  const std::vector<std::string> all =
      gather_texts(group, "call " + std::to_string(number), signature(c), c.describe);
  for (std::size_t r = 0; r < all.size(); ++r)
    MT_CHECK(all[r] == signature(c), c.describe, ": ranks are out of step: this rank, ", group.rank,
             ", calls ", signature(c), ", rank ", r, " calls ", all[r]);
}

/// The collective in a group of one rank.
void run_alone(const Collective& c) {
  if (!c.in || c.in.raw_data() == c.out.raw_data()) return;
  const NoGrad no_grad;
  c.out.detach().reshape({c.out.numel()}).copy_(c.in.detach().reshape({c.in.numel()}));
}

Work start(Communicator::Impl& group, Collective c) {
  if (c.out && c.kind != CollectiveKind::send) {
    check_written(name_of(c.kind), c.out);
    c.out.impl()->storage->bump_version();
  }
  const std::lock_guard lock(group.mutex);
  const std::uint64_t number = next_number(group, c);
  if (group.alone() || (group.size() == 1 && !c.in)) {
    run_alone(c);
    return Work();
  }
  Backend& backend = group.backend_of(c.in ? c.in.device() : Device::cpu(), name_of(c.kind));
  c.describe = describe(group.name, c, number);
  FlightRecorder& recorder = FlightRecorder::instance();
  const std::uint64_t id = recorder.begin({.group = group.name,
                                           .members = group.world_ranks,
                                           .sequence = number,
                                           .signature = signature(c),
                                           .text = c.describe});
  try {
    check_with_others(group, c, number);
    std::shared_ptr<WorkState> state = backend.start(c);
    recorder.started(id, state);
    return Work(std::move(state));
  } catch (...) {
    recorder.end(id);
    throw;
  }
}

Collective in_place(CollectiveKind kind, const Tensor& t, ReduceOp op, int peer) {
  check_tensor(name_of(kind), "t", t);
  return {.kind = kind, .op = op, .peer = peer, .in = t, .out = t};
}

}  // namespace

const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "avg", "min", "max"};
  return kNames[static_cast<int>(op)];
}

const char* name_of(CollectiveKind kind) {
  constexpr const char* kNames[] = {"all_reduce", "reduce",         "broadcast",
                                    "all_gather", "reduce_scatter", "all_to_all",
                                    "send",       "recv",           "barrier"};
  return kNames[static_cast<int>(kind)];
}

void Work::wait() {
  if (state_) state_->wait();
}
bool Work::done() const { return !state_ || state_->done(); }

Backend& Communicator::Impl::backend_of(Device d, const char* op) const {
  Backend* backend = (d.is_cpu() ? host : cuda).get();
  MT_CHECK(backend != nullptr, op, ": ", name, " cannot carry tensors on ", d, ": ",
           d.is_cpu() ? no_host : no_cuda);
  MT_CHECK(d.is_cpu() || d == device, op, ": expected a tensor on ", device,
           ", this rank's device, got one on ", d);
  return *backend;
}

Communicator::Impl& Communicator::impl() const {
  MT_CHECK(impl_, "Communicator: this rank is in no such group (undefined Communicator)");
  return *impl_;
}
int Communicator::rank() const { return impl().rank; }
int Communicator::size() const { return impl().size(); }
const std::vector<int>& Communicator::world_ranks() const { return impl().world_ranks; }
const std::string& Communicator::name() const { return impl().name; }
Device Communicator::device() const { return impl().device; }

Work Communicator::all_reduce_async(const Tensor& t, ReduceOp op) {
  Collective c = in_place(CollectiveKind::all_reduce, t, op, 0);
  check_op("all_reduce", op, t);
  return start(impl(), std::move(c));
}

Work Communicator::reduce_async(const Tensor& t, int root, ReduceOp op) {
  check_peer("reduce", "root", root, size());
  Collective c = in_place(CollectiveKind::reduce, t, op, root);
  check_op("reduce", op, t);
  return start(impl(), std::move(c));
}

Work Communicator::broadcast_async(const Tensor& t, int root) {
  check_peer("broadcast", "root", root, size());
  return start(impl(), in_place(CollectiveKind::broadcast, t, ReduceOp::sum, root));
}

Work Communicator::all_gather_async(const Tensor& out, const Tensor& in) {
  check_tensor("all_gather", "out", out);
  check_tensor("all_gather", "in", in);
  check_parts("all_gather", out, in, size());
  check_alias("all_gather", out, in, rank());
  return start(impl(), {.kind = CollectiveKind::all_gather, .in = in, .out = out});
}

Work Communicator::reduce_scatter_async(const Tensor& out, const Tensor& in, ReduceOp op) {
  check_tensor("reduce_scatter", "out", out);
  check_tensor("reduce_scatter", "in", in);
  check_parts("reduce_scatter", in, out, size());
  check_alias("reduce_scatter", in, out, rank());
  check_op("reduce_scatter", op, in);
  return start(impl(), {.kind = CollectiveKind::reduce_scatter, .op = op, .in = in, .out = out});
}

Work Communicator::all_to_all_async(const Tensor& out, const Tensor& in) {
  check_tensor("all_to_all", "out", out);
  check_tensor("all_to_all", "in", in);
  check_parts("all_to_all", out, in, 1);
  MT_CHECK(in.numel() % size() == 0, "all_to_all: expected elements for ", size(),
           " equal parts, got ", in.describe());
  MT_CHECK(!overlap(out, in), "all_to_all: in and out overlap; expected separate memory");
  return start(impl(), {.kind = CollectiveKind::all_to_all, .in = in, .out = out});
}

Work Communicator::send_async(const Tensor& t, int to) {
  check_peer("send", "to", to, size());
  MT_CHECK(to != rank(), "send: expected another rank than this one, got ", to);
  return start(impl(), in_place(CollectiveKind::send, t, ReduceOp::sum, to));
}

Work Communicator::recv_async(const Tensor& t, int from) {
  check_peer("recv", "from", from, size());
  MT_CHECK(from != rank(), "recv: expected another rank than this one, got ", from);
  return start(impl(), in_place(CollectiveKind::recv, t, ReduceOp::sum, from));
}

void Communicator::barrier() {
  Impl& group = impl();
  if (group.host || group.size() == 1) {
    start(group, {.kind = CollectiveKind::barrier}).wait();
    return;
  }
  const std::lock_guard lock(group.mutex);  // a run without MPI: through the store
  const std::uint64_t number = ++group.sequence;
  const std::string text = group.name + ": barrier #" + std::to_string(number);
  const FlightScope scope({.group = group.name,
                           .members = group.world_ranks,
                           .sequence = number,
                           .signature = "barrier",
                           .text = text});
  gather_texts(group, "barrier " + std::to_string(number), "", text);
}

}  // namespace mixtape::distributed
