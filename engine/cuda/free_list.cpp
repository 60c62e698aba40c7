#include "engine/cuda/free_list.h"

#include <bit>

namespace mixtape::cudart {
namespace {
std::size_t bin_of(std::size_t size) { return size / kMinChunk - 1; }
std::uint64_t bit_of(std::size_t bin) { return std::uint64_t{1} << (bin % 64); }
}  // namespace

FreeList::FreeList(bool small, void* stream, std::uint64_t pool)
    : small_(small), stream_(stream), pool_(pool) {
  if (small) bins_ = std::make_unique<Bins>();
}

void FreeList::insert(Chunk* chunk) {
  chunk->free = true;
  if (!small_) {
    chunks_.insert(chunk);
    return;
  }
  const std::size_t bin = bin_of(chunk->size);
  Chunk*& head = bins_->head[bin];
  chunk->bin_previous = nullptr;
  chunk->bin_next = head;
  if (head != nullptr) head->bin_previous = chunk;
  head = chunk;
  bins_->used[bin / 64] |= bit_of(bin);
}

void FreeList::remove(Chunk* chunk) {
  chunk->free = false;
  if (!small_) {
    chunks_.erase(chunk);
    return;
  }
  const std::size_t bin = bin_of(chunk->size);
  if (chunk->bin_next != nullptr) chunk->bin_next->bin_previous = chunk->bin_previous;
  if (chunk->bin_previous != nullptr)
    chunk->bin_previous->bin_next = chunk->bin_next;
  else
    bins_->head[bin] = chunk->bin_next;
  if (bins_->head[bin] == nullptr) bins_->used[bin / 64] &= ~bit_of(bin);
}

Chunk* FreeList::best_fit(std::size_t size) const {
  if (!small_) {
    Chunk key;
    key.size = size;
    const auto found = chunks_.lower_bound(&key);
    return found == chunks_.end() ? nullptr : *found;
  }
  const std::size_t bin = bin_of(size);
  std::uint64_t word = bins_->used[bin / 64] & ~(bit_of(bin) - 1);
  for (std::size_t w = bin / 64;;) {
    if (word != 0) return bins_->head[w * 64 + static_cast<std::size_t>(std::countr_zero(word))];
    if (++w == kWords) return nullptr;
    word = bins_->used[w];
  }
}

std::size_t FreeList::largest() const {
  if (!small_) return chunks_.empty() ? 0 : (*chunks_.rbegin())->size;
  for (std::size_t w = kWords; w-- > 0;) {
    if (const std::uint64_t word = bins_->used[w])
      return (w * 64 + static_cast<std::size_t>(std::bit_width(word))) * kMinChunk;
  }
  return 0;
}

Chunk* FreeList::whole_segment() const {
  if (small_) return bins_->head[kBins - 1];
  for (Chunk* chunk : chunks_)
    if (chunk->is_whole_segment()) return chunk;
  return nullptr;
}

}  // namespace mixtape::cudart
