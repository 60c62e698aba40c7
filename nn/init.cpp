#include "nn/init.h"

#include <cmath>

#include "engine/grad_mode.h"
#include "ops/ops.h"

namespace mixtape::nn::init {

Fans fans_of(const Tensor& weight) {
  MT_CHECK(weight.dim() >= 2, "init: expected a weight of two or more dimensions, got ",
           weight.describe());
  std::int64_t window = 1;
  for (int d = 2; d < weight.dim(); ++d) window *= weight.size(d);
  return {weight.size(1) * window, weight.size(0) * window};
}

void constant(Tensor& t, double value) {
  const NoGrad no_grad;
  t.fill_(value);
}
void normal(Tensor& t, double mean, double std) {
  const NoGrad no_grad;
  t.normal_(mean, std);
}
void uniform(Tensor& t, double lo, double hi) {
  const NoGrad no_grad;
  t.uniform_(lo, hi);
}

void truncated_normal(Tensor& t, double mean, double std) {
  const NoGrad no_grad;
  // By inverse CDF: u uniform between Phi(-2) and Phi(2), x = sqrt(2) erfinv(2u - 1), which
  // Newton's method on erf finds to float accuracy.
  const double reach = std::erf(2 / std::sqrt(2.0));
  const Tensor target =
      rand(t.shape(), {.dtype = Dtype::f64, .device = t.device()}) * (2 * reach) - reach;
  Tensor x = target * (std::sqrt(3.14159265358979323846) / 2);
  for (int i = 0; i < 12; ++i) {
    const Tensor slope = exp(neg(x * x)) * (2 / std::sqrt(3.14159265358979323846));
    x = clamp(x - (erf(x) - target) / slope, -std::sqrt(2.0), std::sqrt(2.0));
  }
  t.copy_(x * (std * std::sqrt(2.0)) + mean);
}

void xavier_uniform(Tensor& t, double gain) {
  const auto [in, out] = fans_of(t);
  const double bound = gain * std::sqrt(6.0 / static_cast<double>(in + out));
  uniform(t, -bound, bound);
}
void xavier_normal(Tensor& t, double gain) {
  const auto [in, out] = fans_of(t);
  normal(t, 0, gain * std::sqrt(2.0 / static_cast<double>(in + out)));
}
void kaiming_uniform(Tensor& t, double gain) {
  const double bound = gain * std::sqrt(3.0 / static_cast<double>(fans_of(t).in));
  uniform(t, -bound, bound);
}
void kaiming_normal(Tensor& t, double gain) {
  normal(t, 0, gain / std::sqrt(static_cast<double>(fans_of(t).in)));
}

}  // namespace mixtape::nn::init
