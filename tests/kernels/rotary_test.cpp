// Rotary position embedding against float64: layouts, positions, copied heads, large positions, and
// that turning back undoes it.
#include "kernels/rotary.h"

#include "tests/kernels/numbers.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Case {
  std::int64_t b, t, h, d;
  std::int64_t rotated;
};
const Case kCases[] = {{2, 5, 3, 8, 3},   {1, 3, 2, 6, 2},   {2, 9, 6, 64, 4},
                       {1, 4, 1, 2, 1},   {3, 2, 5, 128, 0}, {1, 70, 40, 32, 36},
                       {1, 2, 2, 512, 2}, {2, 0, 2, 8, 2},   {1, 300, 1, 16, 1}};

/// Places as float64, and the size of a rotated pair for tolerances.
struct Reference {
  Values y, size;
  Reference(const Values& x, const Case& c, const std::vector<std::int64_t>& positions, double base,
            bool inverse)
      : y(x), size(x.size()) {
    const std::int64_t half = c.d / 2;
    for (std::int64_t token = 0; token < c.b * c.t; ++token) {
      for (std::int64_t h = 0; h < c.rotated; ++h) {
        for (std::int64_t i = 0; i < half; ++i) {
          const double frequency =
              std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(c.d));
          const double angle =
              static_cast<double>(positions[static_cast<std::size_t>(token)]) * frequency;
          const auto low = static_cast<std::size_t>((token * c.h + h) * c.d + i);
          const auto high = low + static_cast<std::size_t>(half);
          const double cosine = std::cos(angle),
                       sine = inverse ? -std::sin(angle) : std::sin(angle);
          y[low] = x[low] * cosine - x[high] * sine;
          y[high] = x[high] * cosine + x[low] * sine;
          // The angle in float is off by its own rounding, the frequency's and the position's.
          size[low] = size[high] = std::hypot(x[low], x[high]) * (8 + 2 * std::abs(angle));
        }
      }
    }
  }
};

std::vector<std::int64_t> consecutive(const Case& c, std::int64_t offset) {
  std::vector<std::int64_t> positions;
  for (std::int64_t token = 0; token < c.b * c.t; ++token)
    positions.push_back(token % c.t + offset);
  return positions;
}

void expect_rotated(Buffer& out, const Reference& want, Dtype dtype) {
  Values bound(want.y.size());
  for (std::size_t i = 0; i < bound.size(); ++i)
    bound[i] = compute_roundoff(dtype) * want.size[i] +
               (want.size[i] == 0 ? 0 : unit_roundoff(dtype) * std::abs(want.y[i])) +
               (dtype == Dtype::f16 ? 0x1p-25 : 0);
  expect_close(out.get(), want.y, bound);
  out.check_guards();
}

TEST(Rotary, MatchesFloat64InEveryLayout) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (const Case& c : kCases) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << c.b << "x" << c.t << "x"
                                          << c.h << "x" << c.d << ", " << c.rotated << " heads");
        const Shape shape = {c.b, c.t, c.h, c.d};
        const Values x = normals(dtype, shape.numel(), 1);
        const Reference want(x, c, consecutive(c, 3), 10000, false);
        const Shape layouts[] = {
            contiguous_strides(shape),
            {3 * c.t * c.h * c.d, 3 * c.h * c.d, c.d, 1},  // queries in a packed projection
            {c.t * c.h * c.d, c.d, c.t * c.d, 1},          // (B, H, T, D) in memory
            {c.t * c.h * (c.d + 1), c.h * (c.d + 1), c.d + 1, 1}};  // no vector fits
        for (const Shape& strides : layouts) {
          Buffer in(d, dtype, shape, strides, x), out(d, dtype, shape);
          rotary_embedding(
              Stream::current(d),
              {.y = out.view(), .x = in.view(), .offset = 3, .rotated_heads = c.rotated});
          expect_rotated(out, want, dtype);
        }
      }
    }
  });
}

TEST(Rotary, TakesPositions) {
  on_each_device([](Device d) {
    const Case c{2, 4, 2, 16, 2};
    const Shape shape = {c.b, c.t, c.h, c.d};
    const Values x = normals(Dtype::f32, shape.numel(), 1), given = {5, 0, 9, 2, 7, 7, 1, 300};
    std::vector<std::int64_t> each, shared;
    for (std::size_t i = 0; i < given.size(); ++i) {
      each.push_back(static_cast<std::int64_t>(given[i]) - 2);
      shared.push_back(static_cast<std::int64_t>(given[i % 4]) - 2);
    }
    for (const Dtype index : {Dtype::i64, Dtype::i32}) {
      for (const bool per_batch : {true, false}) {
        Buffer in(d, Dtype::f32, shape, x), out(d, Dtype::f32, shape);
        Buffer positions(d, index, {c.b, c.t}, given);
        View p = positions.view();
        if (!per_batch) p.strides = {0, 1};
        rotary_embedding(Stream::current(d), {.y = out.view(),
                                              .x = in.view(),
                                              .positions = p,
                                              .offset = -2,
                                              .rotated_heads = c.h,
                                              .base = 500});
        expect_rotated(out, Reference(x, c, per_batch ? each : shared, 500, false), Dtype::f32);
      }
    }
  });
}

TEST(Rotary, LargePositionsKeepTheirAngles) {
  on_each_device([](Device d) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f64}) {
      const Case c{1, 3, 1, 64, 1};
      const Values x = normals(dtype, 3 * 64, 1);
      Buffer in(d, dtype, {1, 3, 1, 64}, x), out(d, dtype, {1, 3, 1, 64});
      rotary_embedding(Stream::current(d),
                       {.y = out.view(), .x = in.view(), .offset = 1000000, .rotated_heads = 1});
      expect_rotated(out, Reference(x, c, consecutive(c, 1000000), 10000, false), dtype);
    }
  });
}

TEST(Rotary, InverseTurnsBack) {
  on_each_device([](Device d) {
    const Case c{2, 6, 3, 32, 2};
    const Shape shape = {c.b, c.t, c.h, c.d};
    const Values x = normals(Dtype::f32, shape.numel(), 1);
    Buffer in(d, Dtype::f32, shape, x), turned(d, Dtype::f32, shape), back(d, Dtype::f32, shape);
    const Stream stream = Stream::current(d);
    rotary_embedding(stream, {.y = turned.view(), .x = in.view(), .rotated_heads = c.rotated});
    rotary_embedding(
        stream,
        {.y = back.view(), .x = turned.view(), .rotated_heads = c.rotated, .inverse = true});
    expect_close(back.get(), x, 8 * 0x1p-24 * 5, 0);
    Buffer inverse(d, Dtype::f32, shape);
    rotary_embedding(
        stream, {.y = inverse.view(), .x = in.view(), .rotated_heads = c.rotated, .inverse = true});
    expect_rotated(inverse, Reference(x, c, consecutive(c, 0), 10000, true), Dtype::f32);
  });
}

TEST(Rotary, RefusesWhatItCannotTurn) {
  const Device d = Device::cpu();
  Buffer odd(d, Dtype::f32, {1, 2, 1, 5}), odd_out(d, Dtype::f32, {1, 2, 1, 5});
  expect_error(
      [&] {
        rotary_embedding(Stream::current(d),
                         {.y = odd_out.view(), .x = odd.view(), .rotated_heads = 1});
      },
      "expected heads of an even number of elements up to 512, got 5");
  Buffer in(d, Dtype::f32, {1, 2, 1, 4}), out(d, Dtype::f32, {1, 2, 1, 4});
  expect_error(
      [&] {
        rotary_embedding(Stream::current(d), {.y = out.view(), .x = in.view(), .rotated_heads = 2});
      },
      "expected 0 to 1 heads to rotate, got 2");
}

}  // namespace
}  // namespace mixtape::testing
