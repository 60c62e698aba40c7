// Float64 arrays and plain loops: what the op cases are compared with. Nothing here uses the
// library's kernels.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "engine/shape.h"

namespace mixtape::testing {

struct Array {
  Shape shape;
  std::vector<double> data;

  Array() = default;
  explicit Array(const Shape& s, double fill = 0)
      : shape(s), data(static_cast<std::size_t>(s.numel()), fill) {}

  double& operator[](std::int64_t i) { return data[static_cast<std::size_t>(i)]; }
  double operator[](std::int64_t i) const { return data[static_cast<std::size_t>(i)]; }
  std::int64_t numel() const { return static_cast<std::int64_t>(data.size()); }
};
using Arrays = std::vector<Array>;

/// Calls f(position) for every position of `shape` in row-major order.
template <class F>
void for_each_position(const Shape& shape, F&& f) {
  const std::int64_t n = shape.numel();
  Shape at = Shape::filled(shape.size(), 0);
  for (std::int64_t i = 0; i < n; ++i) {
    f(at);
    for (int d = shape.size() - 1; d >= 0; --d) {
      if (++at[d] < shape[d]) break;
      at[d] = 0;
    }
  }
}

/// Row-major index of `at` in `shape`; trailing-aligned broadcasting reads size-1 dimensions at 0.
inline std::int64_t index_of(const Shape& shape, const Shape& at) {
  std::int64_t index = 0;
  const int skip = at.size() - shape.size();
  for (int d = 0; d < shape.size(); ++d)
    index = index * shape[d] + (shape[d] == 1 ? 0 : at[d + skip]);
  return index;
}

inline Array map(const Array& x, const std::function<double(double)>& f) {
  Array y(x.shape);
  for (std::int64_t i = 0; i < x.numel(); ++i) y[i] = f(x[i]);
  return y;
}

inline Array zip(const Array& a, const Array& b, const std::function<double(double, double)>& f) {
  Array y(broadcast_shapes("reference", a.shape, b.shape));
  std::int64_t i = 0;
  for_each_position(y.shape, [&](const Shape& at) {
    y[i++] = f(a[index_of(a.shape, at)], b[index_of(b.shape, at)]);
  });
  return y;
}

/// Folds groups of x that share all positions outside `dims`; out has size 1 in `dims` (keepdim).
inline Array fold(const Array& x, const std::vector<int>& dims,
                  const std::function<double(const std::vector<double>&)>& f) {
  Shape kept = x.shape;
  for (const int d : dims) kept[d] = 1;
  std::vector<std::vector<double>> groups(static_cast<std::size_t>(kept.numel()));
  std::int64_t i = 0;
  for_each_position(x.shape, [&](const Shape& at) {
    groups[static_cast<std::size_t>(index_of(kept, at))].push_back(x[i++]);
  });
  Array y(kept);
  for (std::int64_t g = 0; g < y.numel(); ++g) y[g] = f(groups[static_cast<std::size_t>(g)]);
  return y;
}

inline Array reshaped(Array x, const Shape& shape) {
  x.shape = shape;
  return x;
}

/// (B, M, K) x (B, K, N) with b possibly transposed in its last two dimensions.
inline Array product(const Array& a, const Array& b, bool b_transposed = false) {
  const int r = a.shape.size();
  const std::int64_t batch = r == 3 ? a.shape[0] : 1, m = a.shape[r - 2], k = a.shape[r - 1];
  const std::int64_t n = b.shape[b_transposed ? b.shape.size() - 2 : b.shape.size() - 1];
  Array y(r == 3 ? Shape{batch, m, n} : Shape{m, n});
  for (std::int64_t s = 0; s < batch; ++s) {
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (std::int64_t l = 0; l < k; ++l) {
          sum += a[(s * m + i) * k + l] *
                 (b_transposed ? b[(s * n + j) * k + l] : b[(s * k + l) * n + j]);
        }
        y[(s * m + i) * n + j] = sum;
      }
    }
  }
  return y;
}

}  // namespace mixtape::testing
