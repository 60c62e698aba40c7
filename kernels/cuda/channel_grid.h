// How the values of a (N, C, S) tensor are divided among blocks and threads when every channel has
// its own numbers: the same for sums over a channel and for working through it afterwards. It
// follows from sizes, layout and vector width alone, so that the order of every sum does too.
//
// Items are what chunks are cut from: rows of channels (channels-last) or vectors of a channel's
// planes (planar). Blocks are (tile of channels, chunk).
#pragma once

#include <algorithm>

#include "kernels/channels.h"
#include "kernels/cuda/fast_divide.cuh"

namespace mixtape::kernels::cuda {

inline constexpr int kChannelThreads = 256, kChannelLanes = 32;

struct ChannelGrid {
  std::int64_t channels, plane;  // plane: S
  std::int64_t items, per_chunk;
  int width, values_per_item;
  int lanes;                 // channels-last: threads side by side along a row
  std::int64_t tiles;        // grid x
  int chunks;                // grid y
  FastDivide plane_vectors;  // planar

  ChannelGrid() = default;
  ChannelGrid(const ChannelLayout& l, int width_) : channels(l.c), plane(l.s), width(width_) {
    constexpr std::int64_t kBlocks = 512;
    const std::int64_t vectors = (l.channels_last ? l.c : l.s) / width;
    lanes = kChannelLanes;
    while (l.channels_last && lanes > 1 && lanes > vectors) lanes /= 2;
    tiles = l.channels_last ? (vectors + lanes - 1) / lanes : l.c;
    items = l.channels_last ? l.values() : l.n * vectors;
    values_per_item = l.channels_last ? 1 : width;
    const std::int64_t at_once = l.channels_last ? kChannelThreads / lanes : kChannelThreads;
    const std::int64_t useful = std::max<std::int64_t>(1, (items + at_once - 1) / at_once);
    const std::int64_t wanted =
        std::clamp<std::int64_t>(kBlocks / std::max<std::int64_t>(1, tiles), 1, useful);
    per_chunk = std::max<std::int64_t>(1, (items + wanted - 1) / wanted);
    chunks = static_cast<int>(std::max<std::int64_t>(1, (items + per_chunk - 1) / per_chunk));
    if (!l.channels_last) {
      MT_CHECK(items < (std::int64_t{1} << 31),
               "batch_norm: expected fewer than 2^31 values per channel, got ", l.values());
      plane_vectors = FastDivide(std::max<std::int64_t>(1, vectors));
    }
  }
};

/// Whether vectors of `width` elements fit a packed view: along channels or along planes.
inline bool fits_width(const ChannelLayout& l, const View& v, int width) {
  return !v || ((l.channels_last ? l.c : l.s) % width == 0 &&
                (reinterpret_cast<std::uintptr_t>(v.data) & 15) == 0);
}

}  // namespace mixtape::kernels::cuda
