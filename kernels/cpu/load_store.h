// Runs of elements between storage types and the three compute types (float, double, int64).
//
// Kernels whose formula is compiled once per compute type, whatever the operands' dtypes, read and
// write through these functions, a block at a time. Conversions are those of the contract in
// kernels/elementwise.h: rounding to nearest even (double and integers reach a 16-bit type through
// float), float to integer truncates (out of range saturates, NaN gives 0), anything to bool is
// x != 0.
#pragma once

#include <cstdint>

#include "engine/dtype.h"

namespace mixtape::kernels::cpu {

/// Reads n elements at src, `stride` elements apart (0 repeats one), into dst[0, n) of the compute
/// type.
using LoadFunction = void (*)(const void* src, std::int64_t stride, std::int64_t n, void* dst);
/// Writes src[0, n) of the compute type to dst, `stride` elements apart.
using StoreFunction = void (*)(const void* src, void* dst, std::int64_t stride, std::int64_t n);

/// `compute` is f32, f64 or i64.
LoadFunction load_function(Dtype storage, Dtype compute);
StoreFunction store_function(Dtype compute, Dtype storage);

/// The compute type for converting `from` to `to`: f64 if either is, f32 if either is floating,
/// else i64.
Dtype conversion_dtype(Dtype from, Dtype to);

/// Address of element `index` of an array of `dtype`.
inline const void* element(const void* base, Dtype dtype, std::int64_t index) {
  return static_cast<const char*>(base) + index * static_cast<std::int64_t>(size_of(dtype));
}
inline void* element(void* base, Dtype dtype, std::int64_t index) {
  return static_cast<char*>(base) + index * static_cast<std::int64_t>(size_of(dtype));
}

}  // namespace mixtape::kernels::cpu
