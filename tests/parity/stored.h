// PyTorch's results beside this file, and the comparison with them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "ops/ops.h"

namespace mixtape::testing {

/// data/NAME.safetensors, which make_goldens.py wrote; MIXTAPE_PARITY_DATA names another folder.
inline io::SafetensorsFile stored_results(const std::string& name) {
  const char* folder = std::getenv("MIXTAPE_PARITY_DATA");
  return io::SafetensorsFile(
      std::filesystem::path(folder == nullptr ? MIXTAPE_PARITY_FOLDER : folder) /
      (name + ".safetensors"));
}

/// Every element within `tolerance` of the largest stored one.
inline void expect_close(const Tensor& got, const Tensor& want, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(got.shape(), want.shape()) << what;
  const std::vector<double> a = got.to_vector<double>(), b = want.to_vector<double>();
  double largest = 0;
  for (const double v : b) largest = std::max(largest, std::abs(v));
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_NEAR(a[i], b[i], tolerance * largest) << what << " [" << i << "]";
}

}  // namespace mixtape::testing
