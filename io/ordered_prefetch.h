// Worker threads that make item 0, 1, 2, ... ahead of time and hand them over in order.
//
// Each worker claims the next number; at most `capacity` items are in the making or waiting, so
// memory is bounded and a slow consumer stops the workers. What item k throws, the consumer gets
// when it asks for item k. Dropping a run half way never waits for the queue to drain: items still
// in the making belong to an old run and are thrown away when they arrive.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace mixtape::io {

/// start(), next() and cancel() are for one consumer thread.
template <class T>
class OrderedPrefetch {
 public:
  /// Threads start with the first run. workers, capacity >= 1.
  OrderedPrefetch(int workers, int capacity)
      : workers_(workers), slots_(static_cast<std::size_t>(capacity)) {}
  /// Waits for the items in the making, for nothing else.
  ~OrderedPrefetch() { stop(); }
  OrderedPrefetch(const OrderedPrefetch&) = delete;
  OrderedPrefetch& operator=(const OrderedPrefetch&) = delete;

  /// Begins a run over [first, last), dropping the one before. `make` is called from all workers at
  /// once and may be called for a while after the run was dropped.
  void start(std::int64_t first, std::int64_t last, std::function<T(std::int64_t)> make) {
    cancel();
    {
      const std::lock_guard lock(mutex_);
      run_ = std::make_shared<const Run>(Run{std::move(make), last});
      next_claim_ = next_out_ = first;
    }
    start_threads();
    work_.notify_all();
  }

  /// The next item, or nothing after the last. Rethrows what making it threw; that ends the run.
  std::optional<T> next() {
    std::unique_lock lock(mutex_);
    if (!run_ || next_out_ == run_->last) return std::nullopt;
    Slot& slot = slot_of(next_out_);
    ready_.wait(lock, [&] { return slot.value || slot.error; });
    if (slot.error) {
      const std::exception_ptr error = slot.error;
      lock.unlock();
      cancel();
      std::rethrow_exception(error);
    }
    std::optional<T> value = std::exchange(slot.value, std::nullopt);
    ++next_out_;
    lock.unlock();
    work_.notify_one();
    return value;
  }

  /// Drops the run; next() then returns nothing.
  void cancel() {
    std::vector<Slot> dropped(slots_.size());
    std::shared_ptr<const Run> run;
    const std::lock_guard lock(mutex_);
    run.swap(run_);
    slots_.swap(dropped);
    // The lock goes first: what was dropped is destroyed without it.
  }

 private:
  struct Run {
    std::function<T(std::int64_t)> make;
    std::int64_t last;
  };
  struct Slot {
    std::optional<T> value = {};
    std::exception_ptr error = {};
  };

  Slot& slot_of(std::int64_t k) { return slots_[static_cast<std::size_t>(k) % slots_.size()]; }
  bool can_claim() const {
    return run_ && next_claim_ < run_->last &&
           next_claim_ - next_out_ < static_cast<std::int64_t>(slots_.size());
  }

  void start_threads() {
    try {
      while (static_cast<int>(threads_.size()) < workers_)
        threads_.emplace_back([this] { work(); });
    } catch (...) {  // the system has no more threads
      stop();
      stopping_ = false;
      throw;
    }
  }

  void stop() {
    cancel();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& t : threads_) t.join();
    threads_.clear();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stopping_ || can_claim(); });
      if (stopping_) return;
      std::shared_ptr<const Run> run = run_;
      const std::int64_t k = next_claim_++;
      lock.unlock();
      Slot made;
      try {
        made.value.emplace(run->make(k));
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      const bool wanted = run == run_;
      if (wanted) slot_of(k) = std::move(made);
      lock.unlock();
      if (wanted) ready_.notify_one();
      made = {};
      run.reset();
      lock.lock();
    }
  }

  const int workers_;
  std::mutex mutex_;
  std::condition_variable work_, ready_;
  std::shared_ptr<const Run> run_;
  std::vector<Slot> slots_;
  std::int64_t next_claim_ = 0, next_out_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace mixtape::io
