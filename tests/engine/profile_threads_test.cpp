// Recording while other threads run ops, end, and start: for the thread sanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "engine/profile_queue.h"
#include "ops/ops.h"
#include "tests/engine/profile_once.h"

namespace mixtape {
namespace {

using testing::profile_once;
using testing::ranges_named;

TEST(EventQueue, hands_over_everything_in_order) {
  constexpr int kItems = 20000;
  profile::EventQueue<int> queue;
  std::thread writer([&] {
    for (int i = 0; i < kItems; ++i) queue.push(int{i});
  });
  int next = 0;
  while (next < kItems)
    queue.drain([&](int&& i) {
      EXPECT_EQ(i, next);
      ++next;
    });
  writer.join();
  EXPECT_EQ(next, kItems);
}

TEST(ProfileThreads, each_thread_has_a_row) {
  const ProfileResult r = profile_once([] {
    ones({3}) + ones({3});
    std::thread([] {
      const RecordFunction range("worker");
      ones({3}) * ones({3});
    }).join();
  });
  const HostRange main = ranges_named(r, "add").at(0), worker = ranges_named(r, "worker").at(0);
  EXPECT_EQ(main.thread, 0);
  EXPECT_NE(worker.thread, 0);
  EXPECT_EQ(ranges_named(r, "mul").at(0).thread, worker.thread);
  ASSERT_EQ(r.threads.size(), 2u);
  EXPECT_EQ(r.threads[0], "main thread");
  EXPECT_NE(r.threads[1], r.threads[0]);
}

TEST(ProfileThreads, windows_start_and_stop_while_others_work) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> workers;
  for (int t = 0; t < 3; ++t)
    workers.emplace_back([&] {
      while (!stop) {
        const RecordFunction range("outer");
        const Tensor x = ones({16}).set_requires_grad();
        sum(x * x).backward();
      }
    });
  int windows = 0;
  std::set<std::uint64_t> ids;
  {
    Profiler profiler({.schedule = {.wait = 1, .warmup = 1, .active = 2, .repeat = 5},
                       .cuda = false,
                       .flops = false,
                       .on_trace = [&](const ProfileResult& r) {
                         ++windows;
                         for (const HostRange& range : r.ranges) {
                           EXPECT_TRUE(ids.insert(range.id).second);  // in one window alone
                           EXPECT_LE(range.begin_ns, range.end_ns);
                           EXPECT_GE(range.thread, 0);
                           EXPECT_LT(range.thread, static_cast<int>(r.threads.size()));
                         }
                       }});
    for (int step = 0; step < 20; ++step) {
      const Tensor x = ones({16});
      for (int i = 0; i < 20; ++i) x + x;
      profiler.step();
    }
  }
  stop = true;
  for (std::thread& t : workers) t.join();
  EXPECT_EQ(windows, 5);
  EXPECT_GE(ids.size(), 5u * 2 * 20);
}

TEST(ProfileThreads, one_that_ends_within_the_window_is_kept) {
  const ProfileResult r = profile_once([] {
    for (int i = 0; i < 8; ++i) std::thread([] { ones({3}) * ones({3}); }).join();
  });
  EXPECT_EQ(ranges_named(r, "mul").size(), 8u);
  EXPECT_TRUE(profile_once([] {}).ranges.empty());
}

}  // namespace
}  // namespace mixtape
