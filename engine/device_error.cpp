#include "engine/device_error.h"

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

#include "engine/check.h"
#include "engine/cuda/backend.h"

namespace mixtape {
namespace {

// Names in the order of their first use; entry 0 is never handed out. Reading needs no lock: an
// entry is written before the count that publishes it.
constexpr int kMaxOps = 1024;
std::array<std::atomic<const char*>, kMaxOps> op_names;
std::atomic<int> op_count{1};
std::mutex op_mutex;

int find_op(const char* op, int count) {
  for (int i = 1; i < count; ++i) {
    const char* name = op_names[static_cast<std::size_t>(i)].load(std::memory_order_relaxed);
    if (name == op || std::strcmp(name, op) == 0) return i;
  }
  return 0;
}

const char* op_name(std::int32_t id) {
  if (id < 1 || id >= op_count.load(std::memory_order_acquire)) return "a kernel";
  return op_names[static_cast<std::size_t>(id)].load(std::memory_order_relaxed);
}

}  // namespace

DeviceError* device_error_slot(Device device) {
  if (device.is_cpu()) return nullptr;
  check_device("device_error_slot", device);
  return cudart::error_slot(device.index);
}

std::int32_t device_error_op_id(const char* op) {
  if (const int id = find_op(op, op_count.load(std::memory_order_acquire))) return id;
  const std::lock_guard lock(op_mutex);
  const int count = op_count.load(std::memory_order_relaxed);
  if (const int id = find_op(op, count)) return id;
  MT_CHECK(count < kMaxOps, "device_error_op_id: more than ", kMaxOps - 1, " op names");
  op_names[static_cast<std::size_t>(count)].store(strdup(op), std::memory_order_relaxed);
  op_count.store(count + 1, std::memory_order_release);
  return count;
}

void throw_device_error(Device device) {
  if (device.is_cpu()) return;
  DeviceError* slot = device_error_slot(device);
  std::atomic_ref taken_of(slot->taken);
  std::uint32_t taken = taken_of.load(std::memory_order_acquire);
  const std::uint32_t reported = std::atomic_ref(slot->reported).load(std::memory_order_acquire);
  if (reported == taken) return;
  const std::int32_t op = slot->op;
  const std::int64_t value = slot->value, bound = slot->bound;
  // From here on the device may write the next error. One of several threads throws this one.
  if (!taken_of.compare_exchange_strong(taken, reported, std::memory_order_acq_rel)) return;
  MT_THROW(op_name(op), ": expected an index in [0, ", bound, "), got ", value, " (found on ",
           device, ')');
}

}  // namespace mixtape
