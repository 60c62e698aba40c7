#include "engine/node.h"

#include <atomic>

#include "engine/anomaly.h"

namespace mixtape {
namespace {

std::atomic<std::uint64_t> sequences{1};

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }
constexpr std::size_t kOpOffset = round_up(sizeof(Node), alignof(std::max_align_t));

}  // namespace

std::size_t Node::bytes(const OpTable& table) { return kOpOffset + table.size; }

const void* Node::op() const { return reinterpret_cast<const char*>(this) + kOpOffset; }

Ref<Node> Node::create(const OpTable& table, const void* op) {
  Node* node = new (pool_allocate(bytes(table))) Node;
  node->table = &table;
  node->sequence = sequences.fetch_add(1, std::memory_order_relaxed);
  node->autocast = thread_state;
  table.copy(const_cast<void*>(node->op()), op);
  if (anomaly_enabled()) node->extra().where = describe_call_site();
  return Ref<Node>::adopt(node);
}

std::uint64_t Node::next_sequence() { return sequences.load(std::memory_order_relaxed); }

void Node::destroy(Node* node) noexcept {
  // Freeing a node frees its edges, which frees more nodes: those go to a list instead of the
  // stack.
  thread_local std::vector<Node*>* pending = nullptr;
  if (pending) {
    pending->push_back(node);
    return;
  }
  std::vector<Node*> list{node};
  pending = &list;
  while (!list.empty()) {
    Node* next = list.back();
    list.pop_back();
    const OpTable& table = *next->table;
    table.destroy(const_cast<void*>(next->op()));
    next->~Node();
    pool_free(next, bytes(table));
  }
  pending = nullptr;
}

std::int64_t Node::saved_bytes() const {
  std::int64_t total = 0;
  for (const SavedTensor& s : saved.entries_)
    if (s.storage) total += s.sizes.numel() * static_cast<std::int64_t>(size_of(s.dtype));
  return total;
}

void Node::free_saved() {
  saved.entries_.clear();
  saved.freed_ = true;
}

NodeExtras& Node::extra() {
  if (!extras) extras = std::make_unique<NodeExtras>();
  return *extras;
}

Edge gradient_edge(const Tensor& t) {
  if (!t.defined()) return {};
  const TensorImpl& impl = *t.impl();
  if (impl.grad_fn) {
    MT_CHECK(
        !impl.is_view || impl.recorded_writes == impl.storage->recorded_writes(),
        impl.grad_fn->table->info->name,
        ": this view was made before its memory was written in place on the tape, so its history "
        "is out of date; make the view again after the in-place op");
    return {impl.grad_fn, {}, impl.output_index};
  }
  if (impl.requires_grad) return {{}, t.impl(), 0};
  return {};
}

}  // namespace mixtape
