// Group normalisation against float64: both layouts, every storage type, one group and one channel
// a group, large means, and bit-equal repeats.
#include "kernels/group_norm.h"

#include "engine/thread_pool.h"
#include "tests/kernels/channel_images.h"
#include "tests/kernels/layouts.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using namespace kernels;

struct GroupCase {
  ChannelCase image;
  std::int64_t groups;
};
const GroupCase kCases[] = {{{1, 1, 7}, 1},   {{3, 4, 49}, 2},  {{2, 65, 9}, 65}, {{2, 65, 5}, 1},
                            {{5, 6, 1}, 3},   {{0, 4, 3}, 2},   {{2, 32, 64}, 8}, {{2, 8, 3000}, 4},
                            {{70, 12, 3}, 6}, {{2, 513, 2}, 27}};

struct Reference {
  Values y, size, dx, dx_size, dweight, dbias, dweight_size;
  Reference(const GroupCase& g, const Values& x, const Values& w, const Values& b, const Values& dy)
      : y(x.size()),
        size(x.size()),
        dx(x.size()),
        dx_size(x.size()),
        dweight(w.size()),
        dbias(w.size()),
        dweight_size(w.size()) {
    const ChannelCase& k = g.image;
    const auto set = static_cast<std::size_t>(k.c / g.groups * k.s);
    for (std::size_t begin = 0; begin < x.size(); begin += set) {
      const double count = static_cast<double>(set);
      double mean = 0, var = 0, mean_g = 0, mean_gx = 0, total = 0;
      for (std::size_t i = begin; i < begin + set; ++i) mean += x[i] / count;
      for (std::size_t i = begin; i < begin + set; ++i)
        var += (x[i] - mean) * (x[i] - mean) / count;
      const double rstd = 1 / std::sqrt(var + kEps);
      for (std::size_t i = begin; i < begin + set; ++i) {
        const std::size_t c = k.channel_of(i);
        const double xh = (x[i] - mean) * rstd, gradient = dy[i] * w[c];
        y[i] = xh * w[c] + b[c];
        size[i] = std::abs(xh * w[c]) + std::abs(b[c]) + 1;
        mean_g += gradient / count;
        mean_gx += gradient * xh / count;
        total += std::abs(gradient) * (1 + std::abs(xh)) / count;
        dweight[c] += dy[i] * xh;
        dweight_size[c] += std::abs(dy[i]) * (1 + std::abs(xh));
        dbias[c] += dy[i];
      }
      for (std::size_t i = begin; i < begin + set; ++i) {
        const double xh = (x[i] - mean) * rstd, gradient = dy[i] * w[k.channel_of(i)];
        dx[i] = rstd * (gradient - mean_g - xh * mean_gx);
        dx_size[i] = rstd * (1 + rstd) * (std::abs(gradient) + total * (1 + xh * xh));
      }
    }
  }
};

struct Results {
  Values y, dx, dweight, dbias;
};

Results run(Device d, Dtype dtype, const GroupCase& g, bool last, const Values& x, const Values& w,
            const Values& b, const Values& dy) {
  const ChannelCase& k = g.image;
  ImageBuffer x_in(d, dtype, k, last, x), dy_in(d, dtype, k, last, dy), y(d, dtype, k, last),
      dx(d, dtype, k, last);
  Buffer weight(d, Dtype::f32, {k.c}, w), bias(d, Dtype::f32, {k.c}, b);
  Buffer mean(d, Dtype::f64, {k.n, g.groups}), rstd(d, compute_dtype(dtype), {k.n, g.groups});
  Buffer dweight(d, Dtype::f32, {k.c}, Values(w.size(), 0.5)), dbias(d, Dtype::f32, {k.c});
  const Stream stream = Stream::current(d);
  group_norm_forward(stream, {.y = y.view(),
                              .mean = mean.view(),
                              .rstd = rstd.view(),
                              .x = x_in.view(),
                              .weight = weight.view(),
                              .bias = bias.view(),
                              .groups = g.groups,
                              .eps = kEps});
  const TestWorkspace scratch(d, group_norm_backward_workspace_bytes(x_in.view()));
  group_norm_backward(stream,
                      {.dx = dx.view(),
                       .dweight = dweight.view(),
                       .dbias = dbias.view(),
                       .beta_weight = 1,
                       .dy = dy_in.view(),
                       .x = x_in.view(),
                       .weight = weight.view(),
                       .mean = mean.view(),
                       .rstd = rstd.view(),
                       .groups = g.groups},
                      scratch);
  for (ImageBuffer* image : {&y, &dx}) image->check_guards();
  for (Buffer* vector : {&mean, &rstd, &dweight, &dbias}) vector->check_guards();
  return {y.get(), dx.get(), dweight.get(), dbias.get()};
}

void check(Dtype dtype, const GroupCase& g, const Results& got, const Reference& want) {
  const double u = compute_roundoff(dtype), storage = unit_roundoff(dtype);
  const double set = static_cast<double>(g.image.c / g.groups * g.image.s);
  const double roundings = sum_roundings(std::max(set, g.image.values()));
  Values y_bound(want.y), dx_bound(want.dx), dw(want.dweight), dw_bound(dw), db_bound(dw);
  for (std::size_t i = 0; i < y_bound.size(); ++i) {
    y_bound[i] = roundings * u * want.size[i] + storage * std::abs(want.y[i]);
    dx_bound[i] = roundings * u * want.dx_size[i] + storage * std::abs(want.dx[i]);
  }
  for (std::size_t c = 0; c < dw.size(); ++c) {
    dw[c] += 0.5;
    dw_bound[c] = roundings * u * want.dweight_size[c] + 0x1p-23 * std::abs(dw[c]);
    db_bound[c] = roundings * u * want.dweight_size[c] + 0x1p-23 * std::abs(want.dbias[c]);
  }
  expect_close(got.y, want.y, y_bound);
  expect_close(got.dx, want.dx, dx_bound);
  expect_close(got.dweight, dw, dw_bound);
  expect_close(got.dbias, want.dbias, db_bound);
}

TEST(GroupNorm, MatchesReference) {
  on_each_device([](Device d) {
    for (const Dtype dtype : kFloatingDtypes)
      for (const GroupCase& g : kCases)
        for (const bool last : {false, true}) {
          SCOPED_TRACE(mixtape::detail::concat(dtype, " ", g.image.sizes(), " groups ", g.groups,
                                               " last ", last));
          const std::int64_t n = g.image.numel();
          const Values x = normals(dtype, n, 1, 1, 0.5), dy = normals(dtype, n, 2),
                       w = normals(Dtype::f32, g.image.c, 3), b = normals(Dtype::f32, g.image.c, 4);
          check(dtype, g, run(d, dtype, g, last, x, w, b, dy), Reference(g, x, w, b, dy));
        }
  });
}

TEST(GroupNorm, MeansThousandsOfTimesTheDeviationDoNotCancel) {
  on_each_device([](Device d) {
    const GroupCase g{{3, 6, 40}, 2};
    for (const bool last : {false, true}) {
      const Values x = normals(Dtype::f32, g.image.numel(), 1, 0.05, 10000),
                   dy = normals(Dtype::f32, g.image.numel(), 2), ones(6, 1.0), zeros(6, 0.0);
      check(Dtype::f32, g, run(d, Dtype::f32, g, last, x, ones, zeros, dy),
            Reference(g, x, ones, zeros, dy));
    }
  });
}

TEST(GroupNorm, RunsAreBitEqualForAnyNumberOfThreads) {
  on_each_device([](Device d) {
    const GroupCase g{{6, 24, 200}, 4};
    const Values x = normals(Dtype::bf16, g.image.numel(), 1),
                 dy = normals(Dtype::bf16, g.image.numel(), 2),
                 w = normals(Dtype::f32, g.image.c, 3), b = normals(Dtype::f32, g.image.c, 4);
    Results first;
    for_thread_counts([&](int) {
      const Results now = run(d, Dtype::bf16, g, false, x, w, b, dy);
      if (first.y.empty()) first = now;
      expect_same(now.y, first.y);
      expect_same(now.dx, first.dx);
      expect_same(now.dweight, first.dweight);
      expect_same(now.dbias, first.dbias);
    });
  });
}

TEST(GroupNorm, GroupsMustDivideTheChannels) {
  on_each_device([](Device d) {
    Buffer x(d, Dtype::f32, {2, 4, 3});
    expect_error(
        [&] {
          group_norm_forward(Stream::current(d), {.y = x.view(), .x = x.view(), .groups = 3});
        },
        "divisible by 3");
  });
}

}  // namespace
}  // namespace mixtape::testing
