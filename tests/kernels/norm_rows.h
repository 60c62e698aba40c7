// What the tests of normalisations over rows share: the rows, their tolerances, and rows that no
// vector access fits.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tests/kernels/buffer.h"

namespace mixtape::testing {

using Values = std::vector<double>;

inline constexpr double kEps = 1e-5;

struct Rows {
  std::int64_t n, c;
};

// The last lines are the widths at which the CUDA kernels change how a row is divided: among lanes,
// by the number of vectors a thread holds, among warps, and too long for that.
inline const Rows kRows[] = {{0, 8},    {1, 1},    {3, 2},    {5, 7},     {6, 8},     {2, 16},
                             {7, 33},   {70, 64},  {33, 100}, {300, 257}, {9, 256},   {5, 384},
                             {5, 512},  {6, 768},  {5, 1024}, {3, 1200},  {3, 1600},  {2, 4096},
                             {3, 4100}, {3, 5001}, {2, 8192}, {2, 10000}, {2, 32768}, {1, 50304}};
/// More rows than the CUDA kernels work on at once: threads of a resident grid take several.
inline const Rows kManyRows[] = {{300000, 4}, {2500, 768}, {600, 4096}};

/// Roundings of a sum of c terms in at least 32 partial sums.
inline double sum_roundings(std::int64_t c) { return static_cast<double>(c) / 32 + 24; }

/// Copies of `values` one element past a 16-byte boundary, where vectors cannot be used.
struct MisalignedRows {
  Buffer buffer;
  std::int64_t n, c;
  MisalignedRows(Device d, Dtype dtype, const Rows& r, Values values)
      : buffer(d, dtype, {r.n * r.c + 1}, padded(std::move(values), r)), n(r.n), c(r.c) {}
  static Values padded(Values values, const Rows& r) {
    values.resize(static_cast<std::size_t>(r.n * r.c));
    values.insert(values.begin(), 0.0);
    return values;
  }
  View view() const {
    View v = buffer.view();
    v.data = static_cast<char*>(v.data) + size_of(v.dtype);
    v.sizes = {n, c};
    v.strides = {c, 1};
    return v;
  }
  Values get() {
    Values values = buffer.get();
    values.erase(values.begin());
    return values;
  }
};

}  // namespace mixtape::testing
