// Memory for kernel tests: a strided view with guard bands on either side, filled from and read
// back as float64, on any device. Output buffers start poisoned (NaN or 0xA5 bytes), so that
// an element the kernel forgot to write shows; check_guards() fails if a kernel wrote outside.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "engine/allocator.h"
#include "engine/transfer.h"
#include "engine/view.h"
#include "tests/support/devices.h"

namespace mixtape::testing {

class Buffer {
 public:
  /// Poisoned, contiguous unless strides are given (in elements, none negative).
  Buffer(Device device, Dtype dtype, const Shape& sizes, const Shape& strides)
      : device_(device), dtype_(dtype), sizes_(sizes), strides_(strides) {
    std::int64_t last = 0;
    for (int i = 0; i < sizes.size(); ++i) last += sizes[i] > 0 ? (sizes[i] - 1) * strides[i] : 0;
    elements_ = sizes.numel() == 0 ? 0 : last + 1;
    bytes_.assign(static_cast<std::size_t>(elements_) * size_of(dtype) + 2 * kGuard, kGuardByte);
    std::memset(bytes_.data() + kGuard, is_floating(dtype) ? 0xFF : 0x01,
                bytes_.size() - 2 * kGuard);
    block_ = allocator_of(device_).allocate(bytes_.size(), Stream::current(device_));
    upload();
  }
  Buffer(Device device, Dtype dtype, const Shape& sizes)
      : Buffer(device, dtype, sizes, contiguous_strides(sizes)) {}
  /// Filled with `values` in row-major order of `sizes`, rounded to dtype.
  Buffer(Device device, Dtype dtype, const Shape& sizes, const Shape& strides,
         const std::vector<double>& values)
      : Buffer(device, dtype, sizes, strides) {
    set(values);
  }
  Buffer(Device device, Dtype dtype, const Shape& sizes, const std::vector<double>& values)
      : Buffer(device, dtype, sizes, contiguous_strides(sizes), values) {}
  ~Buffer() { allocator_of(device_).release(block_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  View view() const {
    View v;
    v.data = static_cast<char*>(block_.data) + kGuard;
    v.sizes = sizes_;
    v.strides = strides_;
    v.dtype = dtype_;
    v.device = device_;
    v.defined = true;
    return v;
  }

  void set(const std::vector<double>& values) {
    std::size_t k = 0;
    for_each_offset([&](std::int64_t offset) {
      dispatch_dtype(dtype_, [&](auto tag) {
        using T = typename decltype(tag)::type;
        T value;
        if constexpr (sizeof(T) == 2)
          value = T(static_cast<float>(values[k]));
        else
          value = static_cast<T>(values[k]);
        std::memcpy(bytes_.data() + kGuard + static_cast<std::size_t>(offset) * sizeof(T), &value,
                    sizeof(T));
      });
      ++k;
    });
    upload();
  }

  /// The elements in row-major order, after waiting for the device.
  std::vector<double> get() {
    download();
    std::vector<double> values;
    for_each_offset([&](std::int64_t offset) {
      dispatch_dtype(dtype_, [&](auto tag) {
        using T = typename decltype(tag)::type;
        T value;
        std::memcpy(&value, bytes_.data() + kGuard + static_cast<std::size_t>(offset) * sizeof(T),
                    sizeof(T));
        if constexpr (sizeof(T) == 2)
          values.push_back(static_cast<float>(value));
        else
          values.push_back(static_cast<double>(value));
      });
    });
    return values;
  }

  void check_guards() {
    download();
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(bytes_[i], kGuardByte) << "written " << kGuard - i << " bytes before the buffer";
      ASSERT_EQ(bytes_[bytes_.size() - 1 - i], kGuardByte) << "written past the end of the buffer";
    }
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr unsigned char kGuardByte = 0xA5;

  template <class F>
  void for_each_offset(F&& f) const {
    const std::int64_t n = sizes_.numel();
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t rest = i, offset = 0;
      for (int d = sizes_.size() - 1; d >= 0; --d) {
        offset += rest % sizes_[d] * strides_[d];
        rest /= sizes_[d];
      }
      f(offset);
    }
  }
  void upload() {
    const Stream stream = Stream::current(device_);
    copy_bytes(block_.data, device_, bytes_.data(), Device::cpu(), bytes_.size(), stream);
    stream.synchronize();
  }
  void download() {
    const Stream stream = Stream::current(device_);
    copy_bytes(bytes_.data(), Device::cpu(), block_.data, device_, bytes_.size(), stream);
    stream.synchronize();
  }

  Device device_;
  Dtype dtype_;
  Shape sizes_, strides_;
  std::int64_t elements_ = 0;
  std::vector<unsigned char> bytes_;
  Block block_;
};

}  // namespace mixtape::testing
