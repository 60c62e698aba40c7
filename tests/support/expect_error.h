// Asserts that a call throws mixtape::Error with a text.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "engine/check.h"

namespace mixtape::testing {

template <class F>
void expect_error(F&& f, const std::string& text) {
  try {
    f();
    ADD_FAILURE() << "expected an error with \"" << text << "\", got none";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(text), std::string::npos)
        << "expected \"" << text << "\" in \"" << e.what() << "\"";
  }
}

}  // namespace mixtape::testing
