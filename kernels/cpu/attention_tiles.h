// What attention's forward and backward passes share on the CPU: heads as rows, tiles of them in
// the arithmetic type, masks and the dropout of a row of probabilities.
//
// Legend: see kernels/attention.h. A key block is kKeys keys, a query tile kQueries rows; their
// products live in the first-level cache. Tiles are padded (kernels/cpu/tile_product.h): columns
// past D are 0 in queries, keys and values.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/attention.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/tile_product.h"
#include "kernels/random_math.h"

namespace mixtape::kernels::cpu {

inline constexpr std::int64_t kKeys = 128, kQueries = 48;
/// Queries that one task holds while it passes over the keys.
inline constexpr std::int64_t kChunk = 5 * kQueries;

template <class C>
inline constexpr C kMasked = -std::numeric_limits<C>::infinity();

/// One head of a (B, H, T, D) view: rows of D elements.
struct HeadRows {
  char* data;
  Dtype dtype;
  std::int64_t stride, columns;

  HeadRows(const View& v, std::int64_t b, std::int64_t h)
      : data(static_cast<char*>(
            element_address(v.data, v.dtype, b * v.stride(0) + h * v.stride(1)))),
        dtype(v.dtype),
        stride(v.stride(2)),
        columns(v.size(3)) {}
  void* row(std::int64_t t) const { return element_address(data, dtype, t * stride); }
};

/// Rows [first, first + count) in type C at `to`, `ld` apart, padded with zeros.
template <class C>
inline void load_tile(const HeadRows& rows, std::int64_t first, std::int64_t count, C* to,
                      std::int64_t ld) {
  for (std::int64_t i = 0; i < count; ++i) {
    load_elements(rows.dtype, rows.row(first + i), to + i * ld, rows.columns);
    std::fill(to + i * ld + rows.columns, to + i * ld + tile_columns<C>(rows.columns), C(0));
  }
}

/// to[d * ldt + i] = from[i * ld + d] for i < count, d < columns; 0 for i up to the padded count.
template <class C>
inline void transpose_tile(const C* from, std::int64_t ld, std::int64_t count, std::int64_t columns,
                           C* to, std::int64_t ldt) {
  constexpr std::int64_t kGroup = kTileAlign<C>;
  for (std::int64_t i = 0; i < count; i += kGroup) {
    const std::int64_t here = std::min(kGroup, count - i);
    for (std::int64_t d = 0; d < columns; ++d) {
      C* const out = to + d * ldt + i;
      if (here == kGroup) {
        for (std::int64_t k = 0; k < kGroup; ++k) out[k] = from[(i + k) * ld + d];
      } else {
        for (std::int64_t k = 0; k < here; ++k) out[k] = from[(i + k) * ld + d];
        std::fill(out + here, out + kGroup, C(0));
      }
    }
  }
}

template <class C>
inline void scale_row(C* row, std::int64_t n, C factor) {
  using P = RowPacket<C>;
  const auto f = P::splat(factor);
  for_each_packet<C>(0, n, [&](auto i, int count, auto) {
    P::store(row + i, P::load(row + i, count, C(0)) * f, count);
  });
}

/// The part of a row of scores that lies in one key block.
struct RowPart {
  std::int64_t row;     // (b H + h) T + t
  std::int64_t key;     // the block's first key
  std::int64_t valid;   // keys of it that causality lets the row see
  std::int64_t padded;  // columns of the tile
};

/// Masks of one (b, h): causal, given, padding.
template <class C>
class ScoreMask {
 public:
  ScoreMask(const AttentionArgs& args, std::int64_t b, std::int64_t h, C* buffer)
      : mask_(args.mask), buffer_(buffer) {
    if (!mask_) return;
    base_ = b * mask_.stride(0) + h * mask_.stride(1);
    load_ = load_function(mask_.dtype, dtype_of<C>);
  }
  /// Scores of query t become -inf where masked; a floating mask is added.
  void apply(C* scores, const RowPart& part, std::int64_t t) const {
    std::fill(scores + part.valid, scores + part.padded, kMasked<C>);
    if (!mask_) return;
    const std::int64_t at = base_ + t * mask_.stride(2) + part.key * mask_.stride(3);
    load_(element(mask_.data, mask_.dtype, at), mask_.stride(3), part.valid, buffer_);
    if (mask_.dtype == Dtype::b8) {
      for (std::int64_t j = 0; j < part.valid; ++j)
        scores[j] = buffer_[j] != 0 ? scores[j] : kMasked<C>;
    } else {
      for (std::int64_t j = 0; j < part.valid; ++j)
        scores[j] = buffer_[j] == kMasked<C> ? kMasked<C> : scores[j] + buffer_[j];
    }
  }

 private:
  View mask_;
  C* buffer_;
  std::int64_t base_ = 0;
  LoadFunction load_ = nullptr;
};

/// What dropout multiplies probabilities by: 0 or 1 / (1 - p), remade from the counters.
template <class C>
class ProbabilityDropout {
 public:
  explicit ProbabilityDropout(const AttentionArgs& args)
      : state_(args.random),
        row_blocks_((args.k.size(2) + 3) / 4),
        threshold_(static_cast<float>(args.dropout)),
        scale_(static_cast<C>(random_math::dropout_scale(args.dropout))) {}
  explicit operator bool() const { return threshold_ > 0; }
  /// The factors of a part's keys; `factors` has room for the padded columns.
  void factors(const RowPart& part, C* factors) const {
    const std::int64_t first = part.row * row_blocks_ + part.key / 4;
    for (std::int64_t j = 0; j < part.valid; j += 4) {
      const Philox4 words = philox(state_, static_cast<std::uint64_t>(first + j / 4));
      for (int l = 0; l < 4; ++l)
        factors[j + l] = random_math::dropout_keeps(words.v[l], threshold_) ? scale_ : C(0);
    }
    std::fill(factors + std::min((part.valid + 3) / 4 * 4, part.padded), factors + part.padded,
              C(0));
  }

 private:
  PhiloxState state_;
  std::int64_t row_blocks_;
  float threshold_;
  C scale_;
};

/// Keys of the block at `key` that query t may see, of `keys`.
inline std::int64_t visible_keys(bool causal, std::int64_t t, std::int64_t key, std::int64_t keys) {
  return causal ? std::clamp<std::int64_t>(t + 1 - key, 0, keys) : keys;
}

}  // namespace mixtape::kernels::cpu
