// Made by resnet_golden.py: logits of two images, four classes each, row by row.
#pragma once

#include <cstdint>
#include <vector>

namespace mixtape::testing::resnet_golden {

struct Logits {
  std::int64_t layers;
  std::vector<double> evaluation, training;
};
inline const Logits kLogits[] = {
    {18,
     {9.80321843, 2.35222353, 3.41568163, 1.10836758, 9.94985106, 2.41589793, 3.44027521,
      1.16338327},
     {2.80748808, 0.353972556, 0.505873977, 0.237650868, 1.16445892, 0.112947265, -0.00762010329,
      0.0641572404}},
    {50,
     {83.3831119, 93.4826724, 102.174783, 3.20632853, 85.3694819, 95.7253098, 104.602272,
      3.24774521},
     {5.24130823, -0.00998938729, -0.545632161, 1.03743912, 14.8493373, 3.53233936, 3.13056201,
      0.177282207}},
};

}  // namespace mixtape::testing::resnet_golden
