// Freed memory that other streams may still be using: it waits for an event on each of them before
// it can be handed out again. Shared by the device and the pinned allocator; the owner locks.
//
// An event recorded on a capturing stream becomes part of the graph and can never be queried, so
// what is freed during a capture waits for the capture's end first.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "engine/stream.h"

namespace mixtape::cudart {

/// What an allocator's record derives from.
struct Deferrable {
  std::vector<Stream> used_on;  // streams beside the one it was allocated for
  int pending_events = 0;

  void add_use(const Stream& stream) {
    if (std::find(used_on.begin(), used_on.end(), stream) == used_on.end())
      used_on.push_back(stream);
  }
};

class PendingQueue {
 public:
  /// Takes a freed item whose used_on is not empty.
  void add(Deferrable* item);
  bool empty() const { return waiting_ == 0 && captured_.empty(); }

  /// Calls ready(item) for each item whose events are done now.
  template <class Ready>
  void process(Ready&& ready) {
    if (!captured_.empty()) retry_captured();
    while (Deferrable* item = pop(false)) ready(item);
  }
  /// As process, but waits for the events; items of captures under way stay. True if any was ready.
  template <class Ready>
  bool wait(Ready&& ready) {
    if (!captured_.empty()) retry_captured();
    bool any = false;
    while (Deferrable* item = pop(true)) {
      ready(item);
      any = true;
    }
    return any;
  }

 private:
  struct Entry {
    void* event;
    Deferrable* item;
  };
  struct Queue {
    Stream stream;
    std::deque<Entry> entries;  // in the order of the stream's work
  };

  void record(Deferrable* item);
  void retry_captured();
  Queue& queue_of(const Stream& stream);
  /// The next item whose last event is done, or nullptr.
  Deferrable* pop(bool wait);

  std::vector<Queue> queues_;
  std::vector<Deferrable*> captured_;  // freed while one of their streams was capturing
  std::size_t waiting_ = 0;            // entries in all queues
};

}  // namespace mixtape::cudart
