// What attention's forward and backward passes share on the CPU: heads as rows, tiles of them in
// the arithmetic type, masks and the dropout of a row of probabilities.
//
// Legend: see kernels/attention.h. A key block is kKeys keys, a query tile kQueries rows; their
// products stay in the second-level cache at most. Tiles are padded (kernels/cpu/tile_product.h):
// columns past D are 0 in queries, keys and values.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/attention.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/philox_words.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/tile_product.h"
#include "kernels/random_math.h"

namespace mixtape::kernels::cpu {

inline constexpr std::int64_t kKeys = 256, kQueries = 48;
/// Most queries that one task holds while it passes over the keys.
inline constexpr std::int64_t kChunk = 5 * kQueries;
/// Queries of each task but the last: about equal parts, in whole tiles.
inline std::int64_t chunk_rows(std::int64_t queries) {
  const std::int64_t chunks = std::max<std::int64_t>(1, (queries + kChunk - 1) / kChunk);
  const std::int64_t rows = (queries + chunks - 1) / chunks;
  return (rows + kQueries - 1) / kQueries * kQueries;
}

template <class C>
inline constexpr C kMasked = -std::numeric_limits<C>::infinity();

/// `x` with lanes k and k ^ Half exchanged.
template <int Half>
inline Packet exchange_lanes(Packet x) {
  Packet::Ints from;
  for (int k = 0; k < Packet::kLanes; ++k) from[k] = k ^ Half;
  return {__builtin_shuffle(x.v, from)};
}
template <int Half = Packet::kLanes / 2>
inline float max_of_lanes(Packet x) {
  if constexpr (Half == 0)
    return x.v[0];
  else
    return max_of_lanes<Half / 2>(math::maximum(x, exchange_lanes<Half>(x)));
}
template <int Half = Packet::kLanes / 2>
inline float sum_of_lanes(Packet x) {
  if constexpr (Half == 0)
    return x.v[0];
  else
    return sum_of_lanes<Half / 2>(x + exchange_lanes<Half>(x));
}
inline double max_of_lanes(double x) { return x; }
inline double sum_of_lanes(double x) { return x; }

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
  /// The factors of a part's keys; `factors` has room for kKeys.
  void factors(const RowPart& part, C* factors) const {
    constexpr std::int64_t kStep = 4 * Packet::kLanes;
    static_assert(kKeys % kStep == 0);
    const std::int64_t first = part.row * row_blocks_ + part.key / 4;
    std::uint32_t words[kStep];
    std::int64_t j = 0;
    for (; j < part.valid; j += kStep) {
      philox_words(state_, static_cast<std::uint64_t>(first + j / 4), words);
      for (std::int64_t i = 0; i < kStep; ++i)
        factors[j + i] = uniform_from_bits(words[i]) >= threshold_ ? scale_ : C(0);
    }
    if (j < part.padded) std::fill(factors + j, factors + part.padded, C(0));
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
