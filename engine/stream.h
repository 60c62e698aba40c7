// Streams and events. Work is queued on the current stream of a device; the CPU has one stream on
// which everything is already done when a call returns.
//
//   auto side = Stream::create(Device::cuda());
//   { StreamGuard on(side); y = f(x); }          // f's kernels run on `side`
//   Event done(side);  Stream::current(x.device()).wait(done);
#pragma once

#include <memory>

#include "engine/device.h"

namespace mixtape {

class Event;

/// A queue of device work. A small value type: copies name the same queue.
class Stream {
 public:
  Stream() = default;  // the CPU's stream
  /// The stream that this thread's work on `device` goes to: the default stream unless a
  /// StreamGuard is alive.
  static Stream current(Device device);
  static Stream default_stream(Device device);
  /// A new non-blocking stream; it lives until the process ends (streams are pooled, 32 a device).
  static Stream create(Device device, bool high_priority = false);

  Device device() const { return device_; }
  /// cudaStream_t as an opaque pointer; nullptr is the default stream.
  void* native() const { return native_; }
  /// Blocks the host until all queued work is done, then throws what device-side checks reported.
  void synchronize() const;
  /// Later work on this stream waits for `event`; the host does not.
  void wait(const Event& event) const;
  friend bool operator==(const Stream&, const Stream&) = default;

 private:
  friend class Event;
  friend Stream make_stream(Device, void*);
  Device device_;
  void* native_ = nullptr;
};

Stream make_stream(Device device, void* native);  // internal: wraps an existing queue

/// A point in a stream's work. On the CPU every event is complete.
class Event {
 public:
  /// Records at the end of the work now in `stream`. Timing costs a little more; ask for it.
  explicit Event(const Stream& stream, bool timing = false);
  bool done() const;
  void synchronize() const;
  /// Milliseconds from this event to `later`; both need timing.
  double elapsed_ms(const Event& later) const;
  void* native() const;

 private:
  friend class Stream;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// Makes `stream` this thread's current stream of its device, and that device current; the end of
/// the scope restores both.
class StreamGuard {
 public:
  explicit StreamGuard(const Stream& stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  Stream previous_;
  int previous_device_ = -1;
};

/// Waits for all work on all streams of `device`, then throws what device-side checks reported.
void synchronize(Device device);

/// True when MIXTAPE_SYNC=1: every kernel is followed by a synchronisation so that a CUDA error is
/// attributed to the op that caused it.
bool sync_mode();

}  // namespace mixtape
