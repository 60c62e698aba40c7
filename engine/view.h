// What a kernel sees of a tensor: pointer, dtype, sizes, strides. No ownership, no gradient.
#pragma once

#include <cstdint>

#include "engine/device.h"
#include "engine/dtype.h"
#include "engine/shape.h"

namespace mixtape {

/// A strided view of device memory. `data` already includes the storage offset. Strides are in
/// elements and may be 0 (broadcast) but not negative. A default View (`!view`) stands for an
/// optional operand that is absent.
struct View {
  void* data = nullptr;
  Shape sizes;
  Shape strides;
  Dtype dtype = Dtype::f32;
  Device device;
  bool defined = false;

  explicit operator bool() const { return defined; }
  int dim() const { return sizes.size(); }
  std::int64_t size(int i) const { return sizes[i < 0 ? i + sizes.size() : i]; }
  std::int64_t stride(int i) const { return strides[i < 0 ? i + strides.size() : i]; }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (std::int64_t s : sizes) n *= s;
    return n;
  }
  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
  /// Row-major without gaps; sizes of 1 do not matter, an empty view is contiguous.
  bool contiguous() const;
  /// This view with sizes `shape`, broadcast dimensions getting stride 0; `shape` must be a valid
  /// broadcast of sizes.
  View expand_to(const Shape& shape) const;
};

}  // namespace mixtape
