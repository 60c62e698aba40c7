// Errors: their text, their place and the module they came from.
#include "engine/check.h"

#include <gtest/gtest.h>

#include <string>

#include "engine/env.h"
#include "engine/op_scope.h"
#include "engine/shape.h"

namespace mixtape {
namespace {

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string place(int line) {
  return " [tests/engine/check_test.cpp:" + std::to_string(line) + "]";
}

TEST(Check, JoinsItsPartsAndNamesThePlaceBelowTheRoot) {
  const int line = __LINE__ + 1;
  const auto f = [] { MT_CHECK(1 > 2, "matmul: expected a 2-D tensor, got ", Shape{2, 3, 4}); };
  EXPECT_EQ(message_of(f), "matmul: expected a 2-D tensor, got (2, 3, 4)" + place(line));
}

TEST(Check, EqPrintsExpectedAndGot) {
  const int line = __LINE__ + 1;
  const auto f = [] { MT_CHECK_EQ(784, 512, "matmul: inner dimensions"); };
  EXPECT_EQ(message_of(f), "matmul: inner dimensions: expected 512, got 784" + place(line));
}

TEST(Check, EvaluatesItsOperandsOnceAndPassesSilently) {
  int calls = 0;
  MT_CHECK_EQ(++calls, 1, "once");
  MT_CHECK(++calls == 2, "once");
  EXPECT_EQ(calls, 2);
}

TEST(Check, ErrorsInsideAModuleNameItsPath) {
  const ModuleScope outer("net"), inner("layers.0");
  EXPECT_TRUE(message_of([] { MT_THROW("boom"); }).ends_with("] (in module net.layers.0)"));
  // Wrapped once more on its way out, the path is not repeated.
  const std::string wrapped = message_of([] { throw Error("again: x (in module net.layers.0)"); });
  EXPECT_EQ(wrapped, "again: x (in module net.layers.0)");
}

TEST(Check, ErrorsWithoutAPlaceAreTheirText) {
  EXPECT_EQ(message_of([] { throw OutOfMemory("randn: out of memory"); }), "randn: out of memory");
}

TEST(OpScope, NestsAndRestores) {
  EXPECT_EQ(OpScope::current(), nullptr);
  {
    const OpScope outer("softmax");
    {
      const OpScope inner("exp", true);
      EXPECT_STREQ(OpScope::current(), "exp");
      EXPECT_TRUE(OpScope::in_backward());
    }
    EXPECT_STREQ(OpScope::current(), "softmax");
    EXPECT_FALSE(OpScope::in_backward());
  }
  EXPECT_EQ(OpScope::current(), nullptr);
}

TEST(ModuleScope, PathGrowsAndShrinks) {
  EXPECT_EQ(ModuleScope::path(), "");
  {
    const ModuleScope a("a");
    { const ModuleScope b("b"); }
    const ModuleScope c("c");
    EXPECT_EQ(ModuleScope::path(), "a.c");
  }
  EXPECT_EQ(ModuleScope::path(), "");
}

TEST(Env, FlagsAndNumbersRefuseWhatTheyDoNotKnow) {
  ::unsetenv("MIXTAPE_TEST_VARIABLE");
  EXPECT_FALSE(detail::env_flag("MIXTAPE_TEST_VARIABLE"));
  EXPECT_EQ(detail::env_positive("MIXTAPE_TEST_VARIABLE", 7), 7);
  ::setenv("MIXTAPE_TEST_VARIABLE", "1", 1);
  EXPECT_TRUE(detail::env_flag("MIXTAPE_TEST_VARIABLE"));
  ::setenv("MIXTAPE_TEST_VARIABLE", "12", 1);
  EXPECT_EQ(detail::env_positive("MIXTAPE_TEST_VARIABLE", 7), 12);
  for (const char* bad : {"yes", "-1", "3x", "99999999999"}) {
    ::setenv("MIXTAPE_TEST_VARIABLE", bad, 1);
    EXPECT_THROW(detail::env_flag("MIXTAPE_TEST_VARIABLE"), Error) << bad;
    EXPECT_THROW(detail::env_positive("MIXTAPE_TEST_VARIABLE", 7), Error) << bad;
  }
  ::unsetenv("MIXTAPE_TEST_VARIABLE");
}

}  // namespace
}  // namespace mixtape
