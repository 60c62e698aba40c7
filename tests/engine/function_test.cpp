// Function: what can be put into it, what copies share, and what an empty one does.
#include "engine/function.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace mixtape {
namespace {

int twice(int x) { return 2 * x; }

TEST(Function, CallsWhatItHolds) {
  int calls = 0;
  const Function<void(int)> add = [&calls](int by) { calls += by; };
  add(2);
  add(3);
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(Function<int(int)>(twice)(21), 42);
  const Function<std::string(const std::string&)> same = [](const std::string& s) { return s; };
  EXPECT_EQ(same("tape"), "tape");
}

TEST(Function, DropsAResultThatNobodyAskedFor) {
  const Function<void(int)> f = twice;
  f(1);
}

TEST(Function, TakesMoveOnlyArgumentsAndCallables) {
  const Function<int(std::unique_ptr<int>)> value =
      [own = std::make_unique<int>(40)](std::unique_ptr<int> more) { return *own + *more; };
  EXPECT_EQ(value(std::make_unique<int>(2)), 42);
}

TEST(Function, CopiesShareTheCallable) {
  Function<int()> count = [n = 0]() mutable { return ++n; };
  const Function<int()> copy = count;
  EXPECT_EQ(count(), 1);
  EXPECT_EQ(copy(), 2);
  count = nullptr;
  EXPECT_FALSE(count);
  EXPECT_EQ(copy(), 3);
}

TEST(Function, FreesTheCallableWithTheLastCopy) {
  auto held = std::make_shared<int>(1);
  {
    const Function<int()> f = [held] { return *held; };
    const Function<int()> copy = f;
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(held.use_count(), 1);
}

TEST(Function, EmptyIsFalseAndThrowsWhenCalled) {
  const Function<int(int)> none;
  EXPECT_FALSE(none);
  EXPECT_THROW(none(1), Error);
  int (*null)(int) = nullptr;
  EXPECT_FALSE((Function<int(int)>(null)));
}

}  // namespace
}  // namespace mixtape
