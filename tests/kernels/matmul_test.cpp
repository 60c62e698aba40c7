// Matrix products against float64: layouts, batches, alpha and beta, epilogues, empty dimensions.
#include "kernels/matmul.h"

#include <cmath>

#include "tests/kernels/device_array.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::gelu_tanh,
                                       Activation::gelu, Activation::silu};

double activate(Activation a, double x) {
  const double t = std::tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x));
  switch (a) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 ? x : 0;
    case Activation::gelu_tanh: return 0.5 * x * (1 + t);
    case Activation::gelu: return 0.5 * x * (1 + std::erf(x * 0.70710678118654752440));
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return kNaN;
}

double activation_slope(Activation a, double z) {
  const double t = std::tanh(0.79788456080286535588 * z * (1 + 0.044715 * z * z));
  const double sigmoid = 1 / (1 + std::exp(-z));
  switch (a) {
    case Activation::none: return 1;
    case Activation::relu: return z > 0 ? 1 : 0;
    case Activation::gelu_tanh:
      return 0.5 * (1 + t) +
             0.5 * z * (1 - t * t) * 0.79788456080286535588 * (1 + 3 * 0.044715 * z * z);
    case Activation::gelu:
      return 0.5 * (1 + std::erf(z * 0.70710678118654752440)) +
             z * std::exp(-0.5 * z * z) * 0.39894228040143267794;
    case Activation::silu: return sigmoid * (1 + z * (1 - sigmoid));
  }
  return kNaN;
}

enum class Order { rows, columns };

/// Strides of a (batch,) rows x cols matrix with `gap` unused elements after each row or column.
Shape strides_of(Order order, std::int64_t batch, std::int64_t rows, std::int64_t cols,
                 std::int64_t gap) {
  const std::int64_t ld = (order == Order::rows ? cols : rows) + gap;
  const Shape inner = order == Order::rows ? Shape{ld, 1} : Shape{1, ld};
  if (batch == 0) return inner;
  return Shape{ld * (order == Order::rows ? rows : cols) + gap, inner[0], inner[1]};
}
Shape sizes_of(std::int64_t batch, std::int64_t rows, std::int64_t cols) {
  return batch == 0 ? Shape{rows, cols} : Shape{batch, rows, cols};
}

struct Case {
  std::int64_t batch, m, n, k;  // batch 0: two-dimensional
  Order a = Order::rows, b = Order::rows, out = Order::rows;
  std::int64_t gap = 0;
  bool repeat_a = false, repeat_b = false;  // one matrix for the whole batch
};

struct Reference {
  Values value, size;  // alpha a b + bias, and the same of absolute values
};

Reference reference(const Case& c, const Values& a, const Values& b, const Values& bias,
                    double alpha) {
  const std::int64_t batches = std::max<std::int64_t>(1, c.batch);
  Reference r;
  for (std::int64_t q = 0; q < batches; ++q)
    for (std::int64_t i = 0; i < c.m; ++i)
      for (std::int64_t j = 0; j < c.n; ++j) {
        const double* pa = a.data() + ((c.repeat_a ? 0 : q) * c.m + i) * c.k;
        const double* pb = b.data() + (c.repeat_b ? 0 : q) * c.k * c.n + j;
        double sum = 0, size = 0;
        for (std::int64_t l = 0; l < c.k; ++l) {
          sum += pa[l] * pb[l * c.n];
          size += std::abs(pa[l] * pb[l * c.n]);
        }
        const double add = bias.empty() ? 0 : bias[static_cast<std::size_t>(j)];
        r.value.push_back(alpha * sum + add);
        r.size.push_back(std::abs(alpha) * size + std::abs(add));
      }
  return r;
}

struct Options {
  float alpha = 1, beta = 0;
  bool bias = false;
  Dtype bias_dtype = Dtype::f32;
  Activation activation = Activation::none;
  bool pre = false;
};

/// Bound of a product's error: k + 4 roundings of sums no larger than `size`, and what the final
/// rounding and a slope of at most 1.13 (GELU's) make of it. `unfused`: bias and activation may be
/// applied to a product that was rounded to out's dtype.
double bound_of(Dtype in, Dtype out, std::int64_t k, double size, double value, bool unfused) {
  return (static_cast<double>(k) + 12) * compute_roundoff(in) * 1.13 * size +
         (unfused ? unit_roundoff(out) * 1.13 * size : 0) + unit_roundoff(out) * std::abs(value) +
         (out == Dtype::f16 ? 0x1p-25 : 0);
}

void run(Device d, Dtype in, Dtype out, const Case& c, const Options& o) {
  const std::int64_t batches = std::max<std::int64_t>(1, c.batch);
  const std::int64_t a_batch = c.repeat_a ? 1 : batches, b_batch = c.repeat_b ? 1 : batches;
  const Values a = normals(in, a_batch * c.m * c.k, 1), b = normals(in, b_batch * c.k * c.n, 2);
  const Values bias = o.bias ? normals(o.bias_dtype, c.n, 3) : Values{};
  const Values old = normals(out, batches * c.m * c.n, 4);
  const auto operand = [&](std::int64_t rows, std::int64_t cols, Order order, bool repeat) {
    const std::int64_t count = c.batch == 0 || repeat ? 0 : c.batch;
    return std::pair(sizes_of(count, rows, cols), strides_of(order, count, rows, cols, c.gap));
  };
  const auto [a_sizes, a_strides] = operand(c.m, c.k, c.a, c.repeat_a);
  const auto [b_sizes, b_strides] = operand(c.k, c.n, c.b, c.repeat_b);
  const auto [out_sizes, out_strides] = operand(c.m, c.n, c.out, false);
  Buffer a_buffer(d, in, a_sizes, a_strides, a), b_buffer(d, in, b_sizes, b_strides, b);
  Buffer result(d, out, out_sizes, out_strides), pre(d, out, out_sizes, out_strides);
  Buffer bias_buffer(d, o.bias_dtype, {static_cast<std::int64_t>(bias.size())}, bias);
  if (o.beta != 0) result.set(old);

  MatmulArgs args;
  args.out = result.view();
  args.a = a_buffer.view();
  args.b = b_buffer.view();
  const auto repeated = [&](View& v) {
    v.sizes.insert(0, c.batch);
    v.strides.insert(0, 0);
  };
  if (c.repeat_a) repeated(args.a);
  if (c.repeat_b) repeated(args.b);
  args.alpha = o.alpha;
  args.beta = o.beta;
  if (o.bias) args.bias = bias_buffer.view();
  args.activation = o.activation;
  if (o.pre) args.pre_activation = pre.view();
  const TestWorkspace workspace(d, matmul_workspace_bytes(d));
  matmul(Stream::current(d), args, workspace);

  const Reference r = reference(c, a, b, bias, o.alpha);
  Values want(r.value.size()), bound(want.size()), pre_bound(want.size());
  const bool unfused = d.is_cuda() && (o.bias || o.beta != 0 || o.activation != Activation::none);
  for (std::size_t i = 0; i < want.size(); ++i) {
    want[i] = activate(o.activation, r.value[i]) + (o.beta != 0 ? o.beta * old[i] : 0);
    const double size = r.size[i] + std::abs(o.beta * old[i]);
    bound[i] = bound_of(in, out, c.k, size, want[i], unfused);
    pre_bound[i] = bound_of(in, out, c.k, size, r.value[i], unfused);
  }
  expect_close(result.get(), want, bound);
  result.check_guards();
  if (o.pre) {
    expect_close(pre.get(), r.value, pre_bound);
    pre.check_guards();
  }
}

/// Every input dtype with every output dtype it may have.
template <class F>
void for_each_dtypes(F&& f) {
  for (Dtype in : kFloatingDtypes) {
    f(in, in);
    if (is_low_precision(in)) f(in, Dtype::f32);
  }
}

std::string describe(Dtype in, Dtype out, const Case& c) {
  return mixtape::detail::concat(in, " to ", out, ", batch ", c.batch, ", ", c.m, " x ", c.n, " x ",
                                 c.k, " orders ", static_cast<int>(c.a), static_cast<int>(c.b),
                                 static_cast<int>(c.out), " gap ", c.gap);
}

TEST(Matmul, EveryLayoutAndLeadingDimension) {
  on_each_device([](Device d) {
    for_each_dtypes([&](Dtype in, Dtype out) {
      for (Order a : {Order::rows, Order::columns})
        for (Order b : {Order::rows, Order::columns})
          for (Order o : {Order::rows, Order::columns})
            for (std::int64_t gap : {0, 8}) {
              const Case c{0, 24, 40, 16, a, b, o, gap};
              SCOPED_TRACE(describe(in, out, c));
              run(d, in, out, c, {.alpha = 0.5f, .beta = 2});
              run(d, in, out, c, {});
              run(d, in, out, c, {.bias = true, .bias_dtype = in});
            }
    });
  });
}

TEST(Matmul, SizesFromOneToManyBlocks) {
  const Case cases[] = {{0, 1, 1, 1},     {0, 1, 8, 5},      {0, 7, 1, 9},
                        {0, 3, 5, 1},     {0, 17, 33, 65},   {0, 300, 530, 40},
                        {0, 9, 11, 1100}, {0, 128, 10, 784}, {0, 257, 513, 515}};
  on_each_device([&](Device d) {
    for_each_dtypes([&](Dtype in, Dtype out) {
      for (const Case& c : cases) {
        SCOPED_TRACE(describe(in, out, c));
        run(d, in, out, c, {});
        Case columns = c;
        columns.a = columns.b = Order::columns;
        run(d, in, out, columns, {.alpha = -1.5f});
      }
    });
  });
}

TEST(Matmul, Batches) {
  on_each_device([](Device d) {
    for_each_dtypes([&](Dtype in, Dtype out) {
      for (std::int64_t batch : {1, 2, 7})
        for (Order b : {Order::rows, Order::columns}) {
          Case c{batch, 16, 24, 32, Order::rows, b, Order::rows, 8};
          SCOPED_TRACE(describe(in, out, c));
          run(d, in, out, c, {.alpha = 0.125f});
          run(d, in, out, c, {.beta = 1});
          c.repeat_b = true;
          run(d, in, out, c, {});
          c.repeat_b = false;
          c.repeat_a = true;
          run(d, in, out, c, {});
        }
    });
  });
}

TEST(Matmul, EpilogueActivatesAndKeepsWhatItActivated) {
  on_each_device([](Device d) {
    for_each_dtypes([&](Dtype in, Dtype out) {
      for (Activation activation : kActivations)
        for (const bool bias : {false, true}) {
          const Case c{0, 40, 56, 24};
          SCOPED_TRACE(::testing::Message() << describe(in, out, c) << " activation "
                                            << static_cast<int>(activation) << " bias " << bias);
          run(d, in, out, c, {.bias = bias, .bias_dtype = in, .activation = activation});
          const bool pre = activation != Activation::none;
          run(d, in, out, c,
              {.bias = bias, .bias_dtype = in, .activation = activation, .pre = pre});
        }
    });
  });
}

TEST(Matmul, FloatBiasForHalfOperands) {
  on_each_device([](Device d) {
    for (Dtype in : {Dtype::f16, Dtype::bf16})
      run(d, in, in, {0, 24, 16, 32},
          {.bias = true, .bias_dtype = Dtype::f32, .activation = Activation::relu});
  });
}

TEST(Matmul, EmptySizes) {  // case 31
  on_each_device([](Device d) {
    for_each_dtypes([&](Dtype in, Dtype out) {
      run(d, in, out, {0, 3, 5, 0}, {});  // exact zeros over a poisoned output
      run(d, in, out, {0, 3, 5, 0}, {.beta = 2});
      run(d, in, out, {0, 3, 5, 0},
          {.bias = true, .bias_dtype = in, .activation = Activation::gelu_tanh, .pre = true});
      run(d, in, out, {0, 0, 5, 4}, {});
      run(d, in, out, {0, 3, 0, 4}, {});
      run(d, in, out, {2, 3, 5, 0}, {});
    });
  });
}

TEST(Matmul, EveryElementOfAThirtyTwoBitSum) {
  // Sums that stop growing in 16-bit arithmetic: 4096 ones.
  on_each_device([](Device d) {
    for (Dtype in : {Dtype::f16, Dtype::bf16}) {
      Buffer a(d, in, {8, 4096}, Values(8 * 4096, 1.0)), b(d, in, {4096, 8}, Values(8 * 4096, 1.0));
      Buffer out(d, Dtype::f32, {8, 8});
      MatmulArgs args;
      args.out = out.view();
      args.a = a.view();
      args.b = b.view();
      const TestWorkspace workspace(d, matmul_workspace_bytes(d));
      matmul(Stream::current(d), args, workspace);
      expect_same(out.get(), Values(64, 4096.0));
    }
  });
}

TEST(Matmul, LongSumsOfLowPrecisionKeepFloatPartials) {  // case 59, on few rows
  on_each_device([](Device d) {
    for (Dtype in : {Dtype::f16, Dtype::bf16}) {
      const std::int64_t m = 8, n = 64, k = 14336;
      std::mt19937 generator(3);
      std::uniform_real_distribution<double> draw(-1, 1);
      Values a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n));
      for (double& v : a) v = rounded(in, draw(generator));
      for (double& v : b) v = rounded(in, draw(generator));
      Buffer a_buffer(d, in, {m, k}, a), b_buffer(d, in, {k, n}, b), out(d, in, {m, n});
      MatmulArgs args;
      args.out = out.view();
      args.a = a_buffer.view();
      args.b = b_buffer.view();
      const TestWorkspace workspace(d, matmul_workspace_bytes(d));
      matmul(Stream::current(d), args, workspace);
      const Reference r = reference({0, m, n, k}, a, b, {}, 1);
      const Values got = out.get();
      for (std::size_t i = 0; i < got.size(); ++i) {
        if (std::abs(r.value[i]) <= 1) continue;
        // Half an ulp of the result, and float sums whose errors add at random.
        const double tolerance = unit_roundoff(in) + std::sqrt(static_cast<double>(k)) * 0x1p-24 *
                                                         r.size[i] / std::abs(r.value[i]);
        EXPECT_NEAR(got[i] / r.value[i], 1, tolerance) << in << " element " << i;
      }
    }
  });
}

TEST(Matmul, TwoRunsAreBitEqual) {
  on_each_device([](Device d) {
    for_each_dtypes([&](Dtype in, Dtype out) {
      const std::int64_t m = 130, n = 70, k = 600;
      Buffer a(d, in, {m, k}, normals(in, m * k, 1)), b(d, in, {k, n}, normals(in, k * n, 2));
      Values first;
      for (int i = 0; i < 2; ++i) {
        Buffer result(d, out, {m, n});
        MatmulArgs args;
        args.out = result.view();
        args.a = a.view();
        args.b = b.view();
        const TestWorkspace workspace(d, matmul_workspace_bytes(d));
        matmul(Stream::current(d), args, workspace);
        if (i == 0) first = result.get();
        expect_same(result.get(), first);
      }
    });
  });
}

// A ReLU that is max(x, 0) in hardware would hide a NaN.
TEST(Matmul, ActivationsKeepNaN) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (Activation activation : {Activation::relu, Activation::gelu_tanh, Activation::silu}) {
        Values a(64 * 64, 1.0), ones(64 * 64, 1.0);
        a[5 * 64 + 3] = kNaN;
        Buffer a_buffer(d, dtype, {64, 64}, a), b(d, dtype, {64, 64}, ones),
            bias(d, dtype, {64}, Values(64, 0.0)), out(d, dtype, {64, 64});
        MatmulArgs args{.out = out.view(), .a = a_buffer.view(), .b = b.view()};
        args.bias = bias.view();
        args.activation = activation;
        const TestWorkspace workspace(d, matmul_workspace_bytes(d));
        matmul(Stream::current(d), args, workspace);
        const Values got = out.get();
        for (std::size_t i = 0; i < got.size(); ++i)
          ASSERT_EQ(std::isnan(got[i]), i / 64 == 5)
              << name_of(dtype) << " activation " << static_cast<int>(activation) << " at " << i;
      }
  });
}

TEST(Matmul, ProductAsAGradientBackThroughAnActivation) {
  const std::int64_t sizes[][3] = {{1, 1, 1}, {64, 48, 32}, {33, 7, 65}, {128, 256, 64}, {5, 6, 0}};
  on_each_device([&](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (Activation activation : kActivations)
        for (const auto& [m, n, k] : sizes) {
          if (activation == Activation::none) continue;
          SCOPED_TRACE(::testing::Message()
                       << name_of(dtype) << " activation " << static_cast<int>(activation) << " "
                       << m << "x" << n << "x" << k);
          const Case c{0, m, n, k};
          const Values a = normals(dtype, m * k, 1), b = normals(dtype, k * n, 2),
                       z = normals(dtype, m * n, 3);
          Values saved = z;
          if (activation == Activation::relu)
            for (double& v : saved) v = activate(activation, v);
          Buffer a_buffer(d, dtype, {m, k}, a), b_buffer(d, dtype, {k, n}, b),
              saved_buffer(d, dtype, {m, n}, saved), out(d, dtype, {m, n});
          MatmulArgs args{.out = out.view(), .a = a_buffer.view(), .b = b_buffer.view()};
          args.backward_of = activation;
          args.saved = saved_buffer.view();
          const TestWorkspace workspace(d, matmul_workspace_bytes(d));
          matmul(Stream::current(d), args, workspace);
          const Reference r = reference(c, a, b, {}, 1);
          Values want(r.value.size()), bound(want.size());
          for (std::size_t i = 0; i < want.size(); ++i) {
            const double slope = activation_slope(activation, z[i]);
            want[i] = r.value[i] * slope;
            bound[i] = 1.2 * bound_of(dtype, dtype, k, r.size[i], r.value[i], true) +
                       2 * unit_roundoff(dtype) * std::abs(want[i]) +
                       // the library's tanh, in 16 bits
                       (is_low_precision(dtype) ? unit_roundoff(dtype) * std::abs(r.value[i]) : 0);
          }
          expect_close(out.get(), want, bound);
          out.check_guards();
        }
  });
}

TEST(Matmul, RefusesWhatDoesNotFit) {
  const Device d = Device::cpu();
  Buffer a(d, Dtype::f32, {2, 3}), b(d, Dtype::f32, {4, 5}), out(d, Dtype::f32, {2, 5});
  Buffer half(d, Dtype::f16, {3, 5}), scattered(d, Dtype::f32, {3, 5}, Shape{20, 2});
  MatmulArgs args;
  args.out = out.view();
  args.a = a.view();
  for (const View& bad : {b.view(), half.view(), scattered.view()}) {
    args.b = bad;
    EXPECT_THROW(matmul(Stream(), args, Workspace{}), Error);
  }
}

// ---- the epilogue's backward pass -------------------------------------------------------------

struct BackwardOptions {
  Dtype dtype, saved_dtype, bias_dtype;
  float beta = 0;
  bool with_bias = true, in_place = false, with_dz = true;
};

void run_backward(Device d, Activation activation, std::int64_t m, std::int64_t n,
                  const BackwardOptions& o) {
  const Values dy = normals(o.dtype, m * n, 1), z = normals(o.saved_dtype, m * n, 2);
  const Values old = normals(o.bias_dtype, n, 3);
  Values saved = z;
  if (activation == Activation::relu)
    for (double& v : saved) v = activate(activation, v);
  Buffer dy_buffer(d, o.dtype, {m, n}, dy), saved_buffer(d, o.saved_dtype, {m, n}, saved);
  Buffer dz(d, o.dtype, {m, n}), dbias(d, o.bias_dtype, {n});
  if (o.beta != 0) dbias.set(old);
  const bool linear = activation == Activation::none;
  Buffer& out = o.in_place ? dy_buffer : dz;
  const TestWorkspace workspace(d, activation_backward_workspace_bytes(d, m, n));
  activation_backward(Stream::current(d), activation, o.with_dz ? out.view() : View{},
                      o.with_bias ? dbias.view() : View{}, o.beta, dy_buffer.view(),
                      linear ? View{} : saved_buffer.view(), workspace);
  const double u = compute_roundoff(o.dtype);
  Values want(dy.size()), bound(dy.size()), sums(static_cast<std::size_t>(n)), sums_bound(sums);
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double slope = activation_slope(activation, z[i]);
    want[i] = dy[i] * slope;
    bound[i] = std::abs(dy[i]) * (linear || activation == Activation::relu ? 0 : 16 * u) +
               unit_roundoff(o.dtype) * std::abs(want[i]) + (o.dtype == Dtype::f16 ? 0x1p-25 : 0);
    const std::size_t j = i % static_cast<std::size_t>(n);
    sums[j] += want[i];
    // A backend may sum dz as computed or as stored.
    sums_bound[j] +=
        std::abs(dy[i]) * (static_cast<double>(m) * u + 16 * u + 1.13 * unit_roundoff(o.dtype));
  }
  if (o.with_dz) expect_close(out.get(), want, bound);
  out.check_guards();
  if (!o.with_bias) return;
  for (std::size_t j = 0; j < sums.size(); ++j) {
    if (o.beta != 0) sums[j] += o.beta * old[j];
    sums_bound[j] += unit_roundoff(o.bias_dtype) * (std::abs(sums[j]) + std::abs(o.beta * old[j])) +
                     (o.bias_dtype == Dtype::f16 ? 0x1p-25 : 0);
  }
  expect_close(dbias.get(), sums, sums_bound);
  dbias.check_guards();
}

TEST(ActivationBackward, MatchesFloat64) {
  const std::pair<std::int64_t, std::int64_t> sizes[] = {
      {1, 1}, {5, 3}, {128, 10}, {33, 100}, {1000, 7}, {128, 513}, {0, 6}, {4, 0}};
  on_each_device([&](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (Activation activation : kActivations)
        for (const auto& [m, n] : sizes) {
          SCOPED_TRACE(::testing::Message()
                       << name_of(dtype) << " activation " << static_cast<int>(activation) << " "
                       << m << "x" << n);
          const Dtype wide = compute_dtype(dtype);
          run_backward(d, activation, m, n, {dtype, dtype, wide});
          run_backward(d, activation, m, n, {dtype, dtype, dtype, 1, true, true});
          run_backward(d, activation, m, n, {dtype, dtype, wide, 0.5f});
          run_backward(d, activation, m, n, {dtype, dtype, wide, 0, false});
        }
  });
}

TEST(ActivationBackward, BiasAloneNeedsNoDz) {
  on_each_device([](Device d) {
    run_backward(d, Activation::none, 70, 33,
                 {Dtype::bf16, Dtype::bf16, Dtype::f32, 0, true, false, false});
  });
}

}  // namespace
}  // namespace mixtape::testing
