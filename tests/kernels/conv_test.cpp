// Convolution against a direct float64 sum: geometry, groups, layouts, every storage type and pass.
#include "kernels/conv.h"

#include <algorithm>

#include "engine/thread_pool.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Case {
  std::int64_t n, c, h, w, o, r, s;
  ConvGeometry g = {};
  std::int64_t p() const { return size(h, r, 0); }
  std::int64_t q() const { return size(w, s, 1); }
  Shape x_sizes() const { return {n, c, h, w}; }
  Shape w_sizes() const { return {o, c / g.groups, r, s}; }
  Shape y_sizes() const { return {n, o, p(), q()}; }
  /// Terms of one element of y, of dx and of dw.
  std::int64_t forward_terms() const { return c / g.groups * r * s; }
  std::int64_t data_terms() const { return o / g.groups * r * s; }
  std::int64_t weight_terms() const { return n * p() * q(); }

 private:
  std::int64_t size(std::int64_t in, std::int64_t k, int d) const {
    return (in + 2 * g.padding[d] - g.dilation[d] * (k - 1) - 1) / g.stride[d] + 1;
  }
};

const Case kCases[] = {
    {1, 1, 3, 3, 1, 1, 1},
    {2, 3, 8, 9, 4, 3, 3, {.padding = {1, 1}}},
    {3, 1, 28, 28, 8, 5, 5, {.padding = {2, 2}}},
    {2, 16, 7, 7, 33, 3, 3, {.stride = {2, 2}, .padding = {1, 1}}},
    {2, 8, 11, 10, 8, 3, 2, {.stride = {2, 3}, .padding = {2, 1}, .dilation = {2, 1}}},
    {2, 8, 9, 9, 12, 3, 3, {.padding = {1, 1}, .groups = 4}},
    {2, 8, 6, 5, 8, 3, 3, {.padding = {1, 1}, .groups = 8}},
    {4, 32, 5, 6, 48, 1, 1},
    {1, 24, 10, 10, 40, 3, 3, {.padding = {1, 1}}},
    {2, 4, 9, 9, 6, 1, 1, {.stride = {2, 2}}},
    {1, 3, 70, 80, 5, 3, 3, {.padding = {1, 1}}},
    {2, 5, 4, 4, 7, 4, 4},
};

/// Calls f(n, o, p, q, c, r, s, i, j) for every product of the convolution.
template <class F>
void for_each_product(const Case& k, F&& f) {
  const std::int64_t cg = k.c / k.g.groups, og = k.o / k.g.groups;
  for (std::int64_t n = 0; n < k.n; ++n)
    for (std::int64_t o = 0; o < k.o; ++o)
      for (std::int64_t p = 0; p < k.p(); ++p)
        for (std::int64_t q = 0; q < k.q(); ++q)
          for (std::int64_t c = 0; c < cg; ++c)
            for (std::int64_t r = 0; r < k.r; ++r)
              for (std::int64_t s = 0; s < k.s; ++s) {
                const std::int64_t i = p * k.g.stride[0] - k.g.padding[0] + r * k.g.dilation[0];
                const std::int64_t j = q * k.g.stride[1] - k.g.padding[1] + s * k.g.dilation[1];
                if (i < 0 || i >= k.h || j < 0 || j >= k.w) continue;
                const std::int64_t x = ((n * k.c + o / og * cg + c) * k.h + i) * k.w + j;
                const std::int64_t w = ((o * cg + c) * k.r + r) * k.s + s;
                const std::int64_t y = ((n * k.o + o) * k.p() + p) * k.q() + q;
                f(static_cast<std::size_t>(x), static_cast<std::size_t>(w),
                  static_cast<std::size_t>(y));
              }
}

enum class Layout { planar, channels_last };

Shape strides_of(Layout layout, const Shape& sizes) {
  if (layout == Layout::planar) return contiguous_strides(sizes);
  return {sizes[1] * sizes[2] * sizes[3], 1, sizes[1] * sizes[3], sizes[1]};
}

/// Sums and the sums of their absolute terms.
struct Sums {
  Values value, size;
  explicit Sums(std::int64_t n) : value(static_cast<std::size_t>(n)), size(value) {}
  void add(std::size_t at, double term) {
    value[at] += term;
    size[at] += std::abs(term);
  }
};

/// terms + 4 roundings of the sum's terms, and one of the result.
Values bounds(const Sums& sums, std::int64_t terms, Dtype compute, Dtype store) {
  Values bound(sums.value.size());
  for (std::size_t i = 0; i < bound.size(); ++i)
    bound[i] = (static_cast<double>(terms) + 4) * compute_roundoff(compute) * sums.size[i] +
               unit_roundoff(store) * std::abs(sums.value[i]) + (store == Dtype::f16 ? 0x1p-25 : 0);
  return bound;
}

struct Operands {
  Values x, w, y;
  Buffer x_buffer, w_buffer, y_buffer;
  Conv2dArgs args;
  Operands(Device d, Dtype dtype, const Case& k, Layout x_layout, Layout w_layout, Layout y_layout)
      : x(normals(dtype, k.x_sizes().numel(), 1)),
        w(normals(dtype, k.w_sizes().numel(), 2)),
        y(normals(dtype, k.y_sizes().numel(), 3)),
        x_buffer(d, dtype, k.x_sizes(), strides_of(x_layout, k.x_sizes()), x),
        w_buffer(d, dtype, k.w_sizes(), strides_of(w_layout, k.w_sizes()), w),
        y_buffer(d, dtype, k.y_sizes(), strides_of(y_layout, k.y_sizes()), y) {
    args.x = x_buffer.view();
    args.w = w_buffer.view();
    args.y = y_buffer.view();
    args.geometry = k.g;
  }
};

struct Layouts {
  Layout x, w, y;
};
const Layouts kLayouts[] = {
    {Layout::planar, Layout::planar, Layout::planar},
    {Layout::channels_last, Layout::planar, Layout::channels_last},
    {Layout::channels_last, Layout::channels_last, Layout::channels_last},
};

void run_forward(Device d, Dtype dtype, const Case& k, const Layouts& l, bool bias, bool relu) {
  Operands t(d, dtype, k, l.x, l.w, l.y);
  Buffer out(d, dtype, k.y_sizes(), strides_of(l.y, k.y_sizes()));
  const Values b = normals(dtype, k.o, 4);
  Buffer bias_buffer(d, dtype, {k.o}, b);
  t.args.y = out.view();
  if (bias) t.args.bias = bias_buffer.view();
  if (relu) t.args.activation = Activation::relu;
  const Stream stream = Stream::current(d);
  const TestWorkspace workspace(d, conv2d_workspace_bytes(stream, ConvPass::forward, t.args));
  conv2d_forward(stream, t.args, workspace);
  Sums want(k.y_sizes().numel());
  for_each_product(
      k, [&](std::size_t x, std::size_t w, std::size_t y) { want.add(y, t.x[x] * t.w[w]); });
  const auto plane = static_cast<std::size_t>(k.p() * k.q());
  for (std::size_t i = 0; i < want.value.size(); ++i) {
    if (bias) want.add(i, b[i / plane % static_cast<std::size_t>(k.o)]);
    if (relu) want.value[i] = std::max(0.0, want.value[i]);
  }
  expect_close(out.get(), want.value, bounds(want, k.forward_terms() + 1, dtype, dtype));
  out.check_guards();
}

void run_backward(Device d, Dtype dtype, const Case& k, const Layouts& l) {
  Operands t(d, dtype, k, l.x, l.w, l.y);
  const Stream stream = Stream::current(d);
  Sums dx(k.x_sizes().numel()), dw(k.w_sizes().numel());
  for_each_product(k, [&](std::size_t x, std::size_t w, std::size_t y) {
    dx.add(x, t.y[y] * t.w[w]);
    dw.add(w, t.y[y] * t.x[x]);
  });
  {
    Buffer out(d, dtype, k.x_sizes(), strides_of(l.x, k.x_sizes()));
    Conv2dArgs args = t.args;
    args.x = out.view();
    const TestWorkspace workspace(d, conv2d_workspace_bytes(stream, ConvPass::backward_data, args));
    conv2d_backward_data(stream, args, workspace);
    expect_close(out.get(), dx.value, bounds(dx, k.data_terms(), dtype, dtype));
    out.check_guards();
  }
  for (Dtype store : {dtype, compute_dtype(dtype)}) {
    for (float beta : {0.0f, 1.0f, 0.5f}) {
      Buffer out(d, store, k.w_sizes(), strides_of(l.w, k.w_sizes()));
      const Values old = normals(store, k.w_sizes().numel(), 5);
      if (beta != 0) out.set(old);
      Conv2dArgs args = t.args;
      args.w = out.view();
      const TestWorkspace workspace(
          d, conv2d_workspace_bytes(stream, ConvPass::backward_weight, args));
      conv2d_backward_weight(stream, args, beta, workspace);
      Sums want = dw;
      if (beta != 0)
        for (std::size_t i = 0; i < old.size(); ++i) want.add(i, beta * old[i]);
      Values bound = bounds(want, k.weight_terms() + 1, dtype, store);
      if (d.is_cuda())  // cuDNN rounds the sum to the inputs' dtype before it is added in f32
        for (std::size_t i = 0; i < bound.size(); ++i)
          bound[i] +=
              unit_roundoff(dtype) * std::abs(dw.value[i]) + (dtype == Dtype::f16 ? 0x1p-25 : 0);
      expect_close(out.get(), want.value, bound);
      out.check_guards();
    }
    if (store == compute_dtype(dtype)) break;
  }
}

std::string describe(Dtype dtype, const Case& k, const Layouts& l) {
  return mixtape::detail::concat(dtype, " x ", k.x_sizes(), " w ", k.w_sizes(), " y ", k.y_sizes(),
                                 " layouts ", static_cast<int>(l.x), static_cast<int>(l.w),
                                 static_cast<int>(l.y));
}

TEST(Conv2d, ForwardMatchesDirectSum) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (const Case& k : kCases)
        for (const Layouts& l : kLayouts) {
          SCOPED_TRACE(describe(dtype, k, l));
          run_forward(d, dtype, k, l, false, false);
          run_forward(d, dtype, k, l, true, true);
          run_forward(d, dtype, k, l, true, false);
        }
  });
}

TEST(Conv2d, BackwardMatchesDirectSum) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (const Case& k : kCases)
        for (const Layouts& l : kLayouts) {
          SCOPED_TRACE(describe(dtype, k, l));
          run_backward(d, dtype, k, l);
        }
  });
}

TEST(Conv2d, BackwardBias) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes)
      for (Layout layout : {Layout::planar, Layout::channels_last})
        for (const Shape& sizes : {Shape{1, 1, 1, 1}, Shape{3, 5, 7, 6}, Shape{70, 33, 4, 4},
                                   Shape{2, 3, 60, 70}, Shape{0, 4, 3, 3}}) {
          SCOPED_TRACE(mixtape::detail::concat(dtype, " ", sizes));
          const Values dy = normals(dtype, sizes.numel(), 1);
          Buffer dy_buffer(d, dtype, sizes, strides_of(layout, sizes), dy);
          for (float beta : {0.0f, 1.0f}) {
            const Dtype store = compute_dtype(dtype);
            const Values old = normals(store, sizes[1], 2);
            Buffer db(d, store, {sizes[1]});
            if (beta != 0) db.set(old);
            const TestWorkspace workspace(d,
                                          conv2d_backward_bias_workspace_bytes(dy_buffer.view()));
            conv2d_backward_bias(Stream::current(d), db.view(), beta, dy_buffer.view(), workspace);
            Sums want(sizes[1]);
            const auto plane = static_cast<std::size_t>(sizes[2] * sizes[3]);
            for (std::size_t i = 0; i < dy.size(); ++i)
              want.add(i / plane % static_cast<std::size_t>(sizes[1]), dy[i]);
            if (beta != 0)
              for (std::size_t i = 0; i < old.size(); ++i) want.add(i, beta * old[i]);
            expect_close(db.get(), want.value,
                         bounds(want, sizes[0] * sizes[2] * sizes[3], dtype, store));
            db.check_guards();
          }
        }
  });
}

TEST(Conv2d, EmptyBatch) {
  on_each_device([](Device d) {
    const Case k{0, 3, 5, 5, 4, 3, 3};
    Operands t(d, Dtype::f32, k, Layout::planar, Layout::planar, Layout::planar);
    const Stream stream = Stream::current(d);
    conv2d_forward(stream, t.args, Workspace{});
    Buffer dw(d, Dtype::f32, k.w_sizes());
    t.args.w = dw.view();
    const TestWorkspace workspace(
        d, conv2d_workspace_bytes(stream, ConvPass::backward_weight, t.args));
    conv2d_backward_weight(stream, t.args, 0, workspace);
    expect_same(dw.get(), Values(static_cast<std::size_t>(k.w_sizes().numel()), 0.0));
  });
}

TEST(Conv2d, ReluKeepsNan) {
  on_each_device([](Device d) {
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const Case k{1, 16, 4, 4, 16, 1, 1};
      Operands t(d, dtype, k, Layout::planar, Layout::planar, Layout::planar);
      Values x(256, 1.0);
      x[5] = kNaN;
      t.x_buffer.set(x);
      t.args.activation = Activation::relu;
      const Stream stream = Stream::current(d);
      const TestWorkspace workspace(d, conv2d_workspace_bytes(stream, ConvPass::forward, t.args));
      conv2d_forward(stream, t.args, workspace);
      const Values y = t.y_buffer.get();
      for (std::size_t i = 0; i < y.size(); ++i)
        EXPECT_EQ(std::isnan(y[i]), i % 16 == 5) << "element " << i;
    }
  });
}

TEST(Conv2d, SlicedBatchIsReadInPlace) {
  // Every second image of a batch: a batch stride larger than an image.
  on_each_device([](Device d) {
    const Case k{3, 4, 6, 6, 8, 3, 3, {.padding = {1, 1}}};
    const Shape strides{2 * 4 * 36, 36, 6, 1};
    Operands t(d, Dtype::f32, k, Layout::planar, Layout::planar, Layout::planar);
    Buffer x(d, Dtype::f32, k.x_sizes(), strides, t.x);
    t.args.x = x.view();
    const Stream stream = Stream::current(d);
    const TestWorkspace workspace(d, conv2d_workspace_bytes(stream, ConvPass::forward, t.args));
    conv2d_forward(stream, t.args, workspace);
    Sums want(k.y_sizes().numel());
    for_each_product(
        k, [&](std::size_t i, std::size_t w, std::size_t y) { want.add(y, t.x[i] * t.w[w]); });
    expect_close(t.y_buffer.get(), want.value,
                 bounds(want, k.forward_terms(), Dtype::f32, Dtype::f32));
  });
}

TEST(Conv2d, AnyNumberOfThreadsAndTwoRunsBitEqual) {
  const int threads = num_threads();
  const Case k{5, 24, 9, 9, 40, 3, 3, {.padding = {1, 1}}};
  const Layouts l = kLayouts[0];
  for (int n : {1, 2, 3, 7}) {
    set_num_threads(n);
    run_forward(Device::cpu(), Dtype::f32, k, l, true, true);
    run_backward(Device::cpu(), Dtype::f32, k, l);
    run_backward(Device::cpu(), Dtype::bf16, k, kLayouts[1]);
    Values first;
    for (int i = 0; i < 2; ++i) {
      Operands t(Device::cpu(), Dtype::f32, k, l.x, l.w, l.y);
      const TestWorkspace workspace(
          Device::cpu(), conv2d_workspace_bytes(Stream(), ConvPass::backward_weight, t.args));
      conv2d_backward_weight(Stream(), t.args, 0, workspace);
      if (i == 0) first = t.w_buffer.get();
      expect_same(t.w_buffer.get(), first);
    }
  }
  set_num_threads(threads);
}

TEST(Conv2d, RefusesWhatDoesNotFit) {
  const Device d = Device::cpu();
  const Case k{2, 4, 6, 6, 8, 3, 3};
  const auto expect_error = [&](auto&& change) {
    Operands t(d, Dtype::f32, k, Layout::planar, Layout::planar, Layout::planar);
    change(t.args);
    EXPECT_THROW(conv2d_forward(Stream(), t.args, Workspace{}), Error);
  };
  expect_error([](Conv2dArgs& a) { a.geometry.groups = 3; });
  expect_error([](Conv2dArgs& a) { a.geometry.padding[0] = 1; });
  expect_error([](Conv2dArgs& a) { a.x.strides = Shape{144, 36, 1, 6}; });
  expect_error([](Conv2dArgs& a) { a.w.dtype = Dtype::f16; });
  expect_error([](Conv2dArgs& a) { a.geometry.stride[1] = 0; });
}

}  // namespace
}  // namespace mixtape::testing
