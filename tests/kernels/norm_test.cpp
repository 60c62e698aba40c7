// Layer normalisation against float64: rows with a large mean, the fused residual, and parameter
// gradients.
#include "kernels/norm.h"

#include "engine/thread_pool.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/norm_reference.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;

void run_forward(Device d, Dtype dtype, Dtype weight_dtype, const Rows& r, bool affine) {
  const Values x = normals(dtype, r.n * r.c, 1, 2, 0.5);
  const Values w = normals(weight_dtype, r.c, 2), b = normals(weight_dtype, r.c, 3);
  const Reference want(x, affine ? w : Values{}, affine ? b : Values{}, r);
  const Dtype stats = compute_dtype(dtype);
  Buffer in(d, dtype, {r.n, r.c}, x), out(d, dtype, {r.n, r.c});
  Buffer weight(d, weight_dtype, {r.c}, w), bias(d, weight_dtype, {r.c}, b);
  Buffer mean(d, stats, {r.n}), rstd(d, stats, {r.n});
  LayerNormForward args;
  args.y = out.view();
  args.x = in.view();
  args.mean = mean.view();
  args.rstd = rstd.view();
  if (affine) {
    args.weight = weight.view();
    args.bias = bias.view();
  }
  args.eps = kEps;
  layer_norm_forward(Stream::current(d), args);
  const double u = compute_roundoff(dtype) * sum_roundings(r.c);
  // Normalised values reach sqrt(c); a row of two nearly equal values amplifies by rstd.
  Values bound(x.size());
  for (std::size_t i = 0; i < bound.size(); ++i) {
    const double amplified = 1 + want.rstd[i / static_cast<std::size_t>(r.c)];
    const double weight_size = affine ? std::abs(w[i % static_cast<std::size_t>(r.c)]) : 1;
    bound[i] =
        u * 8 * amplified * weight_size + (unit_roundoff(dtype) + u) * std::abs(want.y[i]) + 4 * u;
  }
  expect_close(out.get(), want.y, bound);
  expect_close(mean.get(), want.mean, 8 * u, u);
  expect_close(rstd.get(), want.rstd, 0, 8 * u);
  for (Buffer* buffer : {&out, &mean, &rstd}) buffer->check_guards();
}

TEST(LayerNorm, ForwardMatchesFloat64) {
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

TEST(LayerNorm, ResidualIsRoundedBeforeNormalising) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Rows& r : kRows) {
        const Values x = normals(dtype, r.n * r.c, 1), res = normals(dtype, r.n * r.c, 2);
        Values sum(x.size());
        const bool wide = dtype == Dtype::f64;
        for (std::size_t i = 0; i < x.size(); ++i)
          sum[i] = wide ? x[i] + res[i]
                        : rounded(dtype, static_cast<float>(x[i]) + static_cast<float>(res[i]));
        Buffer in(d, dtype, {r.n, r.c}, x), residual(d, dtype, {r.n, r.c}, res);
        Buffer total(d, dtype, {r.n, r.c}), fused(d, dtype, {r.n, r.c}),
            alone(d, dtype, {r.n, r.c});
        LayerNormForward args;
        args.y = fused.view();
        args.sum = total.view();
        args.x = in.view();
        args.residual = residual.view();
        layer_norm_forward(Stream::current(d), args);
        expect_same(total.get(), sum);
        LayerNormForward plain;
        plain.y = alone.view();
        plain.x = total.view();
        layer_norm_forward(Stream::current(d), plain);
        expect_same(fused.get(), alone.get());
        fused.check_guards();
        total.check_guards();
      }
    }
  });
}

void run_backward(Device d, Dtype dtype, const Rows& r, bool affine, bool with_dsum, float beta) {
  const Values x = normals(dtype, r.n * r.c, 1, 2, 0.5), dy = normals(dtype, r.n * r.c, 2);
  const Dtype stats = compute_dtype(dtype), grads = stats;
  const Values w = normals(stats, r.c, 3);
  const Values ds = with_dsum ? normals(dtype, r.n * r.c, 4) : Values{};
  const Values old = normals(grads, r.c, 5);
  const Reference f(x, {}, {}, r);
  const BackwardReference want(f, dy, affine ? w : Values{}, ds, r);
  Buffer in(d, dtype, {r.n, r.c}, x), g(d, dtype, {r.n, r.c}, dy), dx(d, dtype, {r.n, r.c});
  Buffer weight(d, stats, {r.c}, w), mean(d, stats, {r.n}, f.mean), rstd(d, stats, {r.n}, f.rstd);
  Buffer dweight(d, grads, {r.c}), dbias(d, grads, {r.c});  // NaN: beta 0 must not read them
  if (beta != 0) {
    dweight.set(old);
    dbias.set(old);
  }
  Buffer dsum(d, dtype, {r.n, r.c});
  LayerNormBackward args;
  args.dx = dx.view();
  if (affine) {
    args.weight = weight.view();
    args.dweight = dweight.view();
    args.dbias = dbias.view();
    args.beta_weight = args.beta_bias = beta;
  }
  args.dy = g.view();
  if (with_dsum) {
    dsum.set(ds);
    args.dsum = dsum.view();
  }
  args.x = in.view();
  args.mean = mean.view();
  args.rstd = rstd.view();
  const TestWorkspace workspace(d, layer_norm_backward_workspace_bytes(d, r.n, r.c));
  layer_norm_backward(Stream::current(d), args, workspace);
  const double u = compute_roundoff(dtype) * sum_roundings(r.c);
  const double column_u = compute_roundoff(dtype) * (sum_roundings(r.n) + 40);
  Values bound(x.size()), dw = want.dweight, db = want.dbias;
  for (std::size_t i = 0; i < bound.size(); ++i)
    bound[i] = 4 * u * want.dx_size[i] + unit_roundoff(dtype) * std::abs(want.dx[i]) +
               (dtype == Dtype::f16 ? 0x1p-25 : 0);
  expect_close(dx.get(), want.dx, bound);
  dx.check_guards();
  if (!affine) return;
  Values dw_bound(dw.size()), db_bound(dw.size());
  const double rstd_max = f.rstd.empty() ? 0 : *std::max_element(f.rstd.begin(), f.rstd.end());
  for (std::size_t i = 0; i < dw.size(); ++i) {
    dw[i] += beta * old[i];
    db[i] += beta * old[i];
    dw_bound[i] = column_u * ((1 + 4 * rstd_max) * want.dweight_size[i] + std::abs(beta * old[i]));
    db_bound[i] = column_u * (want.dbias_size[i] + std::abs(beta * old[i]));
  }
  expect_close(dweight.get(), dw, dw_bound);
  expect_close(dbias.get(), db, db_bound);
  dweight.check_guards();
  dbias.check_guards();
}

TEST(LayerNorm, BackwardMatchesFloat64) {
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

TEST(LayerNorm, ManyRowsMatchFloat64) {
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

TEST(LayerNorm, MisalignedRowsMatchAlignedOnes) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Rows& r :
           {Rows{6, 8}, Rows{5, 768}, Rows{3, 1600}, Rows{2, 4096}, Rows{2, 8192}}) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << r.n << "x" << r.c);
        const Values x = normals(dtype, r.n * r.c, 1), dy = normals(dtype, r.n * r.c, 2);
        const Dtype stats = compute_dtype(dtype);
        const Reference f(x, {}, {}, r);
        const BackwardReference want(f, dy, {}, {}, r);
        MisalignedRows in(d, dtype, r, x), g(d, dtype, r, dy), out(d, dtype, r, {}),
            dx(d, dtype, r, {});
        Buffer mean(d, stats, {r.n}), rstd(d, stats, {r.n});
        LayerNormForward args;
        args.y = out.view();
        args.mean = mean.view();
        args.rstd = rstd.view();
        args.x = in.view();
        args.eps = kEps;
        layer_norm_forward(Stream::current(d), args);
        LayerNormBackward backward;
        backward.dx = dx.view();
        backward.dy = g.view();
        backward.x = in.view();
        backward.mean = mean.view();
        backward.rstd = rstd.view();
        layer_norm_backward(Stream::current(d), backward, {});
        const double u = compute_roundoff(dtype) * sum_roundings(r.c);
        Values bound(x.size());
        for (std::size_t i = 0; i < bound.size(); ++i)
          bound[i] = 16 * u * (1 + std::abs(f.y[i])) + unit_roundoff(dtype) * std::abs(f.y[i]);
        expect_close(out.get(), f.y, bound);
        for (std::size_t i = 0; i < bound.size(); ++i)
          bound[i] = 8 * u * want.dx_size[i] + unit_roundoff(dtype) * std::abs(want.dx[i]) +
                     (dtype == Dtype::f16 ? 0x1p-25 : 0);
        expect_close(dx.get(), want.dx, bound);
        out.buffer.check_guards();
        dx.buffer.check_guards();
      }
    }
  });
}

TEST(LayerNorm, LargeMeanKeepsItsDigits) {  // case 20
  on_each_device([](Device d) {
    const struct { double mean, first; } cases[] = {{1000, -1.3415}, {10000, -1.3313}};
    for (const auto& c : cases) {
      Values x;
      for (int i = 0; i < 16; ++i) x.push_back(rounded(Dtype::f32, c.mean + i * 1e-3));
      Buffer in(d, Dtype::f32, {1, 16}, x), out(d, Dtype::f32, {1, 16});
      Buffer mean(d, Dtype::f32, {1}), rstd(d, Dtype::f32, {1});
      LayerNormForward args;
      args.y = out.view();
      args.mean = mean.view();
      args.rstd = rstd.view();
      args.x = in.view();
      layer_norm_forward(Stream::current(d), args);
      const Reference want(x, {}, {}, {1, 16});
      EXPECT_NEAR(want.y[0], c.first, 5e-5);
      // The variance is right whatever the mean; centred values may carry the mean's rounding.
      expect_close(rstd.get(), want.rstd, 0, 1e-3);
      const double mean_rounding = c.mean * 0x1p-24;
      const double bound = d.is_cpu() ? 1e-5 : 2 * mean_rounding * want.rstd[0] + 1e-4;
      expect_close(out.get(), want.y, bound, 0);
    }
  });
}

TEST(LayerNorm, PartsOfARowMayLieFarApart) {  // a mean estimated from the first part is far off
  on_each_device([](Device d) {
    for (const std::int64_t c : {33, 768, 1600, 4096, 16384}) {
      SCOPED_TRACE(c);
      const Rows r{2, c};
      Values x = normals(Dtype::f32, r.n * r.c, 1);
      for (std::int64_t i = 0; i < r.n; ++i)
        for (std::int64_t j = 0; j < c / 8; ++j) {
          double& value = x[static_cast<std::size_t>(i * c + j)];
          value = rounded(Dtype::f32, value + 1e4);
        }
      const Reference f(x, {}, {}, r);
      Buffer in(d, Dtype::f32, {r.n, r.c}, x), out(d, Dtype::f32, {r.n, r.c});
      Buffer mean(d, Dtype::f32, {r.n}), rstd(d, Dtype::f32, {r.n});
      LayerNormForward args;
      args.y = out.view();
      args.mean = mean.view();
      args.rstd = rstd.view();
      args.x = in.view();
      args.eps = kEps;
      layer_norm_forward(Stream::current(d), args);
      const double u = 0x1p-24 * sum_roundings(c);
      expect_close(mean.get(), f.mean, 0, 8 * u);
      expect_close(rstd.get(), f.rstd, 0, 16 * u);
      expect_close(out.get(), f.y, 32 * u, 16 * u);
      for (Buffer* buffer : {&out, &mean, &rstd}) buffer->check_guards();
    }
  });
}

TEST(LayerNorm, LargeMeanOfLongRowsKeepsItsDigits) {  // case 20, for each division of a row
  on_each_device([](Device d) {
    for (const std::int64_t c : {33, 768, 1600, 4096, 16384}) {
      SCOPED_TRACE(c);
      const Rows r{3, c};
      const Values x = normals(Dtype::f32, r.n * r.c, 1, 1e-2, 1e4),
                   dy = normals(Dtype::f32, r.n * r.c, 2);
      const Reference f(x, {}, {}, r);
      const BackwardReference want(f, dy, {}, {}, r);
      Buffer in(d, Dtype::f32, {r.n, r.c}, x), out(d, Dtype::f32, {r.n, r.c});
      Buffer g(d, Dtype::f32, {r.n, r.c}, dy), dx(d, Dtype::f32, {r.n, r.c});
      Buffer mean(d, Dtype::f32, {r.n}), rstd(d, Dtype::f32, {r.n});
      LayerNormForward args;
      args.y = out.view();
      args.mean = mean.view();
      args.rstd = rstd.view();
      args.x = in.view();
      args.eps = kEps;
      layer_norm_forward(Stream::current(d), args);
      // E[x^2] - E[x]^2 in float would be off by about 8, eighty thousand times the variance.
      const double u = 0x1p-24 * sum_roundings(c);
      expect_close(rstd.get(), f.rstd, 0, 16 * u);
      expect_close(out.get(), f.y, 32 * u, 16 * u);
      if (d.is_cpu()) continue;  // its backward takes the mean as saved
      LayerNormBackward backward;
      backward.dx = dx.view();
      backward.dy = g.view();
      backward.x = in.view();
      backward.mean = mean.view();
      backward.rstd = rstd.view();
      layer_norm_backward(Stream::current(d), backward, {});
      Values bound(x.size());
      for (std::size_t i = 0; i < bound.size(); ++i)
        bound[i] = 32 * u * f.rstd[0] * (1 + std::abs(dy[i])) * (1 + std::abs(f.y[i]));
      expect_close(dx.get(), want.dx, bound);
    }
  });
}

TEST(LayerNorm, BackwardOfLargeMeanUsesTheExactMeanOnTheCpu) {
  const Device d = Device::cpu();
  Values x, dy = normals(Dtype::f32, 16, 3);
  for (int i = 0; i < 16; ++i) x.push_back(rounded(Dtype::f32, 10000 + i * 1e-3));
  const Rows r{1, 16};
  const Reference f(x, {}, {}, r);
  const BackwardReference want(f, dy, {}, {}, r);
  Buffer in(d, Dtype::f32, {1, 16}, x), g(d, Dtype::f32, {1, 16}, dy), dx(d, Dtype::f32, {1, 16});
  Buffer dweight(d, Dtype::f32, {16}), dbias(d, Dtype::f32, {16});
  Buffer mean(d, Dtype::f32, {1}, f.mean), rstd(d, Dtype::f32, {1}, f.rstd);
  LayerNormBackward args;
  args.dx = dx.view();
  args.dweight = dweight.view();
  args.dbias = dbias.view();
  args.dy = g.view();
  args.x = in.view();
  args.mean = mean.view();
  args.rstd = rstd.view();
  const TestWorkspace workspace(d, layer_norm_backward_workspace_bytes(d, 1, 16));
  layer_norm_backward(Stream::current(d), args, workspace);
  expect_close(dx.get(), want.dx, f.rstd[0] * 64 * 0x1p-24, 64 * 0x1p-24);
  expect_close(dweight.get(), want.dweight, 64 * 0x1p-24, 64 * 0x1p-24);
}

TEST(LayerNorm, HalfRowOfLargeValuesDoesNotOverflow) {  // case 21
  on_each_device([](Device d) {
    Values x;
    for (int i = 0; i < 1024; ++i) x.push_back(i % 2 == 0 ? 300 : -300);
    Buffer in(d, Dtype::f16, {1, 1024}, x), out(d, Dtype::f16, {1, 1024});
    LayerNormForward args;
    args.y = out.view();
    args.x = in.view();
    layer_norm_forward(Stream::current(d), args);
    for (double& v : x) v /= 300;
    expect_same(out.get(), x);
  });
}

TEST(LayerNorm, ConstantRowGivesBias) {
  on_each_device([](Device d) {
    Buffer in(d, Dtype::f32, {1, 5}, Values(5, 3.25)), out(d, Dtype::f32, {1, 5});
    Buffer bias(d, Dtype::f32, {5}, Values{1, 2, 3, 4, 5});
    LayerNormForward args;
    args.y = out.view();
    args.x = in.view();
    args.bias = bias.view();
    layer_norm_forward(Stream::current(d), args);
    expect_same(out.get(), {1, 2, 3, 4, 5});
  });
}

TEST(LayerNorm, RunsAndThreadCountsAreBitEqual) {
  const int threads = num_threads();
  on_each_device([](Device d) {
    for (const Rows& r : {Rows{777, 130}, Rows{777, 768}}) {
      const Values x = normals(Dtype::f32, r.n * r.c, 1), dy = normals(Dtype::f32, r.n * r.c, 2);
      const Reference f(x, {}, {}, r);
      Values first_dx, first_dw, first_db;
      for (int n : {1, 2, 3, 3}) {
        set_num_threads(n);
        Buffer in(d, Dtype::f32, {r.n, r.c}, x), g(d, Dtype::f32, {r.n, r.c}, dy);
        Buffer dx(d, Dtype::f32, {r.n, r.c}), dw(d, Dtype::f32, {r.c}), db(d, Dtype::f32, {r.c});
        Buffer mean(d, Dtype::f32, {r.n}, f.mean), rstd(d, Dtype::f32, {r.n}, f.rstd);
        LayerNormBackward args;
        args.dx = dx.view();
        args.dweight = dw.view();
        args.dbias = db.view();
        args.dy = g.view();
        args.x = in.view();
        args.mean = mean.view();
        args.rstd = rstd.view();
        const TestWorkspace workspace(d, layer_norm_backward_workspace_bytes(d, r.n, r.c));
        layer_norm_backward(Stream::current(d), args, workspace);
        if (first_dx.empty()) {
          first_dx = dx.get();
          first_dw = dw.get();
          first_db = db.get();
        }
        expect_same(dx.get(), first_dx);
        expect_same(dw.get(), first_dw);
        expect_same(db.get(), first_db);
      }
    }
  });
  set_num_threads(threads);
}

}  // namespace
}  // namespace mixtape::testing
