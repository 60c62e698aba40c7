// Plain structs and arrays on a device, for kernels that take raw pointers (optimizer tables,
// scalars, workspaces). Arrays of floating types are better held by Buffer, which guards its ends.
#pragma once

#include <utility>
#include <vector>

#include "kernels/kernel.h"
#include "tests/kernels/buffer.h"

namespace mixtape::testing {

template <class T>
class DeviceArray {
 public:
  DeviceArray(Device device, const std::vector<T>& values) : device_(device), n_(values.size()) {
    block_ = allocator_of(device_).allocate(n_ * sizeof(T), Stream::current(device_));
    set(values);
  }
  ~DeviceArray() { allocator_of(device_).release(block_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return static_cast<T*>(block_.data); }
  void set(const std::vector<T>& values) { copy(data(), device_, values.data(), Device::cpu()); }
  std::vector<T> get() const {
    std::vector<T> values(n_);
    copy(values.data(), Device::cpu(), data(), device_);
    return values;
  }
  T value() const { return get().at(0); }

 private:
  void copy(T* dst, Device dst_device, const T* src, Device src_device) const {
    const Stream stream = Stream::current(device_);
    if (n_ > 0) copy_bytes(dst, dst_device, src, src_device, n_ * sizeof(T), stream);
    stream.synchronize();
  }
  Device device_;
  std::size_t n_;
  Block block_;
};

/// Scratch for one kernel call, poisoned with NaN bytes.
class TestWorkspace {
 public:
  TestWorkspace(Device device, std::size_t bytes)
      : bytes_(bytes), data_(device, std::vector<unsigned char>(bytes, 0xFF)) {}
  operator Workspace() const {  // NOLINT(google-explicit-constructor)
    return {data_.data(), bytes_};
  }

 private:
  std::size_t bytes_;
  DeviceArray<unsigned char> data_;
};

}  // namespace mixtape::testing
