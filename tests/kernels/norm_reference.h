// Layer normalisation and its gradients in float64, with the sizes that tolerances are made of.
#pragma once

#include <cmath>
#include <vector>

#include "tests/kernels/norm_rows.h"

namespace mixtape::testing {

struct Reference {
  Values y, mean, rstd, normalised;
  Reference(const Values& x, const Values& weight, const Values& bias, const Rows& r)
      : y(x.size()), normalised(x.size()) {
    const double c = static_cast<double>(r.c);
    for (std::int64_t i = 0; i < r.n; ++i) {
      const double* row = x.data() + i * r.c;
      double m = 0, v = 0;
      for (std::int64_t j = 0; j < r.c; ++j) m += row[j] / c;
      for (std::int64_t j = 0; j < r.c; ++j) v += (row[j] - m) * (row[j] - m) / c;
      mean.push_back(m);
      rstd.push_back(1 / std::sqrt(v + kEps));
      for (std::int64_t j = 0; j < r.c; ++j) {
        const auto k = static_cast<std::size_t>(i * r.c + j), w = static_cast<std::size_t>(j);
        normalised[k] = (row[j] - m) * rstd.back();
        y[k] = normalised[k] * (weight.empty() ? 1 : weight[w]) + (bias.empty() ? 0 : bias[w]);
      }
    }
  }
};

struct BackwardReference {
  Values dx, dweight, dbias, dx_size, dweight_size, dbias_size;
  BackwardReference(const Reference& f, const Values& dy, const Values& w, const Values& dsum,
                    const Rows& r)
      : dx(dy.size()),
        dweight(static_cast<std::size_t>(r.c)),
        dbias(dweight.size()),
        dx_size(dy.size()),
        dweight_size(dweight.size()),
        dbias_size(dweight.size()) {
    const double c = static_cast<double>(r.c);
    for (std::int64_t i = 0; i < r.n; ++i) {
      const auto at = [&](std::int64_t j) { return static_cast<std::size_t>(i * r.c + j); };
      const auto weight = [&](std::int64_t j) {
        return w.empty() ? 1.0 : w[static_cast<std::size_t>(j)];
      };
      double mean_g = 0, mean_gx = 0, size = 0;
      for (std::int64_t j = 0; j < r.c; ++j) {
        const double g = dy[at(j)] * weight(j), xh = f.normalised[at(j)];
        mean_g += g / c;
        mean_gx += g * xh / c;
        size += std::abs(g) * (1 + std::abs(xh)) / c;
        dweight[static_cast<std::size_t>(j)] += dy[at(j)] * xh;
        dweight_size[static_cast<std::size_t>(j)] += std::abs(dy[at(j)] * xh) + std::abs(dy[at(j)]);
        dbias[static_cast<std::size_t>(j)] += dy[at(j)];
        dbias_size[static_cast<std::size_t>(j)] += std::abs(dy[at(j)]);
      }
      const double rstd = f.rstd[static_cast<std::size_t>(i)];
      for (std::int64_t j = 0; j < r.c; ++j) {
        const double g = dy[at(j)] * weight(j), xh = f.normalised[at(j)];
        const double extra = dsum.empty() ? 0 : dsum[at(j)];
        dx[at(j)] = rstd * (g - mean_g - xh * mean_gx) + extra;
        dx_size[at(j)] =
            rstd * (1 + rstd) * (std::abs(g) + size * (1 + std::abs(xh))) + std::abs(extra);
      }
    }
  }
};

}  // namespace mixtape::testing
