#include "engine/memory_pool.h"

#include "engine/cuda/backend.h"

namespace mixtape {

MemoryPool::MemoryPool(Device device) : device_(device) {
  check_device("MemoryPool", device);
  if (device.is_cuda()) id_ = cudart::create_memory_pool(device.index);
}

MemoryPool::~MemoryPool() {
  if (device_.is_cuda()) cudart::release_memory_pool(device_.index, id_);
}

MemoryPoolScope::MemoryPoolScope(const MemoryPool& pool) : device_(pool.device_) {
  if (device_.is_cuda()) previous_ = cudart::exchange_memory_pool(device_.index, pool.id_);
}

MemoryPoolScope::~MemoryPoolScope() {
  if (device_.is_cuda()) cudart::exchange_memory_pool(device_.index, previous_);
}

}  // namespace mixtape
