// parallel_for: coverage, determinism, errors, inherited state, concurrent callers, fork and exit.
#include "engine/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "engine/thread_state.h"

namespace mixtape {
namespace {

using Ranges = std::set<std::pair<std::int64_t, std::int64_t>>;

Ranges ranges_of(std::int64_t begin, std::int64_t end, std::int64_t grain) {
  std::mutex mutex;
  Ranges ranges;
  parallel_for(begin, end, grain, [&](std::int64_t b, std::int64_t e) {
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(ranges.insert({b, e}).second) << "range " << b << " was run twice";
  });
  return ranges;
}

class ThreadPool : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(4); }
};

TEST_F(ThreadPool, CoversEveryItemOnceInRangesOfAtLeastTheGrain) {
  for (const int threads : {1, 2, 3, 4, 8}) {
    set_num_threads(threads);
    for (const std::int64_t n : {0, 1, 2, 3, 7, 64, 1000, 1001}) {
      for (const std::int64_t grain : {0, 1, 2, 10, 500, 5000}) {
        const Ranges ranges = ranges_of(-3, n - 3, grain);
        EXPECT_LE(ranges.size(), static_cast<std::size_t>(threads));
        std::int64_t at = -3;
        for (const auto& [b, e] : ranges) {
          EXPECT_EQ(b, at);
          EXPECT_GT(e, b);
          if (e != n - 3) {
            EXPECT_GE(e - b, grain);
          }
          at = e;
        }
        EXPECT_EQ(at, n - 3);
        EXPECT_EQ(ranges, ranges_of(-3, n - 3, grain)) << "the split must not depend on timing";
      }
    }
  }
}

TEST_F(ThreadPool, EmptyAndReversedRangesRunNothing) {
  int calls = 0;
  parallel_for(5, 5, 1, [&](auto, auto) { ++calls; });
  parallel_for(5, -5, 1, [&](auto, auto) { ++calls; });
  EXPECT_EQ(calls, 0);
}

TEST_F(ThreadPool, UsesItsWorkers) {
  // Each range waits for all others, so they must be on different threads.
  std::atomic<int> inside{0};
  std::mutex mutex;
  std::set<std::thread::id> ids;
  parallel_for(0, 4, 1, [&](std::int64_t, std::int64_t) {
    {
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    }
    ++inside;
    while (inside < 4) std::this_thread::yield();
  });
  EXPECT_EQ(ids.size(), 4u);
}

TEST_F(ThreadPool, ManySmallJobsInARow) {
  std::vector<std::int64_t> sums(4, 0);
  std::int64_t expected = 0;
  for (int i = 0; i < 20000; ++i) {
    parallel_for(0, 4, 1, [&](std::int64_t b, std::int64_t e) {
      for (std::int64_t k = b; k < e; ++k) sums[static_cast<std::size_t>(k)] += i;
    });
    expected += i;
  }
  EXPECT_EQ(sums, std::vector<std::int64_t>(4, expected));
}

TEST_F(ThreadPool, NestedCallsRunSeriallyOnTheirThread) {
  EXPECT_FALSE(in_parallel_region());
  std::atomic<int> items{0};
  parallel_for(0, 4, 1, [&](std::int64_t, std::int64_t) {
    EXPECT_TRUE(in_parallel_region());
    const auto outer = std::this_thread::get_id();
    parallel_for(0, 100, 1, [&](std::int64_t b, std::int64_t e) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      items += static_cast<int>(e - b);
    });
    EXPECT_THROW(set_num_threads(2), Error);
  });
  EXPECT_EQ(items, 400);
  EXPECT_FALSE(in_parallel_region());
}

TEST_F(ThreadPool, TheFirstRangesExceptionReachesTheCaller) {
  for (int round = 0; round < 50; ++round) {
    try {
      parallel_for(0, 4, 1, [&](std::int64_t b, std::int64_t) {
        if (b >= 1) MT_THROW("range ", b);
      });
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("range 1 ")) << error.what();
    }
    EXPECT_FALSE(in_parallel_region());
    EXPECT_EQ(ranges_of(0, 4, 1).size(), 4u) << "the pool must go on working";
  }
}

TEST_F(ThreadPool, WorkersSeeTheCallersModesOpAndModule) {
  const ThreadState before = thread_state;
  const OpScope op("dropout", true);
  const ModuleScope module("net.encoder.layers.11.attention");
  thread_state.grad = false;
  thread_state.autocast = true;
  thread_state.autocast_dtype = Dtype::f16;
  std::atomic<int> inside{0};
  parallel_for(0, 4, 1, [&](std::int64_t, std::int64_t) {
    EXPECT_FALSE(thread_state.grad);
    EXPECT_TRUE(thread_state.autocast);
    EXPECT_EQ(thread_state.autocast_dtype, Dtype::f16);
    EXPECT_STREQ(OpScope::current(), "dropout");
    EXPECT_TRUE(OpScope::in_backward());
    EXPECT_EQ(ModuleScope::path(), "net.encoder.layers.11.attention");
    ++inside;
    while (inside < 4) std::this_thread::yield();  // so that every worker takes part
  });
  thread_state = before;
  inside = 0;
  parallel_for(0, 4, 1, [&](std::int64_t, std::int64_t) {
    EXPECT_TRUE(thread_state.grad);
    EXPECT_FALSE(thread_state.autocast);
    ++inside;
    while (inside < 4) std::this_thread::yield();
  });
}

TEST_F(ThreadPool, CallersOnSeveralThreadsGetTheirOwnResults) {
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([t] {
      for (int i = 0; i < 2000; ++i) {
        std::atomic<std::int64_t> sum{0};
        parallel_for(0, 64, 1, [&](std::int64_t b, std::int64_t e) {
          for (std::int64_t k = b; k < e; ++k) sum += k * (t + 1);
        });
        ASSERT_EQ(sum, 63 * 32 * (t + 1));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_F(ThreadPool, TheNumberOfThreadsCanChangeAtAnyTime) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) EXPECT_LE(ranges_of(0, 64, 1).size(), 8u);
  });
  for (int i = 0; i < 50; ++i) {
    const int n = 1 + i % 8;
    set_num_threads(n);
    EXPECT_EQ(num_threads(), n);
  }
  stop = true;
  other.join();
  EXPECT_THROW(set_num_threads(0), Error);
}

TEST_F(ThreadPool, IdleWorkersSleep) {
  ranges_of(0, 4, 1);
  const auto cpu_seconds = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(cpu_seconds() - before, 0.1) << "three spinning workers would take 0.3 to 0.9";
}

TEST_F(ThreadPool, WorksInAForkedChild) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizers' own locks do not survive a fork with other threads";
#endif
  ranges_of(0, 4, 1);
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> inside{0};
    parallel_for(0, 4, 1, [&](std::int64_t, std::int64_t) {
      ++inside;
      while (inside < 4) std::this_thread::yield();
    });
    _exit(inside == 4 && num_threads() == 4 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

using ThreadPoolDeathTest = ThreadPool;

TEST_F(ThreadPoolDeathTest, ExitsCleanly) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run_and_exit = [] {
    set_num_threads(4);
    ranges_of(0, 4, 1);
    std::exit(0);
  };
  EXPECT_EXIT(run_and_exit(), ::testing::ExitedWithCode(0), "");
  const auto exit_in_body = [] {
    set_num_threads(4);
    parallel_for(0, 4, 1, [](std::int64_t b, std::int64_t) {
      if (b == 0) std::exit(7);
    });
  };
  EXPECT_EXIT(exit_in_body(), ::testing::ExitedWithCode(7), "");
  const auto run_after_exit_began = [] {
    std::atexit([] { _exit(ranges_of(0, 4, 1).size() == 4 ? 3 : 4); });  // runs after the pool's
    set_num_threads(4);
    ranges_of(0, 4, 1);
    std::exit(0);
  };
  EXPECT_EXIT(run_after_exit_began(), ::testing::ExitedWithCode(3), "");
}

TEST(ThreadPoolEnvironmentDeathTest, ThreadCountComesFromTheEnvironment) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto count_with = [](const char* ours, const char* omp) {
    ours == nullptr ? unsetenv("MIXTAPE_NUM_THREADS") : setenv("MIXTAPE_NUM_THREADS", ours, 1);
    omp == nullptr ? unsetenv("OMP_NUM_THREADS") : setenv("OMP_NUM_THREADS", omp, 1);
    try {
      std::exit(num_threads());
    } catch (const Error& error) {
      std::exit(99);
    }
  };
  EXPECT_EXIT(count_with("3", "5"), ::testing::ExitedWithCode(3), "");
  EXPECT_EXIT(count_with(nullptr, "5,2"), ::testing::ExitedWithCode(5), "");
  EXPECT_EXIT(count_with("zero", nullptr), ::testing::ExitedWithCode(99), "");
}

}  // namespace
}  // namespace mixtape
