// Private memory pools: a captured graph bakes addresses in, so what is allocated during its
// capture must not be handed to anyone else for as long as the graph lives.
//
//   MemoryPool pool(device);
//   { MemoryPoolScope scope(pool);  ... capture ... }   // this thread allocates from the pool
//   // freed blocks of the pool are reused only inside a scope of the pool
#pragma once

#include <cstdint>

#include "engine/device.h"

namespace mixtape {

/// Gives its unused memory back to the driver when it ends; blocks that are still live then follow
/// once they are freed and the cache is emptied. On the CPU a pool does nothing.
class MemoryPool {
 public:
  explicit MemoryPool(Device device);
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  Device device() const { return device_; }

 private:
  friend class MemoryPoolScope;
  Device device_;
  std::uint64_t id_ = 0;
};

/// This thread's allocations on the pool's device come from the pool until the scope ends.
class MemoryPoolScope {
 public:
  explicit MemoryPoolScope(const MemoryPool& pool);
  ~MemoryPoolScope();
  MemoryPoolScope(const MemoryPoolScope&) = delete;
  MemoryPoolScope& operator=(const MemoryPoolScope&) = delete;

 private:
  Device device_;
  std::uint64_t previous_ = 0;
};

}  // namespace mixtape
