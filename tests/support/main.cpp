// main() of the test binaries. On a machine without a usable GPU, a run that ctest asked for on
// CUDA ends with kSkipCode, which shows as skipped; listing the tests works everywhere.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/support/devices.h"

namespace {
constexpr int kSkipCode = 77;  // tools/cmake/MixtapeTest.cmake: SKIP_RETURN_CODE
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!GTEST_FLAG_GET(list_tests) && mixtape::testing::chosen_device() == "cuda" &&
      mixtape::cuda_device_count() == 0) {
    std::puts("[  SKIPPED ] no usable CUDA device on this machine");
    return kSkipCode;
  }
  return RUN_ALL_TESTS();
}
