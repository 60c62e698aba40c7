// Shapes and strides: up to kMaxDims int64 values held inline, so that no op allocates for them.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <span>

#include "engine/check.h"

namespace mixtape {

inline constexpr int kMaxDims = 8;

/// A fixed-capacity list of int64: sizes, strides, dimension lists. Prints as (2, 3, 4).
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> values) : Shape(std::span(values)) {}
  explicit Shape(std::span<const std::int64_t> values) {
    MT_CHECK(values.size() <= static_cast<std::size_t>(kMaxDims), "Shape: expected at most ",
             kMaxDims, " dimensions, got ", values.size());
    std::copy(values.begin(), values.end(), values_.begin());
    size_ = static_cast<int>(values.size());
  }
  static Shape filled(int count, std::int64_t value) {
    Shape s;
    for (int i = 0; i < count; ++i) s.push_back(value);
    return s;
  }

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t operator[](int i) const { return values_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return values_[static_cast<std::size_t>(i)]; }
  std::int64_t back() const { return (*this)[size_ - 1]; }
  std::int64_t& back() { return (*this)[size_ - 1]; }
  const std::int64_t* data() const { return values_.data(); }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  std::int64_t* begin() { return values_.data(); }
  std::int64_t* end() { return values_.data() + size_; }

  void push_back(std::int64_t v) {
    MT_CHECK(size_ < kMaxDims, "Shape: expected at most ", kMaxDims, " dimensions, got more");
    values_[static_cast<std::size_t>(size_++)] = v;
  }
  void erase(int i) {
    std::copy(begin() + i + 1, end(), begin() + i);
    --size_;
  }
  void insert(int i, std::int64_t v) {
    push_back(v);
    std::copy_backward(begin() + i, end() - 1, end());
    (*this)[i] = v;
  }

  /// Product of all values; 1 for no dimensions. Throws if it passes 2^63 - 1.
  std::int64_t numel() const;

  friend bool operator==(const Shape& a, const Shape& b) {
    return a.size_ == b.size_ && std::equal(a.begin(), a.end(), b.begin());
  }

 private:
  std::array<std::int64_t, kMaxDims> values_{};
  int size_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Shape& s);

/// Row-major strides, in elements.
Shape contiguous_strides(const Shape& sizes);

/// The common shape of a and b by NumPy's rule; throws "op: shapes (..) and (..) do not broadcast".
Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b);

/// Maps dim in [-ndim, ndim) to [0, ndim); throws "op: expected a dimension in [..], got ..".
/// A 0-d tensor accepts 0 and -1.
int normalize_dim(const char* op, std::int64_t dim, int ndim);

/// Sizes and strides of the same elements in row-major reading order as `sizes`, or an empty
/// optional-like false when no strides can express `target` without a copy.
bool reshape_strides(const Shape& sizes, const Shape& strides, const Shape& target, Shape& out);

}  // namespace mixtape
