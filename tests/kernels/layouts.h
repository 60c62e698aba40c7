// Shapes and strides that every elementwise kernel is tried on: two operands and an output, dense,
// sliced, transposed, broadcast, empty, 0-d, of odd sizes, and larger than one block of a kernel.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/thread_pool.h"
#include "tests/kernels/buffer.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {

struct Layout {
  const char* name;
  Shape sizes, out_strides;
  Shape a_sizes, a_strides;
  Shape b_sizes, b_strides;
};

inline Layout dense_layout(const char* name, const Shape& sizes) {
  const Shape strides = contiguous_strides(sizes);
  return {name, sizes, strides, sizes, strides, sizes, strides};
}

inline std::vector<Layout> layouts() {
  std::vector<Layout> all;
  all.push_back(dense_layout("scalar", {}));
  all.push_back(dense_layout("one", {1}));
  all.push_back(dense_layout("empty", {2, 0, 3}));
  all.push_back(dense_layout("dense", {3, 5, 7}));
  all.push_back(dense_layout("several_blocks", {2501}));
  all.push_back({"sliced_rows", {5, 600}, {600, 1}, {5, 600}, {700, 1}, {5, 600}, {601, 1}});
  all.push_back({"transposed_a", {70, 45}, {45, 1}, {70, 45}, {1, 70}, {70, 45}, {45, 1}});
  all.push_back({"transposed_out", {70, 45}, {1, 70}, {70, 45}, {45, 1}, {70, 45}, {1, 71}});
  all.push_back({"steps", {9, 11}, {33, 3}, {9, 11}, {44, 2}, {9, 11}, {11, 1}});
  all.push_back({"broadcast_row", {9, 11}, {11, 1}, {9, 11}, {11, 1}, {11}, {1}});
  all.push_back({"broadcast_column", {9, 11}, {11, 1}, {9, 11}, {11, 1}, {9, 1}, {1, 1}});
  all.push_back({"broadcast_wide", {4, 1500}, {1500, 1}, {1500}, {1}, {4, 1}, {1, 1}});
  all.push_back({"broadcast_number", {3, 700}, {700, 1}, {}, {}, {1, 1}, {1, 1}});
  all.push_back({"broadcast_middle",
                 {2, 3, 4, 5},
                 {60, 20, 5, 1},
                 {3, 1, 5},
                 {5, 5, 1},
                 {2, 1, 4, 1},
                 {4, 4, 1, 1}});
  all.push_back({"expanded", {6, 7}, {7, 1}, {6, 7}, {0, 1}, {6, 7}, {1, 0}});
  all.push_back({"permuted_8d",
                 {2, 1, 3, 2, 1, 2, 3, 2},
                 {72, 72, 24, 12, 12, 6, 2, 1},
                 {2, 1, 3, 2, 1, 2, 3, 2},
                 {1, 2, 2, 6, 12, 12, 24, 72},
                 {2, 1, 3, 2, 1, 2, 3, 2},
                 {72, 72, 2, 6, 12, 36, 12, 1}});
  return all;
}

/// Element values of a tensor of shape `from`, row-major, broadcast to `to`.
inline std::vector<double> broadcast(const std::vector<double>& values, const Shape& from,
                                     const Shape& to) {
  std::vector<double> out(static_cast<std::size_t>(to.numel()));
  const Shape strides = contiguous_strides(from);
  const int shift = to.size() - from.size();
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i), offset = 0;
    for (int d = to.size() - 1; d >= 0; --d) {
      const std::int64_t index = rest % to[d];
      rest /= to[d];
      if (d >= shift && from[d - shift] != 1) offset += index * strides[d - shift];
    }
    out[i] = values[static_cast<std::size_t>(offset)];
  }
  return out;
}

inline std::string device_name(Device d) { return d.is_cpu() ? "cpu" : "cuda"; }

/// Runs f under 1, 2 and 3 CPU threads, giving it the count.
template <class F>
void for_thread_counts(F&& f) {
  const int before = num_threads();
  for (int n : {1, 2, 3}) {
    set_num_threads(n);
    f(n);
  }
  set_num_threads(before);
}

}  // namespace mixtape::testing
