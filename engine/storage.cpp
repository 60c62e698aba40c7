#include "engine/storage.h"

#include <new>

#include "engine/graph_recorder.h"
#include "engine/profile_hooks.h"

namespace mixtape {

Ref<Storage> Storage::create(std::size_t bytes, Device device) {
  const profile::AllocatorTime time;
  Allocator& allocator = allocator_of(device);
  const Block block = allocator.allocate(bytes, Stream::current(device));
  auto* storage = new (pool_allocate(sizeof(Storage))) Storage(block, device, allocator, false);
  if (graph_recorder != nullptr) [[unlikely]]
    storage->captured_by_ = graph_recorder->id();
  return Ref<Storage>::adopt(storage);
}

Ref<Storage> Storage::create_pinned(std::size_t bytes) {
  Allocator& allocator = pinned_allocator();
  const Block block = allocator.allocate(bytes, Stream());
  return Ref<Storage>::adopt(new (pool_allocate(sizeof(Storage)))
                                 Storage(block, Device::cpu(), allocator, true));
}

void Storage::note_captured_write() { graph_recorder->note_write(*this); }

void Storage::destroy(Storage* storage) noexcept {
  const profile::AllocatorTime time;
  storage->allocator_->release(storage->block_);
  storage->~Storage();
  pool_free(storage, sizeof(Storage));
}

}  // namespace mixtape
