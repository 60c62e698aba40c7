// What a finished profile holds, and what it can say about itself: a table of ops, a report of
// bottlenecks, a trace file. Plain data, so that a program can compute more from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/profile_events.h"

namespace mixtape {

enum class ProfileSort : std::uint8_t {
  device_time,  // own time on the device; on a CPU-only profile the same as host_time
  host_time,    // own host time: without ranges within
  host_total,
  calls,
  flops,
  allocated,
  name,
};
enum class ProfileGroup : std::uint8_t {
  op,             // name and direction
  op_and_shapes,  // and shapes and dtypes of the inputs; needs ProfilerOptions::shapes
  module,         // path of the module (of the forward, also for backward ops) and direction
  op_and_module,
};

struct ProfileTableOptions {
  ProfileSort sort_by = ProfileSort::device_time;  // largest first; names in order
  int rows = 25;                                   // 0: all
  ProfileGroup group_by = ProfileGroup::op;
};

/// One line of the table. Times are sums over the calls, in seconds.
struct ProfileRow {
  std::string name, module, shapes;
  bool backward = false;
  ProfileKind kind = ProfileKind::op;
  std::int64_t calls = 0;
  double host_total = 0;    // ranges within included (a range within one of its own row once)
  double host_self = 0;     // without them
  double device_total = 0;  // kernels, copies and fills launched from within
  double device_self = 0;   // those that no range within launched
  double flops = 0, bytes = 0;
  std::int64_t allocated = 0, freed = 0;
};

/// One cause of lost or spent time. Shares of all causes add up to 1.
struct Bottleneck {
  std::string name = {};
  double share = 0;         // of the steps' time
  double seconds = 0;       // a step
  std::string detail = {};  // a rate or a second figure, or empty
  std::string advice = {};  // what helps, for those that are losses
};

/// Where the steps' time goes. The time is from the first step's begin to the last one's end or the
/// end of the last device activity, whichever is later. All shares are of it and add up to 1.
///
/// With device activities, per device and averaged over devices:
/// - Busy: time in which at least one kernel, copy or fill runs. Each instant counts once; where
///   several overlap it belongs to the one that began first. A kernel counts as
///   `casts` if a cast launched it; else `memory bandwidth` if its op's bytes over the op's device
///   time reach half of the measured copy rate; else `matrix products` if its op has FLOPs; else
///   `other kernels`. Copies and fills are `copies`.
/// - Idle: no activity runs. An idle interval belongs to `synchronisation` from the begin of a host
///   wait to the first activity that begins after that wait's end; to `waiting for data` where the
///   host thread that launched most is inside a data wait; else to `launch overhead`: the host was
///   not fast enough.
///
/// Without, it is the time of the thread that stepped: each instant belongs to the innermost range
/// then open. Time in allocators is `allocator` (with ProfilerOptions::memory), casts are `casts`,
/// data waits `waiting for data`; of the other ops and functions those with bytes over own time of
/// at least half the copy rate are `memory bandwidth`, those with FLOPs `matrix products`, the rest
/// `other ops`; instants in no op or function, modules and user ranges included, are `host code
/// between ops`.
struct BottleneckReport {
  bool on_device = false;
  int steps = 0;
  double step_seconds = 0;              // the time above over the steps
  double busy_share = 0;                // of the device; 1 without one
  double host_blocked_share = 0;        // host time inside waits for a device
  double flops_per_second = 0;          // over the whole time
  std::vector<Bottleneck> causes = {};  // largest share first
  /// Share of a cause by name; 0 if it does not occur.
  double share(const std::string& name) const;
  /// A readable report of several lines: losses of 5 % and more come with what helps.
  std::string text() const;
};

struct ProfileStep {
  std::int64_t number = 0;  // from the profiler's construction
  std::int64_t begin_ns = 0, end_ns = 0;
};

struct ProfileResult {
  int window = 0;        // counts the schedule's repetitions
  bool complete = true;  // false: stopped or destroyed before the schedule's last active step
  std::vector<ProfileStep> steps = {};
  std::vector<HostRange> ranges = {};           // by thread, then begin, outer before inner
  std::vector<DeviceActivity> activities = {};  // by device, then begin
  std::vector<ApiCall> calls = {};
  std::vector<MemoryChange> memory = {};  // by time
  std::vector<std::string> threads = {};  // 0: the thread that called step()
  double copy_rate = 0;  // bytes a second that a large copy reads and writes here; 0: not measured
  /// Why a part is missing, one sentence each: no kernel times, lost events.
  std::vector<std::string> notes = {};

  /// Rows in the order of `options.sort_by`.
  std::vector<ProfileRow> rows(const ProfileTableOptions& options = {}) const;
  /// The rows as text, with totals and notes below.
  std::string table(const ProfileTableOptions& options = {}) const;
  BottleneckReport bottlenecks() const;
  /// Writes Chrome's trace event format, for ui.perfetto.dev or chrome://tracing: strict JSON
  /// whatever the names (invalid UTF-8 becomes U+FFFD), complete or not at all. The folder must
  /// exist. Defined in io/.
  void write_trace(const std::string& path) const;
};

/// Puts ranges and activities into the order that ProfileResult promises; for hand-made results.
void sort_events(ProfileResult& result);

namespace detail {
/// Nesting of ranges in one pass over a sorted result: index of the range around each one of the
/// same thread, or -1, and own time without ranges within.
struct RangeTree {
  std::vector<std::int64_t> parent;
  std::vector<std::int64_t> self_ns;
  explicit RangeTree(const std::vector<HostRange>& ranges);
};
}  // namespace detail

}  // namespace mixtape
