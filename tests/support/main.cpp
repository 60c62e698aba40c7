// main() of the test binaries. On a machine without a usable GPU, a run that ctest asked for on
// CUDA ends with kSkipCode, which shows as skipped; listing the tests works everywhere. A run of no
// test at all fails.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/support/devices.h"

namespace {
constexpr int kSkipCode = 77;  // tools/cmake/MixtapeTest.cmake: SKIP_RETURN_CODE
}

int main(int argc, char** argv) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // A caching allocator would hide a use after free. An environment that says otherwise wins.
  setenv("MIXTAPE_NO_CACHE", "1", 0);
#endif
  testing::InitGoogleTest(&argc, argv);
  if (!GTEST_FLAG_GET(list_tests) && mixtape::testing::chosen_device() == "cuda" &&
      mixtape::cuda_device_count() == 0) {
    std::puts("[  SKIPPED ] no usable CUDA device on this machine");
    return kSkipCode;
  }
  const int status = RUN_ALL_TESTS();
  if (!GTEST_FLAG_GET(list_tests) && testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::puts("[  FAILED  ] no test matched the filter and the device");
    return 1;
  }
  return status;
}
