#include <algorithm>
#include <cstring>

#include "engine/philox.h"
#include "ops/ops.h"
#include "tests/ops/op_case.h"

namespace mixtape::testing {

Array make_values(const OpCase& c, std::size_t number, std::uint64_t seed) {
  const Arg& arg = c.args[number];
  Array a(arg.shape);
  const PhiloxState state{seed * 1000003 + number, 17};
  const auto u = [&](std::int64_t i) {
    return static_cast<double>(philox_uniform(state, static_cast<std::uint64_t>(i)));
  };
  if (arg.kind == Arg::Kind::apart) {  // a shuffled grid of step 0.01 or more, 0 left out
    const std::int64_t n = a.numel();
    std::vector<std::int64_t> order(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) order[static_cast<std::size_t>(i)] = i;
    for (std::int64_t i = n - 1; i > 0; --i) {
      std::swap(order[static_cast<std::size_t>(i)],
                order[static_cast<std::size_t>(u(i) * static_cast<double>(i + 1))]);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t k = order[static_cast<std::size_t>(i)] - n / 2;
      a[i] = 0.01 * static_cast<double>(k >= 0 ? k + 1 : k) + 0.0037 * static_cast<double>(number);
    }
    return a;
  }
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    if (arg.kind == Arg::Kind::real) a[i] = arg.lo + (arg.hi - arg.lo) * u(i);
    if (arg.kind == Arg::Kind::index) a[i] = std::floor(u(i) * static_cast<double>(arg.bound));
    if (arg.kind == Arg::Kind::boolean) a[i] = u(i) < 0.5;
  }
  return a;
}

Tensor to_tensor(const Array& a, const Arg& arg, Dtype dtype, Device device) {
  if (arg.kind == Arg::Kind::index) dtype = Dtype::i64;
  if (arg.kind == Arg::Kind::boolean) dtype = Dtype::b8;
  return from_vector(a.data, a.shape, {.dtype = dtype, .device = device});
}

Array to_array(const Tensor& t) {
  Array a;
  a.shape = t.shape();
  a.data = t.to_vector<double>();
  return a;
}

}  // namespace mixtape::testing
