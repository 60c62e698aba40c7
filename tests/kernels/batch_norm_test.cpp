// Batch normalisation against float64: both layouts, every storage type, the fused residual and
// ReLU, running statistics, large means, and bit-equal repeats.
#include "kernels/batch_norm.h"

#include <span>

#include "engine/thread_pool.h"
#include "tests/kernels/channel_images.h"
#include "tests/kernels/layouts.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using namespace kernels;

struct Mode {
  bool training = true, relu = false, residual = false;
};
constexpr Mode kModes[] = {{true, false, false},
                           {true, true, true},
                           {true, false, true},
                           {false, true, true},
                           {false, false, false}};

/// All of them on small problems; large ones, which take the same code over several blocks, in two.
std::span<const Mode> modes_for(const ChannelCase& k, Dtype dtype) {
  const bool two_only = k.numel() > 10000;
  if (two_only && dtype != Dtype::f32 && dtype != Dtype::f16) return {};
  return std::span(kModes).first(two_only ? 2 : std::size(kModes));
}

/// Forward and backward in float64, with the sizes of what is added up.
struct Reference {
  Values mean, var, y, y_size, dx, dx_size, dresidual, dweight, dbias, dweight_size, dbias_size;

  /// `given` is the kernel's y: where rounding decides the ReLU's side, the gradient follows that.
  Reference(const ChannelCase& k, const Mode& mode, const Values& x, const Values& r,
            const Values& w, const Values& b, const Values& running_mean, const Values& running_var,
            const Values& dy, const Values& given)
      : mean(static_cast<std::size_t>(k.c)),
        var(mean),
        y(x.size()),
        y_size(x.size()),
        dx(x.size()),
        dx_size(x.size()),
        dresidual(x.size()),
        dweight(mean),
        dbias(mean),
        dweight_size(mean),
        dbias_size(mean) {
    const auto channel = [&](std::size_t i) { return k.channel_of(i); };
    for (std::size_t i = 0; i < x.size(); ++i) mean[channel(i)] += x[i] / k.values();
    for (std::size_t i = 0; i < x.size(); ++i)
      var[channel(i)] += (x[i] - mean[channel(i)]) * (x[i] - mean[channel(i)]) / k.values();
    const Values& m = mode.training ? mean : running_mean;
    const Values& v = mode.training ? var : running_var;
    const auto rstd = [&](std::size_t c) { return 1 / std::sqrt(v[c] + kEps); };
    Values size(mean.size());  // mean of |g| (1 + |normalised|)
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t c = channel(i);
      const double xh = (x[i] - m[c]) * rstd(c);
      y[i] = xh * w[c] + b[c] + (mode.residual ? r[i] : 0);
      y_size[i] = std::abs(xh * w[c]) + std::abs(b[c]) + (mode.residual ? std::abs(r[i]) : 0);
      if (mode.relu) y[i] = std::max(y[i], 0.0);
      const double g = mode.relu && given[i] <= 0 ? 0 : dy[i];
      dresidual[i] = g;
      dweight[c] += g * xh;
      dbias[c] += g;
      dweight_size[c] += std::abs(g) * (1 + std::abs(xh));
      dbias_size[c] += std::abs(g);
      size[c] += std::abs(g) * (1 + std::abs(xh)) / k.values();
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t c = channel(i);
      const double xh = (x[i] - m[c]) * rstd(c), factor = w[c] * rstd(c);
      const double mean_g = mode.training ? dbias[c] / k.values() : 0;
      const double slope = mode.training ? dweight[c] / k.values() : 0;
      dx[i] = factor * (dresidual[i] - mean_g - xh * slope);
      dx_size[i] =
          std::abs(factor) * (std::abs(dresidual[i]) + size[c] * (1 + xh * xh) * (1 + rstd(c)));
    }
  }
};

/// One problem, its inputs on the device, and what the two kernels give.
struct Problem {
  Device d;
  Dtype dtype;
  ChannelCase k;
  Mode mode;
  bool last;
  Values x, r, w, b, running_mean, running_var, dy;
  ImageBuffer x_in, r_in, dy_in, y, dx, dresidual;
  Buffer weight, bias, mean, var, statistics, dweight, dbias;
  DeviceArray<std::int64_t> batches;

  Problem(Device d_, Dtype t, const ChannelCase& k_, const Mode& mode_, bool last_,
          double centre = 0.5, double deviation = 1)
      : d(d_),
        dtype(t),
        k(k_),
        mode(mode_),
        last(last_),
        x(normals(t, k.numel(), 1, deviation, centre)),
        r(normals(t, k.numel(), 2)),
        w(normals(Dtype::f32, k.c, 3)),
        b(normals(Dtype::f32, k.c, 4)),
        running_mean(normals(Dtype::f32, k.c, 5)),
        running_var(normals(Dtype::f32, k.c, 6)),
        dy(normals(t, k.numel(), 7)),
        x_in(d, t, k, last, x),
        r_in(d, t, k, last, r),
        dy_in(d, t, k, last, dy),
        y(d, t, k, last),
        dx(d, t, k, last),
        dresidual(d, t, k, last),
        weight(d, Dtype::f32, {k.c}, w),
        bias(d, Dtype::f32, {k.c}, b),
        mean(d, Dtype::f32, {k.c}, running_mean),
        var(d, Dtype::f32, {k.c}, positive(running_var)),
        statistics(d, compute_dtype(t), {3, k.c}),
        dweight(d, Dtype::f32, {k.c}, Values(static_cast<std::size_t>(k.c), 0.25)),
        dbias(d, Dtype::f32, {k.c}, Values(static_cast<std::size_t>(k.c), 0.25)),
        batches(d, {2}) {}

  static Values positive(Values& v) {
    for (double& e : v) e = rounded(Dtype::f32, 0.5 + std::abs(e));
    return v;
  }
  /// After forward().
  Reference reference() { return {k, mode, x, r, w, b, running_mean, running_var, dy, y.get()}; }
  void forward(double momentum = 0.1) {
    const TestWorkspace scratch(d, batch_norm_workspace_bytes(x_in.view()));
    batch_norm_forward(Stream::current(d),
                       {.y = y.view(),
                        .statistics = mode.training ? statistics.view() : View{},
                        .running_mean = mean.view(),
                        .running_var = var.view(),
                        .batches = mode.training ? count_view() : View{},
                        .x = x_in.view(),
                        .residual = mode.residual ? r_in.view() : View{},
                        .weight = weight.view(),
                        .bias = bias.view(),
                        .training = mode.training,
                        .relu = mode.relu,
                        .momentum = momentum,
                        .eps = kEps},
                       scratch);
  }
  void backward() {
    const TestWorkspace scratch(d, batch_norm_workspace_bytes(x_in.view()));
    batch_norm_backward(Stream::current(d),
                        {.dx = dx.view(),
                         .dresidual = mode.relu && mode.residual ? dresidual.view() : View{},
                         .dweight = dweight.view(),
                         .dbias = dbias.view(),
                         .beta_weight = 1,
                         .beta_bias = 0,
                         .dy = dy_in.view(),
                         .x = x_in.view(),
                         .y = mode.relu ? y.view() : View{},
                         .weight = weight.view(),
                         .statistics = mode.training ? statistics.view() : View{},
                         .running_mean = mode.training ? View{} : mean.view(),
                         .running_var = mode.training ? View{} : var.view(),
                         .eps = kEps},
                        scratch);
  }
  View count_view() const {
    View v;
    v.data = batches.data();
    v.dtype = Dtype::i64;
    v.device = d;
    v.defined = true;
    return v;
  }
};

double unit(Dtype dtype) { return compute_roundoff(dtype); }
/// Of rounding a result once; float16 has a smallest step.
double storage_rounding(Dtype dtype, double value) {
  return unit_roundoff(dtype) * std::abs(value) + (dtype == Dtype::f16 ? 0x1p-25 : 0);
}

void check_forward(Problem& p, const Reference& want) {
  const double roundings = sum_roundings(p.k.values());
  Values bound(want.y.size());
  for (std::size_t i = 0; i < bound.size(); ++i)
    bound[i] =
        roundings * unit(p.dtype) * (want.y_size[i] + 1) + storage_rounding(p.dtype, want.y[i]);
  expect_close(p.y.get(), want.y, bound);
  p.y.check_guards();
  if (!p.mode.training || p.k.numel() == 0) return;
  Values mean(want.mean.size()), var(want.mean.size());
  for (std::size_t c = 0; c < mean.size(); ++c) {
    mean[c] = 0.9 * p.running_mean[c] + 0.1 * want.mean[c];
    var[c] = 0.9 * p.running_var[c] + 0.1 * want.var[c] * p.k.values() / (p.k.values() - 1);
  }
  expect_close(p.mean.get(), mean, 8 * unit_roundoff(Dtype::f32), roundings * 0x1p-24);
  expect_close(p.var.get(), var, 8 * unit_roundoff(Dtype::f32), roundings * 0x1p-24);
  EXPECT_EQ(p.batches.value(), 3);
}

void check_backward(Problem& p, const Reference& want) {
  const double roundings = sum_roundings(p.k.values());
  Values bound(want.dx.size());
  for (std::size_t i = 0; i < bound.size(); ++i)
    bound[i] = roundings * unit(p.dtype) * want.dx_size[i] + storage_rounding(p.dtype, want.dx[i]);
  expect_close(p.dx.get(), want.dx, bound);
  p.dx.check_guards();
  if (p.mode.relu && p.mode.residual) {
    expect_same(p.dresidual.get(), want.dresidual);
    p.dresidual.check_guards();
  }
  Values dw(want.dweight), dw_bound(dw), db_bound(dw);
  for (std::size_t c = 0; c < dw.size(); ++c) {
    dw[c] += 0.25;
    dw_bound[c] = roundings * unit(p.dtype) * want.dweight_size[c] + 0x1p-23 * std::abs(dw[c]);
    db_bound[c] =
        roundings * unit(p.dtype) * want.dbias_size[c] + 0x1p-23 * std::abs(want.dbias[c]);
  }
  expect_close(p.dweight.get(), dw, dw_bound);
  expect_close(p.dbias.get(), want.dbias, db_bound);
}

TEST(BatchNorm, MatchesReference) {
  on_each_device([](Device d) {
    for (const Dtype dtype : kFloatingDtypes)
      for (const ChannelCase& k : kChannelCases)
        for (const Mode& mode : modes_for(k, dtype))
          for (const bool last : {false, true}) {
            SCOPED_TRACE(mixtape::detail::concat(dtype, " ", k.sizes(), " last ", last,
                                                 " training ", mode.training, " relu ", mode.relu));
            Problem p(d, dtype, k, mode, last);
            p.forward();
            const Reference want = p.reference();
            check_forward(p, want);
            p.backward();
            check_backward(p, want);
          }
  });
}

TEST(BatchNorm, MeansThousandsOfTimesTheDeviationDoNotCancel) {
  on_each_device([](Device d) {
    for (const ChannelCase& k : {ChannelCase{4, 5, 16}, {2, 8, 4096}, {3000, 3, 1}})
      for (const bool last : {false, true}) {
        SCOPED_TRACE(mixtape::detail::concat(k.sizes(), " last ", last));
        Problem p(d, Dtype::f32, k, {}, last, 10000, 0.05);
        p.forward();
        const Reference want = p.reference();
        // The data are exact; what is lost is only what float arithmetic on deviations loses.
        Values bound(want.y.size());
        for (std::size_t i = 0; i < bound.size(); ++i)
          bound[i] = sum_roundings(k.values()) * 0x1p-24 * (want.y_size[i] + 1);
        expect_close(p.y.get(), want.y, bound);
      }
  });
}

TEST(BatchNorm, RunningVarianceIsUnbiasedAndOutputsUseTheBiasedOne) {
  on_each_device([](Device d) {
    const Values x = {1, 3};
    Buffer in(d, Dtype::f32, {2, 1, 1}, x), y(d, Dtype::f32, {2, 1, 1});
    Buffer statistics(d, Dtype::f32, {3, 1}), mean(d, Dtype::f32, {1}, Values{0}),
        var(d, Dtype::f32, {1}, Values{1});
    const TestWorkspace scratch(d, batch_norm_workspace_bytes(in.view()));
    batch_norm_forward(Stream::current(d),
                       {.y = y.view(),
                        .statistics = statistics.view(),
                        .running_mean = mean.view(),
                        .running_var = var.view(),
                        .x = in.view(),
                        .eps = 0},
                       scratch);
    expect_close(y.get(), {-1, 1}, 1e-6, 0);
    expect_close(var.get(), {1.1}, 1e-6, 0);
    expect_close(mean.get(), {0.2}, 1e-6, 0);
  });
}

TEST(BatchNorm, NegativeMomentumAveragesAllBatches) {
  on_each_device([](Device d) {
    Problem p(d, Dtype::f32, {4, 3, 5}, {}, false);  // two batches were counted before
    p.forward(-1);
    const Reference want = p.reference();
    Values mean(want.mean);
    for (std::size_t c = 0; c < mean.size(); ++c)
      mean[c] = p.running_mean[c] * 2 / 3 + want.mean[c] / 3;
    expect_close(p.mean.get(), mean, 1e-6, 0);
    EXPECT_EQ(p.batches.value(), 3);
  });
}

TEST(BatchNorm, NanStaysInItsChannel) {
  on_each_device([](Device d) {
    for (const bool last : {false, true}) {
      Problem p(d, Dtype::f32, {2, 3, 4}, {.relu = true}, last);
      Values x = p.x;
      x[5] = kNaN;  // channel 1
      p.x_in.buffer.set(x);
      p.forward();
      const Values y = p.y.get();
      for (std::size_t i = 0; i < y.size(); ++i)
        EXPECT_EQ(std::isnan(y[i]), p.k.channel_of(i) == 1);
    }
  });
}

TEST(BatchNorm, RunsAreBitEqualForAnyNumberOfThreads) {
  on_each_device([](Device d) {
    for (const bool last : {false, true}) {
      Values y, dx, dweight;
      for_thread_counts([&](int) {
        Problem p(d, Dtype::f16, {40, 17, 128}, {.relu = true}, last);
        p.forward();
        p.backward();
        if (y.empty()) {
          y = p.y.get();
          dx = p.dx.get();
          dweight = p.dweight.get();
        }
        expect_same(p.y.get(), y);
        expect_same(p.dx.get(), dx);
        expect_same(p.dweight.get(), dweight);
      });
    }
  });
}

TEST(BatchNorm, BadOperandsAreErrors) {
  on_each_device([](Device d) {
    Problem p(d, Dtype::f32, {1, 3, 1}, {}, false);
    expect_error([&] { p.forward(); }, "more than one value per channel");
    Problem q(d, Dtype::f32, {2, 3, 4}, {}, false);
    expect_error(
        [&] {
          batch_norm_forward(Stream::current(d),
                             {.y = q.y.view(), .x = q.x_in.view(), .training = false}, {});
        },
        "running statistics");
    View strided = q.x_in.view();
    strided.strides = {24, 8, 2};
    expect_error([&] { batch_norm_workspace_bytes(strided); }, "contiguous or channels-last");
  });
}

}  // namespace
}  // namespace mixtape::testing
