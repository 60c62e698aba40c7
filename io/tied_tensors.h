// Which of some named tensors are views of another one's memory. A file format that stores each
// tensor by itself would write shared memory twice, and reading it back would untie it.
#pragma once

#include <cstdint>
#include <vector>

#include "nn/module.h"

namespace mixtape::io {

/// Tensor i is the view (its own shape, strides, offset) of the elements of tensor `owner`, counted
/// in the owner's row-major order. owner is -1 for a tensor of its own.
struct Tie {
  int owner = -1;
  std::int64_t offset = 0;
  Shape strides = {};
};

/// One Tie for each tensor. Owners are contiguous tensors, or the first of several identical views.
/// Throws "op: ..." with both names if two owners have elements in common.
std::vector<Tie> find_ties(const char* op, const std::vector<nn::NamedTensor>& tensors);

}  // namespace mixtape::io
