#include "kernels/cuda/dim_map.h"

#include <utility>

namespace mixtape::kernels::cuda {

void DimMap::append(std::int64_t size, const std::int64_t (&stride)[kOperands]) {
  sizes[dims] = size;
  for (int k = 0; k < kOperands; ++k) strides[k][dims] = stride[k];
  ++dims;
}

void DimMap::sort_and_merge() {
  for (int i = 1; i < dims; ++i)
    for (int d = i; d > 0 && strides[0][d - 1] > strides[0][d]; --d) {
      std::swap(sizes[d - 1], sizes[d]);
      for (auto& s : strides) std::swap(s[d - 1], s[d]);
    }
  int top = 0;
  for (int d = 1; d < dims; ++d) {
    bool one = true;
    for (auto& s : strides) one = one && s[d] == s[top] * sizes[top];
    if (one) {
      sizes[top] *= sizes[d];
      continue;
    }
    ++top;
    sizes[top] = sizes[d];
    for (auto& s : strides) s[top] = s[d];
  }
  if (dims > 0) dims = top + 1;
}

void DimMap::prepare() {
  wide = count() > 0x7FFFFFFF;
  for (int d = 0; d < dims; ++d)
    if (!wide && sizes[d] > 0) fast[d] = FastDivide(sizes[d]);
}

}  // namespace mixtape::kernels::cuda
