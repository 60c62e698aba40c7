// Products of tiles that are already in the cache, for attention, where a general product would
// spend its time packing: C (m, n) = A B or C += A B in SIMD registers, without copies.
//
// A is read an element at a time, so its strides are free and A^T costs no transposition. Rows of B
// and C are contiguous and n is a multiple of kTileAlign<C>; leading dimensions that are an odd
// number of cache lines (tile_ld) keep a tile's rows out of one cache set. Each element is summed
// in the order of k, whatever m, and then added to C: results do not depend on how rows are
// grouped.
#pragma once

#include <cstdint>

#include "kernels/cpu/register.h"

namespace mixtape::kernels::cpu {

/// Columns of B and C are padded to a multiple of this.
template <class C>
inline constexpr std::int64_t kTileAlign = 2 * Register<C>::kLanes;

template <class C>
constexpr std::int64_t tile_columns(std::int64_t n) {
  return (n + kTileAlign<C> - 1) / kTileAlign<C> * kTileAlign<C>;
}
/// A leading dimension for `n` columns: an odd number of 64-byte lines.
template <class C>
constexpr std::int64_t tile_ld(std::int64_t n) {
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(C));
  const std::int64_t lines = (tile_columns<C>(n) + kLine - 1) / kLine;
  return (lines | 1) * kLine;
}

/// Element (i, l) of A is data[i * row + l * column].
template <class C>
struct TileOperand {
  const C* data;
  std::int64_t row, column;
};

#if defined(__AVX512F__)
inline constexpr int kTileRows = 12;  // of the 32 registers, 24 hold sums
#else
inline constexpr int kTileRows = 6;  // of the 16 registers, 12 hold sums
#endif

/// `Rows` rows and kTileAlign columns of the product.
template <int Rows, bool Add, class C>
inline void tile_product_rows(std::int64_t k, TileOperand<C> a, const C* b, std::int64_t ldb, C* c,
                              std::int64_t ldc) {
  using R = Register<C>;
  using V = typename R::Lanes;
  V sums[Rows][2] = {};
  for (std::int64_t l = 0; l < k; ++l) {
    const V b0 = R::load(b + l * ldb), b1 = R::load(b + l * ldb + R::kLanes);
    const C* const column = a.data + l * a.column;
    for (int i = 0; i < Rows; ++i) {
      const V x = column[i * a.row] - V{};
      sums[i][0] += x * b0;
      sums[i][1] += x * b1;
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < 2; ++j) {
      C* const to = c + i * ldc + j * R::kLanes;
      if constexpr (Add) sums[i][j] += R::load(to);
      std::memcpy(to, &sums[i][j], sizeof(V));
    }
}

/// The last `rows` < kTileRows rows.
template <int Rows, bool Add, class C>
inline void tile_product_tail(int rows, std::int64_t k, TileOperand<C> a, const C* b,
                              std::int64_t ldb, C* c, std::int64_t ldc) {
  if constexpr (Rows > 0) {
    if (rows == Rows) return tile_product_rows<Rows, Add>(k, a, b, ldb, c, ldc);
    tile_product_tail<Rows - 1, Add>(rows, k, a, b, ldb, c, ldc);
  }
}

/// C (m, n) = A (m, k) B (k, n), added to C with Add.
template <bool Add, class C>
void tile_product(std::int64_t m, std::int64_t n, std::int64_t k, TileOperand<C> a, const C* b,
                  std::int64_t ldb, C* c, std::int64_t ldc) {
  for (std::int64_t j = 0; j < n; j += kTileAlign<C>) {
    std::int64_t i = 0;
    for (; i + kTileRows <= m; i += kTileRows)
      tile_product_rows<kTileRows, Add>(k, {a.data + i * a.row, a.row, a.column}, b + j, ldb,
                                        c + i * ldc + j, ldc);
    tile_product_tail<kTileRows - 1, Add>(static_cast<int>(m - i), k,
                                          {a.data + i * a.row, a.row, a.column}, b + j, ldb,
                                          c + i * ldc + j, ldc);
  }
}

}  // namespace mixtape::kernels::cpu
