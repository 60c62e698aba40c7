// Gradient buckets: how data-parallel training cuts the flat gradient buffers (engine/node.h) into
// ranges that are reduced over the ranks one by one while backward still computes the rest.
//
// A bucket is a range of memory and nothing else: to choose other buckets moves boundaries, never a
// gradient, so that pointer tables, optimizer state and captured graphs stay valid.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tensor.h"

namespace mixtape::distributed {

/// Parameters whose gradients lie side by side.
struct GradientBucket {
  int index = 0;                   // in the order in which buckets are reduced
  Tensor gradients;                // (n): their gradients and the padding between them
  std::vector<Tensor> parameters;  // in the order of memory
  std::int64_t bytes() const;
};

struct BucketSizes {
  /// Bytes of each flat buffer's first bucket, whose gradients are ready first: small, so that
  /// communication starts early.
  std::int64_t first = std::int64_t{1} << 20;
  std::int64_t rest = std::int64_t{25} << 20;
  friend bool operator==(const BucketSizes&, const BucketSizes&) = default;
};

/// Buckets of at most the given sizes (a larger parameter gets one of its own) over the gradients
/// of `parameters`, which are listed in the order of registration and have flat gradients. Buckets
/// come in the order in which backward can be expected to finish them: reverse registration. The
/// result depends on shapes, dtypes and the layout of the gradients alone.
std::vector<GradientBucket> make_gradient_buckets(const std::vector<Tensor>& parameters,
                                                  const BucketSizes& sizes);

/// Writes 0 to the padding between the gradients of each bucket: nobody writes it afterwards, and
/// sums of it over ranks stay 0.
void clear_padding(const std::vector<GradientBucket>& buckets);

}  // namespace mixtape::distributed
