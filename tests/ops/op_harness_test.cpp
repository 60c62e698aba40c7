// What is derived from every row of the op table, on every device of the machine: values against
// the float64 reference in all dtypes, gradients against central differences, gradients of
// gradients, strided inputs and cotangents, 16-bit against float32, the autocast policy,
// repeatability, CUDA against CPU.
#include <gtest/gtest.h>

#include "engine/autocast.h"
#include "engine/determinism.h"
#include "engine/grad_mode.h"
#include "ops/ops.h"
#include "tests/ops/op_case.h"
#include "tests/support/devices.h"

namespace mixtape::testing {
namespace {

class Ops : public ::testing::TestWithParam<std::size_t> {
 protected:
  const OpCase& c() const { return op_cases()[GetParam()]; }
};

std::string case_name(const ::testing::TestParamInfo<std::size_t>& info) {
  const OpCase& c = op_cases()[info.param];
  std::string name = detail::concat(c.op, "_", c.variant, "_", info.param);
  for (char& ch : name) {
    if (!std::isalnum(static_cast<unsigned char>(ch))) ch = '_';
  }
  return name;
}

std::vector<Tensor> make_inputs(const OpCase& c, Dtype dtype, Device device, bool grad = false,
                                std::uint64_t seed = 1) {
  std::vector<Tensor> inputs;
  for (std::size_t i = 0; i < c.args.size(); ++i) {
    Tensor t = to_tensor(make_values(c, i, seed), c.args[i], dtype, device);
    if (grad && c.args[i].differentiable) t.set_requires_grad();
    inputs.push_back(t);
  }
  return inputs;
}

Arrays arrays_of(const std::vector<Tensor>& tensors) {
  Arrays arrays;
  for (const Tensor& t : tensors) arrays.push_back(to_array(t));
  return arrays;
}

double largest(const Array& a) {
  double top = 0;
  for (const double v : a.data) top = std::max(top, std::isfinite(v) ? std::fabs(v) : 0);
  return top;
}

/// One rounding to `storage`, (ulps + length additions) in `compute` and intermediate roundings of
/// relative size `intermediate`, relative to the largest element.
void expect_close(const Array& got, const Array& expected, Dtype storage, Dtype compute,
                  double ulps, double length, const std::string& what, double intermediate = 0) {
  ASSERT_EQ(got.shape, expected.shape) << what;
  const double scale = std::max(largest(expected), 1.0);
  const double intermediates = intermediate * scale;
  // Rounding errors of a sum grow like the square root of its length; 4 standard deviations.
  const double sums = unit_roundoff(compute) * (ulps + 4 * std::sqrt(length)) * scale;
  int shown = 0;
  for (std::int64_t i = 0; i < got.numel() && shown < 4; ++i) {
    if (std::isnan(expected[i]) && std::isnan(got[i])) continue;
    if (got[i] == expected[i]) continue;
    const double tolerance = 2 * unit_roundoff(storage) * std::fabs(expected[i]) + sums +
                             intermediates + (storage == Dtype::f16 ? 0x1p-25 : 0);
    if (!(std::fabs(got[i] - expected[i]) <= tolerance)) {
      ADD_FAILURE() << what << " at " << i << ": expected " << expected[i] << ", got " << got[i]
                    << ", tolerance " << tolerance;
      ++shown;
    }
  }
}

/// A fixed cotangent of t's shape with values between 0.5 and 1.5.
Tensor cotangent_of(const Tensor& t) {
  Array w(t.shape());
  for (std::int64_t i = 0; i < w.numel(); ++i)
    w[i] = 0.5 + static_cast<double>((i * 7919) % 101) / 101.0;
  return from_vector(w.data, w.shape, {.dtype = t.dtype(), .device = t.device()});
}

double weighted_sum(const Array& y) {
  double s = 0;
  for (std::int64_t i = 0; i < y.numel(); ++i)
    s += y[i] * (0.5 + static_cast<double>((i * 7919) % 101) / 101.0);
  return s;
}

/// The same values in memory that is not row-major.
Tensor strided_copy(const Tensor& t, int kind) {
  const NoGrad no_grad;
  if (kind == 0 && t.dim() >= 2) return t.transpose(0, -1).clone().transpose(0, -1);
  Shape wide = t.shape();  // every other element of a larger tensor
  wide.push_back(2);
  Tensor memory = zeros(wide, {.dtype = t.dtype(), .device = t.device()});
  Tensor view = memory.select(-1, 1);
  view.copy_(t);
  return view.detach();
}

TEST_P(Ops, ForwardMatchesTheReferenceInEveryDtype) {
  for (const Device device : test_devices()) {
    for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16}) {
      const std::vector<Tensor> inputs = make_inputs(c(), dtype, device);
      const Tensor out = c().run(inputs);
      const Array expected = c().reference(arrays_of(inputs));
      const Dtype storage = is_floating(out.dtype()) ? out.dtype() : Dtype::f64;
      const Dtype compute = dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
      const std::string what = detail::concat(c().op, " ", c().variant, " ", dtype, " on ", device);
      if (c().exact && storage == dtype) {
        ASSERT_EQ(out.shape(), expected.shape) << what;
        ASSERT_EQ(to_array(out).data, expected.data) << what;
        continue;
      }
      expect_close(to_array(out), expected, storage, compute,
                   c().ulps + (is_low_precision(dtype) ? 2 : 0), static_cast<double>(c().length),
                   what, c().intermediate_roundings * unit_roundoff(dtype));
    }
  }
}

TEST_P(Ops, GradientsMatchCentralDifferences) {
  if (!c().differentiable) GTEST_SKIP() << "no gradient";
  for (const Device device : test_devices()) {
    const std::vector<Tensor> inputs = make_inputs(c(), Dtype::f64, device, true);
    const Tensor out = c().run(inputs);
    out.backward(cotangent_of(out));
    Arrays values = arrays_of(inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!c().args[i].differentiable || values[i].numel() == 0) continue;
      const Tensor g = inputs[i].grad();
      ASSERT_TRUE(g.defined() || out.numel() == 0) << c().op << " input " << i;
      if (!g) continue;
      ASSERT_EQ(g.shape(), inputs[i].shape());
      const Array analytic = to_array(g);
      // A sample of the elements of large inputs: ends, middle, and every k-th.
      const std::int64_t n = values[i].numel(), step = std::max<std::int64_t>(1, n / 24);
      for (std::int64_t k = 0; k < n; k += step) {
        const double h = 1e-5, x = values[i][k];
        values[i][k] = x + h;
        const double up = weighted_sum(c().reference(values));
        values[i][k] = x - h;
        const double down = weighted_sum(c().reference(values));
        values[i][k] = x;
        const double numeric = (up - down) / (2 * h);
        // Truncation is O(h^2); the sum over the outputs is rounded like a random walk, then
        // divided by 2h.
        const double noise = unit_roundoff(Dtype::f64) * std::fabs(up) *
                             (4 + std::sqrt(static_cast<double>(out.numel()))) / h;
        const double tolerance = 1e-7 * (1 + std::fabs(numeric)) + noise;
        EXPECT_NEAR(analytic[k], numeric, tolerance)
            << c().op << " " << c().variant << " d/d input " << i << " [" << k << "] on " << device;
      }
    }
  }
}

TEST_P(Ops, SecondGradientsMatchCentralDifferences) {
  if (!c().differentiable || !c().second_order) GTEST_SKIP() << "no second gradient";
  const Device device = test_devices()[0];
  const std::vector<Tensor> inputs = make_inputs(c(), Dtype::f64, device, true);
  std::vector<Tensor> leaves;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (c().args[i].differentiable && inputs[i].numel() > 0) leaves.push_back(inputs[i]);
  }
  if (leaves.empty() || leaves[0].numel() > 500) GTEST_SKIP() << "too large for second differences";
  const auto first =
      [&] {  // sum over inputs of <gradient, fixed weights>, a function of the inputs
        const Tensor out = c().run(inputs);
        const std::vector<Tensor> g = grad({mul(out, out)}, leaves, {cotangent_of(out)},
                                           {.create_graph = true, .allow_unused = true});
        Tensor total = zeros({}, {.dtype = Dtype::f64, .device = device});
        for (const Tensor& t : g) {
          if (t) total = add(total, sum(mul(t, cotangent_of(t))));
        }
        return total;
      };
  const Tensor total = first();
  if (!total.requires_grad()) GTEST_SKIP() << "linear";
  const std::vector<Tensor> second = grad({total}, leaves, {}, {.allow_unused = true});
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!second[i]) continue;
    const Array analytic = to_array(second[i]);
    const std::int64_t n = leaves[i].numel(), step = std::max<std::int64_t>(1, n / 8);
    for (std::int64_t k = 0; k < n; k += step) {
      const double h = 1e-5;
      const auto moved = [&](double by) {
        {
          const NoGrad no_grad;
          Tensor(leaves[i].detach().reshape({n})).slice(0, k, k + 1).add_(by);
        }
        return first().item<double>();
      };
      const double up = moved(h), down = moved(-2 * h);
      moved(h);
      const double numeric = (up - down) / (2 * h);
      EXPECT_NEAR(analytic[k], numeric, 2e-6 * (1 + std::fabs(numeric)) + 1e-9 * std::fabs(up))
          << c().op << " " << c().variant << " input " << i << " [" << k << "]";
    }
  }
}

TEST_P(Ops, StridedInputsAndCotangentsGiveTheSameNumbers) {
  for (const Device device : test_devices()) {
    for (const int kind : {0, 1}) {
      const std::vector<Tensor> plain = make_inputs(c(), Dtype::f32, device, true);
      std::vector<Tensor> strided;
      for (std::size_t i = 0; i < plain.size(); ++i) {
        Tensor t = strided_copy(plain[i].detach(), kind);
        ASSERT_EQ(t.to_vector<double>(), plain[i].to_vector<double>());
        if (plain[i].requires_grad()) t.set_requires_grad();
        strided.push_back(t);
      }
      const Tensor a = c().run(plain), b = c().run(strided);
      const std::string what =
          detail::concat(c().op, " ", c().variant, " kind ", kind, " on ", device);
      expect_close(to_array(b), to_array(a), Dtype::f32, Dtype::f32, c().ulps,
                   static_cast<double>(c().length), what);
      if (!c().differentiable || !a.requires_grad()) continue;
      a.backward(cotangent_of(a));
      b.backward(strided_copy(cotangent_of(b), kind));
      for (std::size_t i = 0; i < plain.size(); ++i) {
        if (!plain[i].grad()) continue;
        expect_close(to_array(strided[i].grad()), to_array(plain[i].grad()), Dtype::f32, Dtype::f32,
                     c().ulps, static_cast<double>(c().length),
                     what + detail::concat(" gradient ", i));
      }
    }
  }
}

TEST_P(Ops, AnExpandedCotangentIsReadByItsStrides) {
  if (!c().differentiable) GTEST_SKIP() << "no gradient";
  for (const Device device : test_devices()) {
    const std::vector<Tensor> a = make_inputs(c(), Dtype::f32, device, true),
                              b = make_inputs(c(), Dtype::f32, device, true);
    const Tensor ya = c().run(a), yb = c().run(b);
    if (!ya.requires_grad()) continue;
    ya.backward(full(ya.shape(), 0.75, {.dtype = ya.dtype(), .device = device}));
    yb.backward(expand(scalar_tensor(0.75, {.dtype = yb.dtype(), .device = device}), yb.shape()));
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (!a[i].grad()) continue;
      expect_close(to_array(b[i].grad()), to_array(a[i].grad()), Dtype::f32, Dtype::f32, c().ulps,
                   static_cast<double>(c().length),
                   detail::concat(c().op, " ", c().variant, " gradient ", i, " on ", device));
    }
  }
}

TEST_P(Ops, LowPrecisionGradientsAgreeWithFloat32) {
  if (!c().differentiable) GTEST_SKIP() << "no gradient";
  for (const Device device : test_devices()) {
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      const std::vector<Tensor> low = make_inputs(c(), dtype, device, true);
      std::vector<Tensor> wide;
      for (const Tensor& t : low) {
        Tensor w = is_floating(t.dtype()) ? t.detach().to(Dtype::f32) : t;
        if (t.requires_grad()) w.set_requires_grad();
        wide.push_back(w);
      }
      const Tensor yl = c().run(low), yw = c().run(wide);
      if (!yl.requires_grad()) continue;
      const Tensor dy = cotangent_of(yl);
      yl.backward(dy);
      yw.backward(dy.to(yw.dtype()));
      for (std::size_t i = 0; i < low.size(); ++i) {
        if (!low[i].grad()) continue;
        EXPECT_EQ(low[i].grad().dtype(), dtype);
        const Array expected = to_array(wide[i].grad()), got = to_array(low[i].grad());
        // Saved outputs and intermediate gradients are rounded to the storage type as well.
        const double tolerance = unit_roundoff(dtype) *
                                 (8 + 2 * std::sqrt(static_cast<double>(c().length))) *
                                 std::max(1.0, largest(expected));
        for (std::int64_t k = 0; k < got.numel(); ++k) {
          ASSERT_NEAR(got[k], expected[k], tolerance)
              << c().op << " " << c().variant << " gradient " << i << " [" << k << "] " << dtype
              << " on " << device;
        }
      }
    }
  }
}

TEST_P(Ops, AutocastFollowsThePolicy) {
  for (const Device device : test_devices()) {
    const std::vector<Tensor> wide = make_inputs(c(), Dtype::f32, device, true);
    const std::vector<Tensor> low = make_inputs(c(), Dtype::bf16, device, true);
    const Dtype plain = c().run(wide).dtype();
    const Autocast amp(Dtype::bf16);
    const Tensor from_wide = c().run(wide), from_low = c().run(low);
    if (!is_floating(plain) || plain == Dtype::f64) continue;
    const Dtype expect_wide = c().cast == Cast::low ? Dtype::bf16 : Dtype::f32;
    const Dtype expect_low = c().cast == Cast::full ? Dtype::f32 : Dtype::bf16;
    EXPECT_EQ(from_wide.dtype(), expect_wide) << c().op << " " << c().variant;
    EXPECT_EQ(from_low.dtype(), expect_low) << c().op << " " << c().variant;
    if (!c().differentiable || !from_wide.requires_grad()) continue;
    from_wide.backward(cotangent_of(from_wide));
    for (std::size_t i = 0; i < wide.size(); ++i) {
      if (!wide[i].grad()) continue;
      EXPECT_EQ(wide[i].grad().dtype(), Dtype::f32) << c().op << " gradient " << i;
    }
  }
}

TEST_P(Ops, TwoRunsAreBitEqual) {
  set_deterministic(true);  // otherwise cuDNN may add in any order
  struct Restore {
    ~Restore() { set_deterministic(false); }
  } restore;
  for (const Device device : test_devices()) {
    std::vector<std::vector<double>> results[2];
    for (auto& result : results) {
      const std::vector<Tensor> inputs = make_inputs(c(), Dtype::f32, device, true);
      const Tensor out = c().run(inputs);
      result.push_back(out.to_vector<double>());
      if (!c().differentiable || !out.requires_grad()) continue;
      out.backward(cotangent_of(out));
      for (const Tensor& t : inputs)
        result.push_back(t.grad() ? t.grad().to_vector<double>() : std::vector<double>());
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      ASSERT_EQ(results[0][i].size(), results[1][i].size());
      for (std::size_t k = 0; k < results[0][i].size(); ++k) {
        const double a = results[0][i][k], b = results[1][i][k];
        ASSERT_TRUE(a == b || (std::isnan(a) && std::isnan(b)))
            << c().op << " " << c().variant << " result " << i;
      }
    }
  }
}

TEST_P(Ops, CudaAgreesWithTheCpu) {
  if (cuda_device_count() == 0 || chosen_device() == "cpu") GTEST_SKIP() << "no CUDA device";
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const std::vector<Tensor> on_cpu = make_inputs(c(), dtype, Device::cpu(), true),
                              on_cuda = make_inputs(c(), dtype, Device::cuda(), true);
    const Tensor a = c().run(on_cpu), b = c().run(on_cuda);
    EXPECT_EQ(a.dtype(), b.dtype());
    const Dtype storage = is_floating(a.dtype()) ? a.dtype() : Dtype::f64;
    const std::string what = detail::concat(c().op, " ", c().variant, " ", dtype);
    expect_close(to_array(b), to_array(a), storage, Dtype::f32, 2 * c().ulps,
                 2.0 * static_cast<double>(c().length), what,
                 2 * c().intermediate_roundings * unit_roundoff(dtype));
    if (!c().differentiable || !a.requires_grad()) continue;
    a.backward(cotangent_of(a));
    b.backward(cotangent_of(b));
    for (std::size_t i = 0; i < on_cpu.size(); ++i) {
      if (!on_cpu[i].grad()) continue;
      const Array expected = to_array(on_cpu[i].grad()), got = to_array(on_cuda[i].grad());
      const double tolerance = unit_roundoff(dtype) *
                               (8 + 4 * std::sqrt(static_cast<double>(c().length))) *
                               std::max(1.0, largest(expected));
      for (std::int64_t k = 0; k < got.numel(); ++k)
        ASSERT_NEAR(got[k], expected[k], tolerance)
            << what << " gradient " << i << " [" << k << "]";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, Ops, ::testing::Range(std::size_t{0}, op_cases().size()),
                         case_name);

}  // namespace
}  // namespace mixtape::testing
