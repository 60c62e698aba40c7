// Shapes, strides and views. reshape_strides is checked against the definition: the new strides
// must visit the same offsets in the same order, and it may only refuse where no strides do.
#include "engine/shape.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <vector>

#include "engine/view.h"

namespace mixtape {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

template <class T>
std::string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// Offsets of all elements in row-major order.
std::vector<std::int64_t> offsets(const Shape& sizes, const Shape& strides) {
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < sizes.numel(); ++i) {
    std::int64_t rest = i, offset = 0;
    for (int d = sizes.size() - 1; d >= 0; --d) {
      offset += rest % sizes[d] * strides[d];
      rest /= sizes[d];
    }
    all.push_back(offset);
  }
  return all;
}

// Strides for `target` that visit `expected`, found from the definition: dimension d's stride is
// the step from index 0 to 1 in it. Dimensions of size 1 get 0.
bool strides_exist(const Shape& target, const std::vector<std::int64_t>& expected) {
  Shape strides = Shape::filled(target.size(), 0);
  std::int64_t step = 1;
  for (int d = target.size() - 1; d >= 0; --d) {
    if (target[d] > 1) strides[d] = expected[static_cast<std::size_t>(step)] - expected[0];
    step *= target[d];
  }
  return offsets(target, strides) == expected;
}

std::vector<Shape> factorizations(std::int64_t n, int max_dims) {
  std::vector<Shape> all;
  if (n == 1) all.push_back({});
  if (max_dims == 0) return all;
  for (std::int64_t first = 1; first <= n; ++first) {
    if (n % first != 0) continue;
    for (const Shape& rest : factorizations(n / first, max_dims - 1)) {
      Shape s = rest;
      s.insert(0, first);
      all.push_back(s);
    }
  }
  return all;
}

TEST(Shape, HoldsPrintsAndCompares) {
  Shape s{2, 3, 4};
  EXPECT_EQ(text(s), "(2, 3, 4)");
  EXPECT_EQ(text(Shape{}), "()");
  EXPECT_EQ(text(Shape{5}), "(5,)");
  s.insert(1, 7);
  EXPECT_EQ(s, (Shape{2, 7, 3, 4}));
  s.erase(0);
  EXPECT_EQ(s, (Shape{7, 3, 4}));
  EXPECT_FALSE(s == (Shape{7, 3}));
  EXPECT_THROW((Shape{1, 2, 3, 4, 5, 6, 7, 8, 9}), Error);
  Shape full = Shape::filled(kMaxDims, 1);
  EXPECT_THROW(full.push_back(1), Error);
}

TEST(Shape, NumelRefusesOverflow) {
  EXPECT_EQ(Shape{}.numel(), 1);
  EXPECT_EQ((Shape{2, 3, 4}).numel(), 24);
  EXPECT_EQ((Shape{65536, 32769}).numel(), std::int64_t{65536} * 32769);
  EXPECT_EQ((Shape{kMax}).numel(), kMax);
  EXPECT_EQ((Shape{kMax, 0, kMax}).numel(), 0);
  EXPECT_THROW((Shape{kMax, 2}).numel(), Error);
  EXPECT_THROW((Shape{std::int64_t{1} << 32, std::int64_t{1} << 31}).numel(), Error);
}

TEST(Shape, ContiguousStrides) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Shape{12, 4, 1}));
  EXPECT_EQ(contiguous_strides({}), Shape{});
  EXPECT_EQ(contiguous_strides({2, 0, 4}), (Shape{4, 4, 1}));  // as torch.empty(2, 0, 4).stride()
  EXPECT_THROW(contiguous_strides({0, kMax, 3}), Error);
}

TEST(Shape, Broadcast) {
  EXPECT_EQ(broadcast_shapes("add", {3, 1}, {4}), (Shape{3, 4}));
  EXPECT_EQ(broadcast_shapes("add", {4}, {3, 1}), (Shape{3, 4}));
  EXPECT_EQ(broadcast_shapes("add", {}, {2, 2}), (Shape{2, 2}));
  EXPECT_EQ(broadcast_shapes("add", {0}, {1}), Shape{0});
  EXPECT_EQ(broadcast_shapes("add", {1, 0}, {5, 1}), (Shape{5, 0}));
  EXPECT_THROW(broadcast_shapes("add", {0}, {2}), Error);
  try {
    broadcast_shapes("add", {2, 3}, {2, 4});
    FAIL() << "(2, 3) and (2, 4) broadcast";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("add: shapes (2, 3) and (2, 4) do not broadcast"),
              std::string::npos)
        << error.what();
  }
}

TEST(Shape, NormalizeDim) {
  EXPECT_EQ(normalize_dim("sum", -1, 3), 2);
  EXPECT_EQ(normalize_dim("sum", -3, 3), 0);
  EXPECT_EQ(normalize_dim("sum", 2, 3), 2);
  EXPECT_EQ(normalize_dim("sum", 0, 0), 0);
  EXPECT_EQ(normalize_dim("sum", -1, 0), 0);
  for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{-4}, kMax})
    EXPECT_THROW(normalize_dim("sum", bad, 3), Error) << bad;
  EXPECT_THROW(normalize_dim("sum", 1, 0), Error);
}

TEST(Shape, ReshapeStridesVisitTheSameElements) {
  struct Case {
    Shape sizes, strides;
  };
  const std::vector<Case> sources = {
      {{2, 3, 4}, {12, 4, 1}},    // contiguous
      {{2, 3, 4}, {1, 2, 6}},     // fully transposed
      {{2, 3, 4}, {12, 1, 3}},    // inner two transposed
      {{3, 2, 4}, {4, 12, 1}},    // outer two transposed
      {{2, 3, 4}, {24, 8, 2}},    // every second element
      {{2, 3, 4}, {48, 8, 1}},    // rows of a wider matrix
      {{2, 3, 4}, {0, 4, 1}},     // expanded first dimension
      {{2, 3, 4}, {4, 0, 1}},     // expanded middle dimension
      {{2, 3, 4}, {3, 1, 0}},     // expanded last dimension
      {{2, 3, 4}, {0, 0, 0}},     // one element
      {{1, 24, 1}, {7, 1, 100}},  // sizes of 1 with any stride
      {{24}, {5}},
      {{2, 1, 12}, {12, 99, 1}},
  };
  int accepted = 0, refused = 0;
  for (const Case& c : sources) {
    const auto expected = offsets(c.sizes, c.strides);
    for (const Shape& target : factorizations(24, 4)) {
      Shape out;
      const bool ok = reshape_strides(c.sizes, c.strides, target, out);
      const std::string name =
          text(c.sizes) + " strides " + text(c.strides) + " to " + text(target);
      EXPECT_EQ(ok, strides_exist(target, expected)) << name;
      if (ok) {
        EXPECT_EQ(offsets(target, out), expected) << name << " gave " << text(out);
      }
      ++(ok ? accepted : refused);
    }
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 100);
}

TEST(Shape, ReshapeStridesOfScalarsAndEmptyShapes) {
  Shape out;
  ASSERT_TRUE(reshape_strides({}, {}, {1, 1}, out));
  EXPECT_EQ(out, (Shape{1, 1}));
  ASSERT_TRUE(reshape_strides({1, 1}, {5, 5}, {}, out));
  EXPECT_EQ(out, Shape{});
  ASSERT_TRUE(reshape_strides({2, 0, 3}, {1, 9, 9}, {0, 7}, out));
  EXPECT_EQ(out, (Shape{7, 1}));
  EXPECT_THROW(reshape_strides({2, 3}, {3, 1}, {7}, out), Error);
  Shape strides{3, 1};  // the result may replace the source
  ASSERT_TRUE(reshape_strides({2, 3}, strides, {3, 2}, strides));
  EXPECT_EQ(strides, (Shape{2, 1}));
}

View view_of(const Shape& sizes, const Shape& strides) {
  View v;
  v.sizes = sizes;
  v.strides = strides;
  v.defined = true;
  return v;
}

TEST(View, Contiguous) {
  EXPECT_TRUE(view_of({2, 3}, {3, 1}).contiguous());
  EXPECT_TRUE(view_of({2, 1, 3}, {3, 77, 1}).contiguous());
  EXPECT_TRUE(view_of({}, {}).contiguous());
  EXPECT_TRUE(view_of({kMax, 0, kMax}, {9, 9, 9}).contiguous());
  EXPECT_FALSE(view_of({2, 3}, {1, 2}).contiguous());
  EXPECT_FALSE(view_of({2, 3}, {4, 1}).contiguous());
  EXPECT_FALSE(view_of({2, 3}, {0, 1}).contiguous());
  EXPECT_FALSE(view_of({3}, {2}).contiguous());
}

TEST(View, ExpandTo) {
  const View v = view_of({3, 1}, {1, 1}).expand_to({2, 3, 4});
  EXPECT_EQ(v.sizes, (Shape{2, 3, 4}));
  EXPECT_EQ(v.strides, (Shape{0, 1, 0}));
  EXPECT_EQ(view_of({}, {}).expand_to({2}).strides, Shape{0});
  EXPECT_EQ(view_of({1}, {1}).expand_to({0}).sizes, Shape{0});
  EXPECT_THROW(view_of({3}, {1}).expand_to({2}), Error);
  EXPECT_THROW(view_of({2, 3}, {3, 1}).expand_to({3}), Error);
}

}  // namespace
}  // namespace mixtape
