#include "engine/stream.h"

#include <chrono>

#include "engine/check.h"
#include "engine/cuda/backend.h"
#include "engine/device_error.h"
#include "engine/env.h"
#include "engine/op_scope.h"
#include "engine/profile_hooks.h"

namespace mixtape {
namespace {

// This thread's current stream of each device; nullptr is the default stream.
thread_local constinit void* current_streams[cudart::kMaxDevices] = {};

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

void check_not_captured(Device device) {
  const char* op = OpScope::current();
  MT_CHECK(!cudart::is_capturing(device.index, Stream::current(device).native()),
           op ? op : "synchronize", ": waits for ", device,
           ", whose work is being captured; move it out of the step");
}

}  // namespace

Stream make_stream(Device device, void* native) {
  Stream s;
  s.device_ = device;
  s.native_ = native;
  return s;
}

Stream Stream::current(Device device) {
  if (device.is_cpu()) return {};
  check_device("Stream::current", device);
  return make_stream(device, current_streams[device.index]);
}

Stream Stream::default_stream(Device device) {
  check_device("Stream::default_stream", device);
  return make_stream(device, nullptr);
}

Stream Stream::create(Device device, bool high_priority) {
  if (device.is_cpu()) return {};
  check_device("Stream::create", device);
  return make_stream(device, cudart::create_stream(device.index, high_priority));
}

void Stream::synchronize() const {
  if (device_.is_cpu()) return;
  check_not_captured(device_);
  const profile::Range range(ProfileKind::synchronize, "synchronize stream");
  cudart::synchronize_stream(device_.index, native_);
  throw_device_error(device_);
}

void Stream::wait(const Event& event) const {
  if (device_.is_cpu()) {
    event.synchronize();
    return;
  }
  if (void* native = event.native()) cudart::wait_event(device_.index, native_, native);
}

// native is nullptr for the CPU, whose events are complete when made.
struct Event::Impl {
  Device device;
  bool timing;
  void* native = nullptr;
  double made_ms = 0;

  Impl(Device d, bool t) : device(d), timing(t) {
    if (d.is_cuda())
      native = cudart::acquire_event(d.index, t);
    else if (t)
      made_ms = now_ms();
  }
  ~Impl() {
    if (native != nullptr) cudart::release_event(device.index, timing, native);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
};

Event::Event(const Stream& stream, bool timing)
    : impl_(std::make_shared<Impl>(stream.device(), timing)) {
  if (impl_->native != nullptr)
    cudart::record_event(stream.device().index, impl_->native, stream.native());
}

bool Event::done() const {
  return impl_->native == nullptr || cudart::event_done(impl_->device.index, impl_->native);
}

void Event::synchronize() const {
  if (impl_->native == nullptr) return;
  const profile::Range range(ProfileKind::synchronize, "synchronize event");
  cudart::synchronize_event(impl_->device.index, impl_->native);
}

double Event::elapsed_ms(const Event& later) const {
  MT_CHECK(impl_->timing && later.impl_->timing,
           "Event::elapsed_ms: expected two events made with timing");
  MT_CHECK(impl_->device == later.impl_->device, "Event::elapsed_ms: expected events of one ",
           "device, got ", impl_->device, " and ", later.impl_->device);
  if (impl_->native == nullptr) return later.impl_->made_ms - impl_->made_ms;
  later.synchronize();
  return cudart::elapsed_ms(impl_->native, later.impl_->native);
}

void* Event::native() const { return impl_->native; }

StreamGuard::StreamGuard(const Stream& stream) : previous_(Stream::current(stream.device())) {
  if (stream.device().is_cpu()) return;
  const int index = stream.device().index;
  previous_device_ = cudart::current_device();
  if (previous_device_ != index) cudart::set_current_device(index);
  current_streams[index] = stream.native();
}

StreamGuard::~StreamGuard() {
  if (previous_device_ < 0) return;
  const int index = previous_.device().index;
  current_streams[index] = previous_.native();
  if (previous_device_ != index) cudart::restore_current_device(previous_device_);
}

void synchronize(Device device) {
  if (device.is_cpu()) return;
  check_device("synchronize", device);
  check_not_captured(device);
  const profile::Range range(ProfileKind::synchronize, "synchronize device");
  cudart::synchronize_device(device.index);
  throw_device_error(device);
}

bool sync_mode() {
  static const bool on = detail::env_flag("MIXTAPE_SYNC");
  return on;
}

}  // namespace mixtape
