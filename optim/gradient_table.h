// The gradients of a list of parameters as the kernels see them; shared by GradScaler and clipping.
#pragma once

#include <vector>

#include "engine/tensor.h"
#include "kernels/optimizer.h"

namespace mixtape::optim {

/// Lists the parameters that have a gradient, and keeps the list in device memory, uploading it
/// only when it changes.
class GradientTable {
 public:
  /// The table of the present gradients. All on one device; throws otherwise.
  kernels::GradientTable refresh(const std::vector<Tensor>& parameters);
  /// Parameters of the last table, in its order.
  const std::vector<Tensor>& listed() const { return listed_; }
  Device device() const { return device_; }

 private:
  std::vector<Tensor> listed_;
  std::vector<kernels::GradientRange> ranges_, sent_;
  Tensor device_ranges_;  // u8
  Device device_;
};

}  // namespace mixtape::optim
