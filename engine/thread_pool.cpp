// One job at a time, on workers that start with the first one. A job is published as a count of
// unclaimed ranges: whoever lowers the count owns that range, the caller included, so a worker that
// wakes late costs nothing and a finished job has no one left in it. Idle workers spin for about
// 50 us (the gap between two ops) and then sleep.
#include "engine/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/env.h"
#include "engine/op_scope.h"
#include "engine/thread_state.h"

namespace mixtape {
namespace {

using Body = FunctionRef<void(std::int64_t, std::int64_t)>;

thread_local constinit bool in_region = false;

constexpr std::uint32_t kStop = ~std::uint32_t{0};
constexpr auto kSpinTime = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits until done(value), spinning first; returns the value.
template <class Done>
std::uint32_t spin_then_wait(const std::atomic<std::uint32_t>& value, Done done) {
  const auto limit = std::chrono::steady_clock::now() + kSpinTime;
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      const std::uint32_t v = value.load(std::memory_order_acquire);
      if (done(v)) return v;
      pause();
    }
    if (std::chrono::steady_clock::now() >= limit) break;
  }
  for (;;) {
    const std::uint32_t v = value.load(std::memory_order_acquire);
    if (done(v)) return v;
    value.wait(v, std::memory_order_acquire);
  }
}

// The cores of the affinity mask, or of the control group's quota when that is lower.
int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  if (cores < 1) cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (file >> quota >> period && quota > 0 && period > 0)
    cores = std::clamp(static_cast<int>(quota / period + 0.999), 1, cores);
  return cores;
}

// OMP_NUM_THREADS may be a list, one number for each nesting level; the first counts.
int threads_from_environment() {
  const int ours = detail::env_positive("MIXTAPE_NUM_THREADS", 0);
  if (ours > 0) return ours;
  const char* omp = std::getenv("OMP_NUM_THREADS");
  const int n = omp == nullptr ? 0 : std::atoi(omp);
  return n > 0 ? n : usable_cores();
}

struct Job {
  Body* body = nullptr;
  std::int64_t begin = 0, end = 0, chunk = 0;
  std::uint32_t ranges = 0;
  ThreadState state;
  const char* op = nullptr;
  bool backward = false;
  std::string module_path;
  std::mutex error_mutex;
  std::exception_ptr error;
  std::uint32_t error_range = 0;

  void run(std::uint32_t range) {
    const std::int64_t first = begin + static_cast<std::int64_t>(range) * chunk;
    try {
      (*body)(first, std::min(end, first + chunk));
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (error && error_range < range) return;
      error = std::current_exception();
      error_range = range;
    }
  }

  // On a worker: in the caller's modes and scopes.
  void run_inheriting(std::uint32_t range) {
    thread_state = state;
    const OpScope scope(op, backward);
    if (module_path.empty()) return run(range);
    const ModuleScope module(module_path);
    run(range);
  }
};

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {}

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void set_threads(int n) {
    const std::lock_guard lock(dispatch_);
    stop_workers();
    threads_.store(n, std::memory_order_relaxed);
  }

  /// False if another thread's job has the workers.
  bool try_run(std::int64_t begin, std::int64_t end, std::int64_t chunk, std::uint32_t ranges,
               Body& body) {
    const std::unique_lock lock(dispatch_, std::try_to_lock);
    if (!lock.owns_lock() || closed_) return false;
    start_workers();
    job_.body = &body;
    job_.begin = begin;
    job_.end = end;
    job_.chunk = chunk;
    job_.ranges = ranges;
    job_.state = thread_state;
    job_.op = OpScope::current();
    job_.backward = OpScope::in_backward();
    job_.module_path = ModuleScope::path();
    unfinished_.store(ranges - 1, std::memory_order_relaxed);
    unclaimed_.store(ranges - 1, std::memory_order_seq_cst);
    wake(ranges - 1);
    in_region = true;
    job_.run(0);
    for (std::uint32_t range; (range = claim()) != 0;) {
      job_.run(range);
      unfinished_.fetch_sub(1, std::memory_order_seq_cst);
    }
    in_region = false;
    spin_then_wait(unfinished_, [](std::uint32_t v) { return v == 0; });
    if (job_.error) [[unlikely]]
      std::rethrow_exception(std::exchange(job_.error, nullptr));
    return true;
  }

  /// Ends the workers; later jobs run on their callers. For the process's exit.
  void close() {
    if (in_region) return;  // exit() called by a body: its own thread cannot be joined
    for (int i = 0; i < 200; ++i) {
      if (const std::unique_lock lock(dispatch_, std::try_to_lock); lock.owns_lock()) {
        closed_ = true;
        stop_workers();
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  /// The number of a range that now belongs to this thread, or 0 when all are taken.
  std::uint32_t claim() {
    std::uint32_t left = unclaimed_.load(std::memory_order_acquire);
    while (left != 0 && left != kStop) {
      if (unclaimed_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel))
        return job_.ranges - left;
    }
    return 0;
  }

  void wake(std::uint32_t count) {
    if (count >= workers_.size() / 2) {
      unclaimed_.notify_all();
    } else {
      for (std::uint32_t i = 0; i < count; ++i) unclaimed_.notify_one();
    }
  }

  void work() {
    in_region = true;
    for (;;) {
      const std::uint32_t seen = spin_then_wait(unclaimed_, [](std::uint32_t v) { return v != 0; });
      if (seen == kStop) return;
      for (std::uint32_t range; (range = claim()) != 0;) {
        job_.run_inheriting(range);
        if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1) unfinished_.notify_one();
      }
    }
  }

  void start_workers() {
    const auto wanted = static_cast<std::size_t>(threads() - 1);
    try {
      while (workers_.size() < wanted) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      MT_THROW("parallel_for: cannot start worker ", workers_.size() + 1, " of ", wanted, ": ",
               error.what());
    }
  }

  void stop_workers() {
    if (workers_.empty()) return;
    unclaimed_.store(kStop, std::memory_order_seq_cst);
    unclaimed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    unclaimed_.store(0, std::memory_order_relaxed);
  }

  std::mutex dispatch_;  // held for the whole of a job
  std::atomic<int> threads_;
  bool closed_ = false;
  std::vector<std::thread> workers_;
  Job job_;
  // Ranges 1 .. ranges-1 that nobody has taken; range 0 is the caller's.
  alignas(64) std::atomic<std::uint32_t> unclaimed_{0};
  alignas(64) std::atomic<std::uint32_t> unfinished_{0};
};

std::atomic<Pool*> the_pool{nullptr};

// Never destroyed, since static objects may still compute while the process exits. A forked child
// has none of the workers and gets a pool of its own.
Pool& pool() {
  static const bool made = [] {
    the_pool = new Pool(threads_from_environment());
    std::atexit([] { the_pool.load()->close(); });
    pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool(the_pool.load()->threads()); });
    return true;
  }();
  static_cast<void>(made);
  return *the_pool.load(std::memory_order_relaxed);
}

struct RegionScope {
  const bool previous = std::exchange(in_region, true);
  ~RegionScope() { in_region = previous; }
};

}  // namespace

int num_threads() { return pool().threads(); }

void set_num_threads(int n) {
  MT_CHECK(n >= 1, "set_num_threads: expected at least 1 thread, got ", n);
  MT_CHECK(!in_region, "set_num_threads: called inside a parallel_for body");
  pool().set_threads(n);
}

bool in_parallel_region() { return in_region; }

void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, Body body) {
  const std::int64_t n = end - begin;
  if (n <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  if (n <= grain) return body(begin, end);
  Pool& workers = pool();
  const std::int64_t threads = workers.threads();
  const std::int64_t chunk = std::max(grain, (n + threads - 1) / threads);
  const std::int64_t ranges = (n + chunk - 1) / chunk;
  if (ranges == 1) return body(begin, end);
  if (!in_region && workers.try_run(begin, end, chunk, static_cast<std::uint32_t>(ranges), body))
    return;
  const RegionScope region;
  for (std::int64_t first = begin; first < end; first += chunk)
    body(first, std::min(end, first + chunk));
}

}  // namespace mixtape
