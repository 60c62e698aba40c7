#include "engine/cuda/pending.h"

#include <utility>

#include "engine/cuda/backend.h"
#include "engine/cuda/capture_mode.h"

namespace mixtape::cudart {
namespace {
bool any_capturing(const Deferrable& item) {
  return std::any_of(item.used_on.begin(), item.used_on.end(),
                     [](const Stream& s) { return is_capturing(s.device().index, s.native()); });
}
}  // namespace

void PendingQueue::add(Deferrable* item) {
  if (any_capturing(*item))
    captured_.push_back(item);
  else
    record(item);
}

// If a call fails, the item keeps a count that no event will take away: it is lost rather than
// handed out while it may be in use.
void PendingQueue::record(Deferrable* item) {
  ++item->pending_events;
  for (const Stream& stream : item->used_on) {
    const int device = stream.device().index;
    void* event = acquire_event(device, false);
    record_event(device, event, stream.native());
    ++item->pending_events;
    queue_of(stream).entries.push_back({event, item});
    ++waiting_;
  }
  --item->pending_events;
  item->used_on.clear();
}

// Captures end all at once more often than one by one: the first item speaks for the rest.
void PendingQueue::retry_captured() {
  if (any_capturing(*captured_.front())) return;
  for (Deferrable* item : std::exchange(captured_, {})) add(item);
}

PendingQueue::Queue& PendingQueue::queue_of(const Stream& stream) {
  for (Queue& queue : queues_)
    if (queue.stream == stream) return queue;
  return queues_.emplace_back(Queue{stream, {}});
}

Deferrable* PendingQueue::pop(bool wait) {
  if (waiting_ == 0) return nullptr;
  const RelaxedCapture relaxed;
  for (Queue& queue : queues_) {
    const int device = queue.stream.device().index;
    while (!queue.entries.empty()) {
      const Entry entry = queue.entries.front();
      if (wait)
        synchronize_event(device, entry.event);
      else if (!event_done(device, entry.event))
        break;
      queue.entries.pop_front();
      --waiting_;
      release_event(device, false, entry.event);
      if (--entry.item->pending_events == 0) return entry.item;
    }
  }
  return nullptr;
}

}  // namespace mixtape::cudart
