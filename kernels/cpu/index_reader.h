// Reading index tensors on the CPU: i64 or i32, any stride, checked against a bound.
#pragma once

#include <cstdint>

#include "engine/check.h"
#include "engine/view.h"

namespace mixtape::kernels::cpu {

class IndexReader {
 public:
  explicit IndexReader(const char* op, const View& index, std::int64_t bound)
      : op_(op), data_(index.data), bound_(bound), wide_(index.dtype == Dtype::i64) {
    MT_CHECK(wide_ || index.dtype == Dtype::i32, op, ": expected an index of int64 or int32, got ",
             index.dtype);
  }
  /// The index at `offset` elements; throws unless it is in [0, bound).
  std::int64_t at(std::int64_t offset) const {
    const std::int64_t i = wide_ ? static_cast<const std::int64_t*>(data_)[offset]
                                 : static_cast<const std::int32_t*>(data_)[offset];
    if (static_cast<std::uint64_t>(i) >= static_cast<std::uint64_t>(bound_)) [[unlikely]]
      out_of_range(i);
    return i;
  }

 private:
  [[noreturn]] void out_of_range(std::int64_t i) const {
    MT_THROW(op_, ": expected an index in [0, ", bound_, "), got ", i);
  }

  const char* op_;
  const void* data_;
  std::int64_t bound_;
  bool wide_;
};

}  // namespace mixtape::kernels::cpu
