// main() of the test binaries. One labelled `cuda` ends with kSkipCode on a machine without a
// usable GPU, which ctest shows as skipped; listing its tests works everywhere.
#include <gtest/gtest.h>

#include <cstdio>

#include "engine/device.h"

namespace {
#if defined(MIXTAPE_TEST_NEEDS_CUDA)
constexpr int kSkipCode = 77;  // tools/cmake/MixtapeTest.cmake: SKIP_RETURN_CODE
#endif
}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
#if defined(MIXTAPE_TEST_NEEDS_CUDA)
  if (!GTEST_FLAG_GET(list_tests) && mixtape::cuda_device_count() == 0) {
    std::puts("[  SKIPPED ] no usable CUDA device on this machine");
    return kSkipCode;
  }
#endif
  return RUN_ALL_TESTS();
}
