// The free chunks of one stream, pool and size range, found best fit first.
//
// Chunks up to a small segment are kept in one bin for each multiple of 512 bytes, with a bitmap of
// the bins in use, so that the common case takes a few instructions; larger ones in a set ordered
// by size and address.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>

#include "engine/cuda/pending.h"

namespace mixtape::cudart {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kMinChunk = 512;            // every size is a multiple of it
inline constexpr std::size_t kSmallLimit = kMiB;         // requests up to here are small
inline constexpr std::size_t kSmallSegment = 2 * kMiB;   // what small requests are cut from
inline constexpr std::size_t kLargeSegment = 20 * kMiB;  // what requests under kExactLimit are
inline constexpr std::size_t kExactLimit = 10 * kMiB;    // larger ones get their own segment,
inline constexpr std::size_t kSegmentRound = 2 * kMiB;   // rounded up to this

class FreeList;

/// A piece of a segment (one cudaMalloc): live, pending or in its free list. The pieces of a
/// segment are linked in the order of their addresses.
struct Chunk : Deferrable {
  char* data = nullptr;
  std::size_t size = 0;       // a multiple of kMinChunk
  std::size_t requested = 0;  // while live
  bool free = false;          // in home's list
  FreeList* home = nullptr;
  Chunk *previous = nullptr, *next = nullptr;          // neighbours in the segment
  Chunk *bin_previous = nullptr, *bin_next = nullptr;  // in a bin of the free list

  bool is_whole_segment() const { return previous == nullptr && next == nullptr; }
};

class FreeList {
 public:
  FreeList(bool small, void* stream, std::uint64_t pool);

  bool small() const { return small_; }
  void* stream() const { return stream_; }
  std::uint64_t pool() const { return pool_; }

  void insert(Chunk* chunk);
  void remove(Chunk* chunk);
  /// The smallest chunk of at least `size` bytes, or nullptr; it stays in the list.
  Chunk* best_fit(std::size_t size) const;
  std::size_t largest() const;
  /// A chunk that is a whole segment, or nullptr.
  Chunk* whole_segment() const;
  /// What a request of `size` bytes leaves of a chunk is worth a chunk of its own.
  bool should_split(std::size_t chunk, std::size_t size) const {
    const std::size_t rest = chunk - size;
    return small_ ? rest >= kMinChunk : rest > kSmallLimit;
  }

  int segments = 0;  // cut into the chunks of this list, live ones included; kept by the allocator

 private:
  static constexpr std::size_t kBins = kSmallSegment / kMinChunk;
  static constexpr std::size_t kWords = kBins / 64;
  struct Bins {
    std::array<Chunk*, kBins> head{};
    std::array<std::uint64_t, kWords> used{};
  };
  struct Less {
    bool operator()(const Chunk* a, const Chunk* b) const {
      return a->size != b->size ? a->size < b->size : a->data < b->data;
    }
  };

  bool small_;
  void* stream_;
  std::uint64_t pool_;
  std::unique_ptr<Bins> bins_;     // small
  std::set<Chunk*, Less> chunks_;  // large
};

}  // namespace mixtape::cudart
