// The profiler: ranges of host time of ops, modules and functions, CUDA kernel times tied to the op
// that launched them, memory, FLOPs.
//
//   #include <engine/profile_result.h>
//   mt::Profiler profiler({.schedule = {.wait = 5, .warmup = 1, .active = 3, .repeat = 1},
//                          .on_trace = [](const mt::ProfileResult& r) {
//                            std::fputs(r.table().c_str(), stderr);
//                            std::fputs(r.bottlenecks().text().c_str(), stderr);
//                            r.write_trace("trace.json");
//                          }});
//   for (auto& [x, y] : loader) {
//     train_step(x, y);
//     profiler.step();
//   }
//
// docs/profiling.md says how to read the results. While nothing is recorded an op pays one branch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/function.h"
#include "engine/profile_hooks.h"

namespace mixtape {

struct ProfileResult;  // engine/profile_result.h

/// Which steps are recorded. A repetition is `wait` steps in which nothing happens, `warmup` steps
/// that are recorded and dropped (the first recorded steps pay for buffers and for CUPTI), and
/// `active` steps that make one result.
struct ProfilerSchedule {
  int wait = 0, warmup = 0;
  int active = 0;      // 0: until stop()
  int repeat = 0;      // repetitions; 0: for ever
  int skip_first = 0;  // steps before the first repetition
};

struct ProfilerOptions {
  ProfilerSchedule schedule = {};
  bool cuda = true;     // kernel times, where there is a GPU; else the result's notes say why not
  bool memory = true;   // allocations, releases, time in allocators
  bool shapes = false;  // shapes of ops' inputs
  bool flops = true;    // FLOPs and bytes; measures the rate of a large copy once (0.1 s)
  /// Called when a repetition is finished, from step() or stop(), and from the destructor if that
  /// comes first; there an exception of it is reported on stderr and goes no further.
  Function<void(const ProfileResult&)> on_trace = {};
};

enum class ProfilerPhase : std::uint8_t { wait, warmup, active, done };

/// Records ops of all threads of the process; one at a time. Construction begins step 0. What ends
/// recording early (stop(), destruction, an exception that unwinds past it) still gives the steps
/// so far to on_trace, as an incomplete result.
class Profiler {
 public:
  explicit Profiler(ProfilerOptions options = {});
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Ends one step and begins the next. At the end of the active ones it waits for the device.
  void step();
  /// Ends recording; nothing is recorded from here on. May be called again.
  void stop();
  ProfilerPhase phase() const;
  /// Of the last repetition; throws if none is finished.
  const ProfileResult& result() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Names what this thread does until the scope ends, in profiles and in Nsight Systems. Any text is
/// fine as a name.
///
///   { mt::RecordFunction range("tokenize");  batch = tokenize(lines); }
class RecordFunction {
 public:
  explicit RecordFunction(std::string_view name) {
    if (profile::mode() != 0) [[unlikely]]
      open_ = profile::open(this, ProfileKind::user, nullptr, name);
  }
  ~RecordFunction() {
    if (open_) [[unlikely]]
      profile::close(this);
  }
  RecordFunction(const RecordFunction&) = delete;
  RecordFunction& operator=(const RecordFunction&) = delete;

 private:
  bool open_ = false;
};

/// Ops, modules and RecordFunction scopes show in Nsight Systems as NVTX ranges while one of these
/// lives; MIXTAPE_NVTX=1 turns them on for a whole process. Throws where this build has no NVTX.
class EmitNvtx {
 public:
  EmitNvtx() { profile::count_nvtx(+1); }
  ~EmitNvtx() { profile::count_nvtx(-1); }
  EmitNvtx(const EmitNvtx&) = delete;
  EmitNvtx& operator=(const EmitNvtx&) = delete;
};

/// The phase of a step, counted from 0, and whether it begins or ends a repetition's active steps.
struct ProfilerStepPlan {
  ProfilerPhase phase = ProfilerPhase::wait;
  bool first_active = false, last_active = false;
};
ProfilerStepPlan plan_step(const ProfilerSchedule& schedule, std::int64_t step);

}  // namespace mixtape
