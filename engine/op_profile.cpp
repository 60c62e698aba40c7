#include "engine/op_profile.h"

#include "engine/profile_recording.h"

namespace mixtape::profile {
namespace {

/// Bytes of memory behind t: an expanded dimension is read from cache.
double bytes_of(const Tensor& t) {
  if (!t) return 0;
  std::int64_t n = 1;
  for (int i = 0; i < t.dim(); ++i)
    if (t.strides()[i] != 0) n *= t.shape()[i];
  return static_cast<double>(n) * static_cast<double>(size_of(t.dtype()));
}
double bytes_of(const Meta& m) {
  return static_cast<double>(m.shape.numel()) * static_cast<double>(size_of(m.dtype));
}
double bytes_of(Inputs tensors) {
  double total = 0;
  for (const Tensor& t : tensors) total += bytes_of(t);
  return total;
}

void note_shapes(RecordedRange& range, Inputs in) {
  if ((mode() & kShapes) == 0) return;
  range.inputs.reserve(in.size());
  for (const Tensor& t : in)
    range.inputs.push_back(t ? TypedShape{t.shape(), t.dtype()} : TypedShape{});
}

void note_work(RecordedRange& range, const OpTable& table, const void* op, const OpCall& call,
               double all_bytes) {
  const OpWork work = table.work != nullptr ? table.work(op, call) : OpWork{};
  range.flops = work.flops;
  range.bytes = work.bytes < 0 ? all_bytes : work.bytes;
}

std::span<const Meta> metas(const auto& list) {
  return {list.begin(), static_cast<std::size_t>(list.size())};
}

}  // namespace

void note_forward(const OpTable& table, const void* op, Inputs in, Inputs out) {
  RecordedRange* range = innermost();
  if (range == nullptr) return;
  note_shapes(*range, in);
  if ((mode() & kWork) == 0) return;
  SmallVector<Meta, 4> ins, outs;
  for (const Tensor& t : in) ins.push_back(t ? meta_of(t) : Meta{});
  for (const Tensor& t : out) outs.push_back(meta_of(t));
  note_work(*range, table, op, {.in = metas(ins), .out = metas(outs)},
            bytes_of(in) + bytes_of(out));
}

void note_view(const Tensor& in) {
  if (RecordedRange* range = innermost()) note_shapes(*range, Inputs(&in, 1));
}

void note_node(Node& node) {
  node.module = module_id();
  RecordedRange* range = innermost();
  if (range != nullptr && range->kind == ProfileKind::op) range->sequence = node.sequence;
}

void note_backward_pass() {
  if (RecordedRange* range = innermost()) range->backward = true;
}

void note_backward(const Node& node, Inputs dy, std::span<const GradDst> dx, bool recorded) {
  RecordedRange* range = innermost();
  if (range == nullptr) return;
  range->backward = true;
  range->module_id = node.module;
  range->sequence = node.sequence;
  note_shapes(*range, dy);
  if ((mode() & kWork) == 0 || recorded) return;
  OpCall call{.in = metas(node.inputs), .out = metas(node.outputs), .backward = true};
  double bytes = bytes_of(dy) + static_cast<double>(node.saved_bytes());
  for (std::size_t i = 0; i < dx.size(); ++i) {
    if (!dx[i]) continue;
    call.wanted |= 1u << i;
    bytes += bytes_of(dx[i].meta());
  }
  if (node.table->view != nullptr) bytes = 0;
  note_work(*range, *node.table, node.op(), call, bytes);
}

}  // namespace mixtape::profile
