// What layer and root-mean-square normalisation share on the CPU: checks of their operands, the
// weights of a row, and the sum with a residual.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/kernel.h"

namespace mixtape::kernels::cpu {

inline void check_rows(const char* op, const View& like, std::initializer_list<View> others) {
  for (const View& v : others) {
    if (!v) continue;
    MT_CHECK(v.dim() == 2 && v.sizes == like.sizes && (v.size(1) <= 1 || v.stride(1) == 1), op,
             ": expected row-major views of shape ", like.sizes, ", got sizes ", v.sizes,
             " strides ", v.strides);
  }
}

/// A (C) vector as type C, contiguous in `buffer`; null when absent.
template <class C>
const C* load_vector(const char* op, const View& v, C* buffer) {
  if (!v) return nullptr;
  MT_CHECK(v.numel() <= 1 || v.stride(-1) == 1, op, ": expected a contiguous vector, got strides ",
           v.strides);
  load_elements(v.dtype, v.data, buffer, v.numel());
  return buffer;
}

/// x + residual, rounded to sum's dtype, stored there and returned as type C.
template <class C, class Args>
const C* add_residual(const Args& args, std::int64_t row, C* x_buffer, C* r_buffer, C* s_buffer) {
  const std::int64_t n = args.x.size(1);
  const C* const x = load_row(args.x, row, x_buffer);
  const C* const r = load_row(args.residual, row, r_buffer);
  C* const s = open_row(args.sum, row, s_buffer);
  for (std::int64_t i = 0; i < n; ++i) s[i] = x[i] + r[i];
  store_row(args.sum, row, s);
  return load_row(args.sum, row, s_buffer);
}

}  // namespace mixtape::kernels::cpu
