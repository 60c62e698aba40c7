// A queue from the thread that owns it to the profiler: chunks in a list, so that nothing is ever
// moved or locked. One thread pushes, one at a time drains; an item is published by the count of
// its chunk.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <utility>

namespace mixtape::profile {

template <class T>
class EventQueue {
 public:
  EventQueue() : head_(new Chunk), tail_(head_) {}
  ~EventQueue() {
    while (head_ != nullptr) delete std::exchange(head_, head_->next.load());
  }
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  /// Throws std::bad_alloc, leaving the queue as it was.
  void push(T&& item) {
    std::size_t n = tail_->count.load(std::memory_order_relaxed);
    if (n == kItems) {
      auto* chunk = new Chunk;
      tail_->next.store(chunk, std::memory_order_release);
      tail_ = chunk;
      n = 0;
    }
    tail_->items[n] = std::move(item);
    tail_->count.store(n + 1, std::memory_order_release);
  }

  /// Calls f(T&&) on what was pushed so far, oldest first.
  template <class F>
  void drain(F&& f) {
    for (;;) {
      const std::size_t count = head_->count.load(std::memory_order_acquire);
      for (; read_ < count; ++read_) f(std::move(head_->items[read_]));
      if (read_ < kItems) return;
      Chunk* next = head_->next.load(std::memory_order_acquire);
      if (next == nullptr) return;
      delete std::exchange(head_, next);
      read_ = 0;
    }
  }

 private:
  static constexpr std::size_t kItems = 256;
  struct Chunk {
    std::array<T, kItems> items{};
    std::atomic<std::size_t> count{0};
    std::atomic<Chunk*> next{nullptr};
  };
  Chunk* head_;           // the reader's
  std::size_t read_ = 0;  // of head_
  Chunk* tail_;           // the writer's
};

}  // namespace mixtape::profile
