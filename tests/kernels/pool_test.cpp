// Max and average pooling: windows that overlap or reach into padding, NaN, every storage type.
#include <algorithm>

#include "engine/thread_pool.h"
#include "kernels/conv.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Case {
  std::int64_t n, c, h, w;
  PoolGeometry g = {};
  Shape adaptive = {};  // output size of an adaptive pool
  std::int64_t out(std::int64_t in, int d) const {
    if (g.adaptive) return adaptive[d];
    return (in + 2 * g.padding[d] - g.kernel[d]) / g.stride[d] + 1;
  }
  std::int64_t in(int d) const { return d == 0 ? h : w; }
  /// First input and number of inputs of output p's window along dimension d, padding included.
  std::int64_t begin(std::int64_t p, int d) const {
    return g.adaptive ? p * in(d) / adaptive[d] : p * g.stride[d] - g.padding[d];
  }
  std::int64_t window(std::int64_t p, int d) const {
    if (!g.adaptive) return g.kernel[d];
    return ((p + 1) * in(d) + adaptive[d] - 1) / adaptive[d] - begin(p, d);
  }
  /// Elements that are added up at most.
  double terms() const {
    return static_cast<double>(g.adaptive ? h * w : g.kernel[0] * g.kernel[1]);
  }
  Shape x_sizes() const { return {n, c, h, w}; }
  Shape y_sizes() const { return {n, c, out(h, 0), out(w, 1)}; }
};

const Case kCases[] = {
    {1, 1, 2, 2},
    {2, 3, 8, 9},
    {3, 16, 28, 28},
    {2, 5, 7, 7, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}}},
    {2, 4, 6, 9, {.kernel = {3, 2}, .stride = {1, 1}, .padding = {1, 1}}},
    {2,
     4,
     6,
     9,
     {.kernel = {3, 2}, .stride = {1, 1}, .padding = {1, 1}, .count_include_pad = false}},
    {1, 33, 5, 5, {.kernel = {5, 5}, .stride = {1, 1}}},
    {0, 3, 4, 4},
    {2, 5, 7, 7, {.adaptive = true}, {1, 1}},
    {1, 8, 7, 9, {.adaptive = true}, {3, 4}},
    {2, 3, 3, 2, {.adaptive = true}, {5, 3}},
};

Shape channels_last(const Shape& s) { return {s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]}; }
Shape strides_of(bool last, const Shape& s) {
  return last ? channels_last(s) : contiguous_strides(s);
}

/// Calls f(output index, first of its window's input index, input index, h * W + w) for every
/// element of every window, row by row.
template <class F>
void for_each_element(const Case& k, F&& f) {
  const Shape y = k.y_sizes();
  std::size_t out = 0;
  for (std::int64_t plane = 0; plane < k.n * k.c; ++plane)
    for (std::int64_t p = 0; p < y[2]; ++p)
      for (std::int64_t q = 0; q < y[3]; ++q, ++out)
        for (std::int64_t r = 0; r < k.window(p, 0); ++r)
          for (std::int64_t s = 0; s < k.window(q, 1); ++s) {
            const std::int64_t i = k.begin(p, 0) + r;
            const std::int64_t j = k.begin(q, 1) + s;
            const bool inside = i >= 0 && i < k.h && j >= 0 && j < k.w;
            const bool padded =
                k.g.adaptive || (i < k.h + k.g.padding[0] && j < k.w + k.g.padding[1]);
            f(out, inside ? plane * k.h * k.w + i * k.w + j : -1, i * k.w + j, padded);
          }
}

struct MaxReference {
  Values y, index;
  MaxReference(const Case& k, const Values& x)
      : y(static_cast<std::size_t>(k.y_sizes().numel())), index(y.size(), -1) {
    for_each_element(k, [&](std::size_t out, std::int64_t at, std::int64_t position, bool) {
      if (at < 0) return;
      const double v = x[static_cast<std::size_t>(at)];
      const bool better = index[out] < 0 || v > y[out] || (std::isnan(v) && !std::isnan(y[out]));
      if (!better) return;
      y[out] = v;
      index[out] = static_cast<double>(position);
    });
  }
};

void run_max(Device d, Dtype dtype, const Case& k, bool last, const Values& x) {
  const MaxReference want(k, x);
  Buffer in(d, dtype, k.x_sizes(), strides_of(last, k.x_sizes()), x);
  Buffer y(d, dtype, k.y_sizes(), strides_of(last, k.y_sizes()));
  Buffer index(d, Dtype::i32, k.y_sizes(), strides_of(last, k.y_sizes()));
  max_pool2d_forward(Stream::current(d), y.view(), index.view(), in.view(), k.g);
  expect_same(y.get(), want.y);
  expect_same(index.get(), want.index);
  y.check_guards();
  index.check_guards();

  const Values dy = normals(dtype, k.y_sizes().numel(), 2);
  Values dx(x.size()), size(x.size());
  const std::int64_t in_plane = k.h * k.w, out_plane = k.y_sizes()[2] * k.y_sizes()[3];
  for (std::size_t i = 0; i < dy.size(); ++i) {
    const auto at = static_cast<std::size_t>(static_cast<std::int64_t>(i) / out_plane * in_plane +
                                             static_cast<std::int64_t>(want.index[i]));
    dx[at] += dy[i];
    size[at] += std::abs(dy[i]);
  }
  Buffer dy_buffer(d, dtype, k.y_sizes(), strides_of(last, k.y_sizes()), dy);
  Buffer out(d, dtype, k.x_sizes(), strides_of(last, k.x_sizes()));
  max_pool2d_backward(Stream::current(d), out.view(), dy_buffer.view(), index.view(), k.g);
  const double terms = k.terms();
  for (std::size_t i = 0; i < size.size(); ++i)
    size[i] = terms * compute_roundoff(dtype) * size[i] + unit_roundoff(dtype) * std::abs(dx[i]);
  expect_close(out.get(), dx, size);
  out.check_guards();
}

TEST(MaxPool2d, MatchesReference) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (const Case& k : kCases)
        for (const bool last : {false, true}) {
          SCOPED_TRACE(mixtape::detail::concat(dtype, " ", k.x_sizes(), " last ", last));
          run_max(d, dtype, k, last, normals(dtype, k.x_sizes().numel(), 1));
        }
  });
}

TEST(MaxPool2d, TiesTakeTheFirstAndNanWins) {
  on_each_device([](Device d) {
    const Case k{1, 2, 4, 4, {.kernel = {3, 3}, .stride = {1, 1}}};
    for (const bool last : {false, true}) {
      Values x(32, 1.0);
      run_max(d, Dtype::f32, k, last, x);
      x[5] = kNaN;
      x[10] = kNaN;
      run_max(d, Dtype::f32, k, last, x);
      run_max(d, Dtype::f32, k, last, Values(32, -kInfinity));
      run_max(d, Dtype::f32, k, last, Values(32, kNaN));
    }
  });
}

void run_average(Device d, Dtype dtype, const Case& k, bool last) {
  const Values x = normals(dtype, k.x_sizes().numel(), 1);
  const Values dy = normals(dtype, k.y_sizes().numel(), 2);
  Values y(dy.size()), y_size(dy.size()), count(dy.size()), dx(x.size()), dx_size(x.size());
  for_each_element(k, [&](std::size_t out, std::int64_t at, std::int64_t, bool padded) {
    if (at >= 0) y[out] += x[static_cast<std::size_t>(at)];
    if (at >= 0) y_size[out] += std::abs(x[static_cast<std::size_t>(at)]);
    if (at >= 0 || (k.g.count_include_pad && padded)) ++count[out];
  });
  for_each_element(k, [&](std::size_t out, std::int64_t at, std::int64_t, bool) {
    if (at < 0) return;
    dx[static_cast<std::size_t>(at)] += dy[out] / count[out];
    dx_size[static_cast<std::size_t>(at)] += std::abs(dy[out] / count[out]);
  });
  const double u = compute_roundoff(dtype) * (k.terms() + 4);
  const double tiny = dtype == Dtype::f16 ? 0x1p-25 : 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] /= count[i];
    y_size[i] = u * y_size[i] / count[i] + unit_roundoff(dtype) * std::abs(y[i]) + tiny;
  }
  for (std::size_t i = 0; i < dx.size(); ++i)
    dx_size[i] = u * dx_size[i] + unit_roundoff(dtype) * std::abs(dx[i]) + tiny;

  Buffer in(d, dtype, k.x_sizes(), strides_of(last, k.x_sizes()), x);
  Buffer out(d, dtype, k.y_sizes(), strides_of(last, k.y_sizes()));
  avg_pool2d_forward(Stream::current(d), out.view(), in.view(), k.g);
  expect_close(out.get(), y, y_size);
  out.check_guards();
  Buffer dy_buffer(d, dtype, k.y_sizes(), strides_of(last, k.y_sizes()), dy);
  Buffer dx_buffer(d, dtype, k.x_sizes(), strides_of(last, k.x_sizes()));
  avg_pool2d_backward(Stream::current(d), dx_buffer.view(), dy_buffer.view(), k.g);
  expect_close(dx_buffer.get(), dx, dx_size);
  dx_buffer.check_guards();
}

TEST(AvgPool2d, MatchesReference) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (const Case& k : kCases)
        for (const bool last : {false, true}) {
          SCOPED_TRACE(mixtape::detail::concat(dtype, " ", k.x_sizes(), " last ", last));
          run_average(d, dtype, k, last);
        }
  });
}

TEST(Pool2d, RunsAndThreadCountsAreBitEqual) {
  const int threads = num_threads();
  on_each_device([](Device d) {
    const Case k{3, 7, 12, 12, {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}}};
    const Values x = normals(Dtype::f32, k.x_sizes().numel(), 1);
    const Values dy = normals(Dtype::f32, k.y_sizes().numel(), 2);
    Values first_max, first_average;
    for (int n : {1, 2, 3, 3}) {
      set_num_threads(n);
      Buffer in(d, Dtype::f32, k.x_sizes(), x), g(d, Dtype::f32, k.y_sizes(), dy);
      Buffer y(d, Dtype::f32, k.y_sizes()), index(d, Dtype::i32, k.y_sizes());
      Buffer dx(d, Dtype::f32, k.x_sizes()), da(d, Dtype::f32, k.x_sizes());
      const Stream stream = Stream::current(d);
      max_pool2d_forward(stream, y.view(), index.view(), in.view(), k.g);
      max_pool2d_backward(stream, dx.view(), g.view(), index.view(), k.g);
      avg_pool2d_backward(stream, da.view(), g.view(), k.g);
      if (first_max.empty()) {
        first_max = dx.get();
        first_average = da.get();
      }
      expect_same(dx.get(), first_max);
      expect_same(da.get(), first_average);
    }
  });
  set_num_threads(threads);
}

TEST(Pool2d, RefusesWhatDoesNotFit) {
  const Device d = Device::cpu();
  Buffer x(d, Dtype::f32, {1, 2, 4, 4}), y(d, Dtype::f32, {1, 2, 2, 2});
  Buffer index(d, Dtype::i32, {1, 2, 2, 2}), wrong(d, Dtype::i64, {1, 2, 2, 2});
  const Stream stream;
  EXPECT_THROW(max_pool2d_forward(stream, y.view(), wrong.view(), x.view(), {}), Error);
  PoolGeometry padded;
  padded.padding[0] = 2;
  EXPECT_THROW(max_pool2d_forward(stream, y.view(), index.view(), x.view(), padded), Error);
  PoolGeometry far;
  far.stride[0] = 5;
  EXPECT_THROW(avg_pool2d_forward(stream, y.view(), x.view(), far), Error);
}

}  // namespace
}  // namespace mixtape::testing
