// SwiGLU against float64: aligned rows, rows and addresses that no vector fits, and the ends of the
// range.
#include "kernels/swiglu.h"

#include "tests/kernels/numbers.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Rows {
  std::int64_t n, h;
};
const Rows kRows[] = {{0, 8}, {3, 0}, {1, 1}, {5, 7}, {3, 16}, {33, 100}, {300, 257}, {7, 1024}};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// 16-bit results come from a short exponential: 2^-20 more.
double relative_error(Dtype dtype) {
  return unit_roundoff(dtype) + (size_of(dtype) == 2 ? 0x1p-18 : 16 * compute_roundoff(dtype));
}

/// The view of a (n, c) matrix that starts `shift` elements into the buffer.
View rows_at(const Buffer& buffer, std::int64_t shift, std::int64_t n, std::int64_t c) {
  View v = buffer.view();
  v.data = static_cast<char*>(v.data) + shift * static_cast<std::int64_t>(size_of(v.dtype));
  v.sizes = {n, c};
  v.strides = {c, 1};
  return v;
}

void run(Device d, Dtype dtype, const Rows& r, std::int64_t shift) {
  const std::int64_t whole = 2 * r.n * r.h, half = r.n * r.h;
  const Values x = normals(dtype, shift + whole, 1, 3), dy = normals(dtype, shift + half, 2);
  Values y(dy.size()), dx(x.size()), y_size(dy.size()), dx_size(x.size());
  for (std::int64_t i = 0; i < half; ++i) {
    const auto k = static_cast<std::size_t>(shift + i);
    const auto g = static_cast<std::size_t>(shift + i / r.h * 2 * r.h + i % r.h);
    const auto u = g + static_cast<std::size_t>(r.h);
    const double s = sigmoid(x[g]), silu = x[g] * s;
    y[k] = silu * x[u];
    dx[g] = dy[k] * x[u] * s * (1 + x[g] * (1 - s));
    dx[u] = dy[k] * silu;
    y_size[k] = std::abs(y[k]);
    // 1 - s loses what s is close to 1.
    dx_size[g] = std::abs(dy[k] * x[u]) * s * (1 + std::abs(x[g]));
    dx_size[u] = std::abs(dx[u]);
  }
  Buffer in(d, dtype, {shift + whole}, x), g(d, dtype, {shift + half}, dy);
  Buffer out(d, dtype, {shift + half}), grad(d, dtype, {shift + whole});
  const Stream stream = Stream::current(d);
  swiglu_forward(stream, rows_at(out, shift, r.n, r.h), rows_at(in, shift, r.n, 2 * r.h));
  swiglu_backward(stream, rows_at(grad, shift, r.n, 2 * r.h), rows_at(g, shift, r.n, r.h),
                  rows_at(in, shift, r.n, 2 * r.h));
  const auto compare = [&](Buffer& buffer, Values& want, Values& size) {
    Values got = buffer.get();
    for (double& v : size) v = v * relative_error(dtype) + (dtype == Dtype::f16 ? 0x1p-24 : 1e-37);
    const auto skip = static_cast<std::ptrdiff_t>(shift);
    for (Values* v : {&got, &want, &size}) v->erase(v->begin(), v->begin() + skip);
    expect_close(got, want, size);
    buffer.check_guards();
  };
  compare(out, y, y_size);
  compare(grad, dx, dx_size);
}

TEST(SwiGlu, MatchesFloat64) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Rows& r : kRows) {
        for (const std::int64_t shift : {0, 1}) {
          SCOPED_TRACE(::testing::Message()
                       << name_of(dtype) << " " << r.n << "x" << r.h << " shifted by " << shift);
          run(d, dtype, r, shift);
        }
      }
    }
  });
}

TEST(SwiGlu, EndsOfTheRange) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      SCOPED_TRACE(name_of(dtype));
      // gate 200: silu is the identity; -200: 0; 0: half of it.
      Buffer in(d, dtype, {1, 8}, Values{200, -200, 0, kNaN, 2, 2, 2, 2}), out(d, dtype, {1, 4});
      Buffer g(d, dtype, {1, 4}, Values{1, 1, 1, 1}), grad(d, dtype, {1, 8});
      const Stream stream = Stream::current(d);
      swiglu_forward(stream, out.view(), in.view());
      swiglu_backward(stream, grad.view(), g.view(), in.view());
      expect_close(out.get(), {400, 0, 0, kNaN}, 1e-30, 0);
      expect_close(grad.get(), {2, 0, 1, kNaN, 200, 0, 0, kNaN}, 1e-30, 0);
    }
  });
}

TEST(SwiGlu, RefusesOtherShapes) {
  const Device d = Device::cpu();
  Buffer in(d, Dtype::f32, {2, 6}), out(d, Dtype::f32, {2, 4});
  expect_error([&] { swiglu_forward(Stream::current(d), out.view(), in.view()); },
               "expected shapes (N, H) and (N, 2H)");
}

}  // namespace
}  // namespace mixtape::testing
