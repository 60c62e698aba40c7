// The loader's threads without tensors, so that this file is also built with the thread sanitizer
// in every build. CASES 111.
#include "io/ordered_prefetch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

namespace mixtape::io {
namespace {

using std::chrono::milliseconds;

std::string item(std::int64_t k) { return "item " + std::to_string(k); }

// Makes later items finish before earlier ones now and then.
void uneven_work(std::int64_t k) {
  std::this_thread::sleep_for(std::chrono::microseconds((k * 7919 % 5) * 50));
}

double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(OrderedPrefetch, DeliversEveryItemInOrder) {
  for (const int workers : {1, 2, 5})
    for (const int capacity : {1, 2, 7}) {
      OrderedPrefetch<std::string> queue(workers, capacity);
      for (int pass = 0; pass < 2; ++pass) {
        queue.start(3, 100, [](std::int64_t k) {
          uneven_work(k);
          return item(k);
        });
        for (std::int64_t k = 3; k < 100; ++k) ASSERT_EQ(queue.next(), item(k));
        EXPECT_EQ(queue.next(), std::nullopt);
        EXPECT_EQ(queue.next(), std::nullopt);
      }
    }
}

TEST(OrderedPrefetch, EmptyRunEndsAtOnce) {
  OrderedPrefetch<std::string> queue(2, 2);
  EXPECT_EQ(queue.next(), std::nullopt);
  queue.start(5, 5, item);
  EXPECT_EQ(queue.next(), std::nullopt);
}

TEST(OrderedPrefetch, NeverMoreThanCapacityAhead) {
  constexpr int kCapacity = 3;
  std::atomic<std::int64_t> made{0}, taken{0}, most{0};
  OrderedPrefetch<std::string> queue(4, kCapacity);
  queue.start(0, 300, [&](std::int64_t k) {
    const std::int64_t ahead = ++made - taken;
    std::int64_t seen = most;
    while (ahead > seen && !most.compare_exchange_weak(seen, ahead)) {
    }
    return item(k);
  });
  for (int k = 0; k < 300; ++k) {
    if (k % 50 == 0) std::this_thread::sleep_for(milliseconds(10));
    ++taken;  // before next() makes room, so that `ahead` is never an overestimate
    ASSERT_EQ(queue.next(), item(k));
  }
  EXPECT_LE(most, kCapacity);
  EXPECT_GE(most, 2);
}

TEST(OrderedPrefetch, Case111ExceptionComesInItsTurnAndEndsTheRun) {
  OrderedPrefetch<std::string> queue(3, 6);
  const auto make = [](std::int64_t k) {
    if (k >= 7) throw std::out_of_range("no item " + std::to_string(k));
    uneven_work(k);
    return item(k);
  };
  for (int pass = 0; pass < 20; ++pass) {
    queue.start(0, 1000, make);
    for (int k = 0; k < 7; ++k) ASSERT_EQ(queue.next(), item(k));
    try {
      queue.next();
      FAIL() << "expected an exception";
    } catch (const std::out_of_range& e) {
      EXPECT_STREQ(e.what(), "no item 7");
    }
    EXPECT_EQ(queue.next(), std::nullopt);
  }
}

TEST(OrderedPrefetch, Case111DroppingARunNeverWaitsForTheQueue) {
  const auto slow = [](std::int64_t k) {
    std::this_thread::sleep_for(milliseconds(5));
    return item(k);
  };
  constexpr std::int64_t kMany = 1 << 20;  // 90 minutes of work
  EXPECT_LT(seconds_of([&] {
              for (int i = 0; i < 20; ++i) {
                OrderedPrefetch<std::string> queue(2, 4);
                queue.start(0, kMany, slow);
                for (int k = 0; k < i % 2; ++k) ASSERT_EQ(queue.next(), item(k));
                if (i % 4 == 3) std::this_thread::sleep_for(milliseconds(30));  // queue full
              }
            }),
            10.0);
  OrderedPrefetch<std::string> queue(2, 4);
  EXPECT_LT(seconds_of([&] {
              for (int i = 0; i < 50; ++i) {
                queue.start(i, kMany, slow);
                ASSERT_EQ(queue.next(), item(i));
              }
            }),
            10.0);
}

TEST(OrderedPrefetch, ItemsOfADroppedRunNeverShowUp) {
  OrderedPrefetch<std::string> queue(4, 4);
  for (int run = 0; run < 500; ++run) {
    queue.start(0, 100, [run](std::int64_t k) {
      if (k % 3 == 0) uneven_work(k + run);
      return std::to_string(run) + ":" + std::to_string(k);
    });
    for (int k = 0; k < run % 6; ++k)
      ASSERT_EQ(queue.next(), std::to_string(run) + ":" + std::to_string(k));
    if (run % 7 == 0) queue.cancel();
  }
}

TEST(OrderedPrefetch, EverythingMadeIsDestroyed) {
  const auto witness = std::make_shared<int>(0);
  {
    OrderedPrefetch<std::shared_ptr<int>> queue(3, 5);
    for (int run = 0; run < 50; ++run) {
      queue.start(0, 100, [witness](std::int64_t) { return witness; });
      for (int k = 0; k < run % 5; ++k) queue.next();
    }
  }
  EXPECT_EQ(witness.use_count(), 1);
}

}  // namespace
}  // namespace mixtape::io
