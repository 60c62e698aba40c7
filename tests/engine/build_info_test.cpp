#include "engine/build_info.h"

#include <gtest/gtest.h>

namespace mixtape {
namespace {

TEST(BuildInfo, MatchesTheConfiguredBackends) {
#if defined(MIXTAPE_WITH_CUDA)
  EXPECT_TRUE(build_info().cuda);
#else
  EXPECT_FALSE(build_info().cuda);
#endif
#if defined(MIXTAPE_WITH_ONEDNN)
  EXPECT_TRUE(build_info().onednn);
#else
  EXPECT_FALSE(build_info().onednn);
#endif
  EXPECT_EQ(build_info().version, MIXTAPE_TEST_VERSION);
}

TEST(BuildInfo, SummaryNamesEveryBackendOnce) {
  const std::string summary = build_summary();
  for (const char* name : {"Eigen", "oneDNN", "CUDA", "cuDNN", "NCCL", "MPI"}) {
    const auto first = summary.find(name);
    ASSERT_NE(first, std::string::npos) << name << " in: " << summary;
    EXPECT_EQ(summary.find(name, first + 1), std::string::npos) << summary;
  }
}

}  // namespace
}  // namespace mixtape
