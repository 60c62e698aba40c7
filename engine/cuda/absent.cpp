// The CUDA backend of a build without CUDA. Public functions refuse CUDA devices before they get
// here (check_device), so each of these only has to say the same if one does not.
#include "engine/check.h"
#include "engine/cuda/backend.h"
#include "engine/cuda/copy_rate.h"

namespace mixtape::cudart {

int device_count() noexcept { return 0; }

std::string unavailable_reason() {
  return "this build has no CUDA; configure it where the CUDA toolkit is installed";
}

namespace {
[[noreturn]] void refuse() { MT_THROW("cuda: ", unavailable_reason()); }
}  // namespace

int current_device() { refuse(); }
void set_current_device(int) { refuse(); }
void restore_current_device(int) noexcept {}
void check_not_forked() { refuse(); }
bool in_forked_child() noexcept { return false; }
void* create_stream(int, bool) { refuse(); }
void synchronize_stream(int, void*) { refuse(); }
void synchronize_device(int) { refuse(); }
void synchronize_beside_capture(int, void*) { refuse(); }
bool is_capturing(int, void*) { refuse(); }
void* capture_stream(int) { refuse(); }
void begin_capture(int, void*) { refuse(); }
CapturedGraph end_capture(int, void*) { refuse(); }
void abandon_capture(int, void*) noexcept {}
void launch_graph(int, void*, void*) { refuse(); }
void destroy_graph(int, void*) noexcept {}
void synchronize_device_quietly(int) noexcept {}
void* acquire_event(int, bool) { refuse(); }
void release_event(int, bool, void*) noexcept {}
void record_event(int, void*, void*) { refuse(); }
bool event_done(int, void*) { refuse(); }
void synchronize_event(int, void*) { refuse(); }
void wait_event(int, void*, void*) { refuse(); }
double elapsed_ms(void*, void*) { refuse(); }
void copy(void*, Device, const void*, Device, std::size_t, const Stream&) { refuse(); }
void set(int, void*, int, std::size_t, void*) { refuse(); }
DeviceError* error_slot(int) { refuse(); }
double copy_rate(int) { refuse(); }
void check_kernel(const char*, int, void*, bool) { refuse(); }
detail::CachingAllocator& device_allocator(int) { refuse(); }
std::uint64_t create_memory_pool(int) { refuse(); }
void release_memory_pool(int, std::uint64_t) noexcept {}
std::uint64_t exchange_memory_pool(int, std::uint64_t) noexcept { return 0; }
detail::CachingAllocator& pinned_allocator() { refuse(); }

}  // namespace mixtape::cudart
