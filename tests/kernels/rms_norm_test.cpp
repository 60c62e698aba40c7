// Root-mean-square normalisation against float64: every division of a row among threads, the fused
// residual, the weight's gradient, rows that no vector access fits.
#include <algorithm>

#include "engine/thread_pool.h"
#include "kernels/norm.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/norm_rows.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Reference {
  Values y, rstd;
  Reference(const Values& x, const Values& weight, const Rows& r) : y(x.size()) {
    for (std::int64_t i = 0; i < r.n; ++i) {
      const double* row = x.data() + i * r.c;
      double mean_square = 0;
      for (std::int64_t j = 0; j < r.c; ++j)
        mean_square += row[j] * row[j] / static_cast<double>(r.c);
      rstd.push_back(1 / std::sqrt(mean_square + kEps));
      for (std::int64_t j = 0; j < r.c; ++j)
        y[at(i * r.c + j)] = row[j] * rstd.back() * (weight.empty() ? 1 : weight[at(j)]);
    }
  }
};

/// Gradients and, for tolerances, the sizes of what cancels in them.
struct BackwardReference {
  Values dx, dweight, dx_size, dweight_size;
  BackwardReference(const Values& x, const Values& rstd, const Values& dy, const Values& w,
                    const Values& dsum, const Rows& r)
      : dx(dy.size()), dweight(at(r.c)), dx_size(dy.size()), dweight_size(at(r.c)) {
    for (std::int64_t i = 0; i < r.n; ++i) {
      const double s = rstd[at(i)];
      double mean = 0, size = 0;
      for (std::int64_t j = 0; j < r.c; ++j) {
        const auto k = at(i * r.c + j);
        const double g = dy[k] * (w.empty() ? 1 : w[at(j)]), xh = x[k] * s;
        mean += g * xh / static_cast<double>(r.c);
        size += std::abs(g * xh) / static_cast<double>(r.c);
        dweight[at(j)] += dy[k] * xh;
        dweight_size[at(j)] += std::abs(dy[k] * xh);
      }
      for (std::int64_t j = 0; j < r.c; ++j) {
        const auto k = at(i * r.c + j);
        const double g = dy[k] * (w.empty() ? 1 : w[at(j)]), xh = x[k] * s;
        const double extra = dsum.empty() ? 0 : dsum[k];
        dx[k] = s * (g - xh * mean) + extra;
        dx_size[k] = s * (std::abs(g) + std::abs(xh) * size) + std::abs(extra);
      }
    }
  }
};

/// Half the distance between float16's subnormals.
double subnormal(Dtype dtype) { return dtype == Dtype::f16 ? 0x1p-25 : 0; }

void run_forward(Device d, Dtype dtype, Dtype weight_dtype, const Rows& r, bool weighted) {
  const Values x = normals(dtype, r.n * r.c, 1, 2, 0.5), w = normals(weight_dtype, r.c, 2);
  const Reference want(x, weighted ? w : Values{}, r);
  const Dtype stats = compute_dtype(dtype);
  Buffer in(d, dtype, {r.n, r.c}, x), out(d, dtype, {r.n, r.c});
  Buffer weight(d, weight_dtype, {r.c}, w), rstd(d, stats, {r.n});
  rms_norm_forward(Stream::current(d), {.y = out.view(),
                                        .rstd = rstd.view(),
                                        .x = in.view(),
                                        .weight = weighted ? weight.view() : View{},
                                        .eps = kEps});
  const double u = compute_roundoff(dtype) * sum_roundings(r.c);
  expect_close(out.get(), want.y, subnormal(dtype), 2 * u + unit_roundoff(dtype));
  expect_close(rstd.get(), want.rstd, 0, 2 * u);
  out.check_guards();
  rstd.check_guards();
}

TEST(RmsNorm, ForwardMatchesFloat64) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Rows& r : kRows) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << r.n << "x" << r.c);
        const Dtype weight_dtype = dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
        run_forward(d, dtype, weight_dtype, r, true);
        run_forward(d, dtype, dtype, r, true);
        run_forward(d, dtype, weight_dtype, r, false);
      }
    }
  });
}

TEST(RmsNorm, ResidualIsRoundedBeforeNormalising) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Rows& r : kRows) {
        const Values x = normals(dtype, r.n * r.c, 1), res = normals(dtype, r.n * r.c, 2);
        Values sum(x.size());
        for (std::size_t i = 0; i < x.size(); ++i)
          sum[i] = dtype == Dtype::f64
                       ? x[i] + res[i]
                       : rounded(dtype, static_cast<float>(x[i]) + static_cast<float>(res[i]));
        const Shape shape = {r.n, r.c};
        Buffer in(d, dtype, shape, x), residual(d, dtype, shape, res), total(d, dtype, shape);
        Buffer fused(d, dtype, shape), alone(d, dtype, shape);
        const Stream stream = Stream::current(d);
        rms_norm_forward(
            stream,
            {.y = fused.view(), .sum = total.view(), .x = in.view(), .residual = residual.view()});
        expect_same(total.get(), sum);
        rms_norm_forward(stream, {.y = alone.view(), .x = total.view()});
        expect_same(fused.get(), alone.get());
        fused.check_guards();
        total.check_guards();
      }
    }
  });
}

void run_backward(Device d, Dtype dtype, const Rows& r, bool weighted, bool with_dsum, float beta) {
  const Values x = normals(dtype, r.n * r.c, 1, 2, 0.5), dy = normals(dtype, r.n * r.c, 2);
  const Dtype stats = compute_dtype(dtype);
  const Values w = normals(stats, r.c, 3), old = normals(stats, r.c, 5);
  const Values ds = with_dsum ? normals(dtype, r.n * r.c, 4) : Values{};
  const Values rstd_values = rounded(stats, Reference(x, {}, r).rstd);
  const BackwardReference want(x, rstd_values, dy, weighted ? w : Values{}, ds, r);
  const Shape shape = {r.n, r.c};
  Buffer in(d, dtype, shape, x), g(d, dtype, shape, dy), dx(d, dtype, shape), dsum(d, dtype, shape);
  Buffer weight(d, stats, {r.c}, w), rstd(d, stats, {r.n}, rstd_values);
  Buffer dweight(d, stats, {r.c});  // NaN: beta 0 must not read it
  if (beta != 0) dweight.set(old);
  if (with_dsum) dsum.set(ds);
  const TestWorkspace workspace(d, rms_norm_backward_workspace_bytes(d, r.n, r.c));
  rms_norm_backward(Stream::current(d),
                    {.dx = dx.view(),
                     .dweight = weighted ? dweight.view() : View{},
                     .beta_weight = beta,
                     .dy = g.view(),
                     .dsum = with_dsum ? dsum.view() : View{},
                     .x = in.view(),
                     .weight = weighted ? weight.view() : View{},
                     .rstd = rstd.view()},
                    workspace);
  const double u = compute_roundoff(dtype) * sum_roundings(r.c);
  Values bound(x.size());
  for (std::size_t i = 0; i < bound.size(); ++i)
    bound[i] =
        4 * u * want.dx_size[i] + unit_roundoff(dtype) * std::abs(want.dx[i]) + subnormal(dtype);
  expect_close(dx.get(), want.dx, bound);
  dx.check_guards();
  if (!weighted) return;
  const double column_u = compute_roundoff(dtype) * (sum_roundings(r.n) + 40);
  Values dw = want.dweight, dw_bound(dw.size());
  for (std::size_t i = 0; i < dw.size(); ++i) {
    dw[i] += beta * old[i];
    dw_bound[i] = column_u * (want.dweight_size[i] + std::abs(beta * old[i]));
  }
  expect_close(dweight.get(), dw, dw_bound);
  dweight.check_guards();
}

TEST(RmsNorm, BackwardMatchesFloat64) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Rows& r : kRows) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << r.n << "x" << r.c);
        run_backward(d, dtype, r, true, false, 0);
        run_backward(d, dtype, r, true, true, 1);
        run_backward(d, dtype, r, true, false, 0.5f);
        run_backward(d, dtype, r, false, true, 0);
      }
    }
  });
}

TEST(RmsNorm, ManyRowsMatchFloat64) {
  on_each_device([](Device d) {
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const Rows& r : kManyRows) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << r.n << "x" << r.c);
        run_forward(d, dtype, Dtype::f32, r, true);
        run_backward(d, dtype, r, true, true, 0);
      }
    }
  });
}

TEST(RmsNorm, MisalignedRowsMatchFloat64) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Rows& r :
           {Rows{6, 8}, Rows{5, 768}, Rows{3, 1600}, Rows{2, 4096}, Rows{2, 8192}}) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << r.n << "x" << r.c);
        const Values x = normals(dtype, r.n * r.c, 1), dy = normals(dtype, r.n * r.c, 2);
        const Dtype stats = compute_dtype(dtype);
        const Reference f(x, {}, r);
        const Values rstd_values = rounded(stats, f.rstd);
        const BackwardReference want(x, rstd_values, dy, {}, {}, r);
        MisalignedRows in(d, dtype, r, x), g(d, dtype, r, dy), out(d, dtype, r, {}),
            dx(d, dtype, r, {});
        Buffer rstd(d, stats, {r.n}, rstd_values);
        const Stream stream = Stream::current(d);
        rms_norm_forward(stream, {.y = out.view(), .x = in.view(), .eps = kEps});
        rms_norm_backward(
            stream, {.dx = dx.view(), .dy = g.view(), .x = in.view(), .rstd = rstd.view()}, {});
        const double u = compute_roundoff(dtype) * sum_roundings(r.c);
        expect_close(out.get(), f.y, subnormal(dtype), 2 * u + unit_roundoff(dtype));
        Values bound(x.size());
        for (std::size_t i = 0; i < bound.size(); ++i)
          bound[i] = 4 * u * want.dx_size[i] + unit_roundoff(dtype) * std::abs(want.dx[i]) +
                     subnormal(dtype);
        expect_close(dx.get(), want.dx, bound);
        out.buffer.check_guards();
        dx.buffer.check_guards();
      }
    }
  });
}

TEST(RmsNorm, HalfRowOfLargeValuesDoesNotOverflow) {  // case 21, for each division of a row
  on_each_device([](Device d) {
    for (const std::int64_t c : {1024, 1030, 4096, 65536}) {
      SCOPED_TRACE(c);
      Values x(at(c));
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = i % 2 == 0 ? 300 : -300;
      Buffer in(d, Dtype::f16, {1, c}, x), out(d, Dtype::f16, {1, c});
      rms_norm_forward(Stream::current(d), {.y = out.view(), .x = in.view()});
      for (double& v : x) v /= 300;
      expect_same(out.get(), x);
    }
  });
}

TEST(RmsNorm, ZeroRowGivesZeros) {
  on_each_device([](Device d) {
    Buffer in(d, Dtype::f32, {1, 5}, Values(5, 0)), out(d, Dtype::f32, {1, 5});
    rms_norm_forward(Stream::current(d), {.y = out.view(), .x = in.view()});
    expect_same(out.get(), Values(5, 0));
  });
}

TEST(RmsNorm, RunsAndThreadCountsAreBitEqual) {
  const int threads = num_threads();
  on_each_device([](Device d) {
    for (const Rows& r : {Rows{777, 130}, Rows{777, 768}}) {
      const Values x = normals(Dtype::f32, r.n * r.c, 1), dy = normals(Dtype::f32, r.n * r.c, 2);
      const Reference f(x, {}, r);
      Values first_dx, first_dw;
      for (int n : {1, 2, 3, 3}) {
        set_num_threads(n);
        Buffer in(d, Dtype::f32, {r.n, r.c}, x), g(d, Dtype::f32, {r.n, r.c}, dy);
        Buffer dx(d, Dtype::f32, {r.n, r.c}), dw(d, Dtype::f32, {r.c});
        Buffer rstd(d, Dtype::f32, {r.n}, f.rstd);
        const TestWorkspace workspace(d, rms_norm_backward_workspace_bytes(d, r.n, r.c));
        rms_norm_backward(Stream::current(d),
                          {.dx = dx.view(),
                           .dweight = dw.view(),
                           .dy = g.view(),
                           .x = in.view(),
                           .rstd = rstd.view()},
                          workspace);
        if (first_dx.empty()) {
          first_dx = dx.get();
          first_dw = dw.get();
        }
        expect_same(dx.get(), first_dx);
        expect_same(dw.get(), first_dw);
      }
    }
  });
  set_num_threads(threads);
}

}  // namespace
}  // namespace mixtape::testing
