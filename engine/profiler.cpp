#include "engine/profiler.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <optional>

#include "engine/check.h"
#include "engine/copy_rate.h"
#include "engine/cuda/backend.h"
#include "engine/cuda/cupti.h"
#include "engine/profile_recording.h"
#include "engine/profile_result.h"

namespace mixtape {
namespace {

std::atomic<bool> in_use{false};

void check_schedule(const ProfilerSchedule& s) {
  MT_CHECK(s.wait >= 0 && s.warmup >= 0 && s.active >= 0 && s.repeat >= 0 && s.skip_first >= 0,
           "Profiler: expected a schedule of numbers of at least 0, got wait ", s.wait, ", warmup ",
           s.warmup, ", active ", s.active, ", repeat ", s.repeat, ", skip_first ", s.skip_first);
  MT_CHECK(s.active > 0 || s.repeat <= 1, "Profiler: expected active steps in a schedule that ",
           "repeats ", s.repeat, " times, got none (0 records until stop())");
}

}  // namespace

ProfilerStepPlan plan_step(const ProfilerSchedule& s, std::int64_t step) {
  step -= s.skip_first;
  if (step < 0) return {ProfilerPhase::wait, false, false};
  const std::int64_t lead = std::int64_t{s.wait} + s.warmup;
  if (s.active == 0) {  // one repetition without an end
    if (step < s.wait) return {ProfilerPhase::wait, false, false};
    if (step < lead) return {ProfilerPhase::warmup, false, false};
    return {ProfilerPhase::active, step == lead, false};
  }
  const std::int64_t length = lead + s.active, at = step % length;
  if (s.repeat > 0 && step / length >= s.repeat) return {ProfilerPhase::done, false, false};
  if (at < s.wait) return {ProfilerPhase::wait, false, false};
  if (at < lead) return {ProfilerPhase::warmup, false, false};
  return {ProfilerPhase::active, at == lead, at == length - 1};
}

struct Profiler::Impl {
  ProfilerOptions options;
  std::int64_t step = 0;
  ProfilerStepPlan plan;
  bool stopped = false;
  bool recording = false, cupti_on = false;  // recording: warm-up included
  std::string no_cuda;                       // why there are no kernel times
  int windows = 0;
  std::vector<ProfileStep> steps;  // of the repetition under way
  std::int64_t step_begin_ns = 0;
  std::optional<ProfileResult> last;

  explicit Impl(ProfilerOptions o) : options(std::move(o)) { check_schedule(options.schedule); }

  // ---- recording -------------------------------------------------------------------------------

  unsigned mode() const {
    unsigned mode = profile::kRecord;
    if (options.memory) mode |= profile::kMemory;
    if (options.shapes) mode |= profile::kShapes;
    if (options.flops) mode |= profile::kWork;
    if (cupti_on) mode |= profile::kCupti;
    return mode;
  }

  /// Begins the step that `plan` is for.
  void begin_step() {
    const bool wanted = plan.phase == ProfilerPhase::warmup || plan.phase == ProfilerPhase::active;
    if (!wanted && recording) stop_recording();
    if (wanted && !recording) {
      if (options.cuda) start_cupti();
      recording = true;
      profile::start(mode());
    }
    if (plan.first_active) {
      if (cupti_on) {
        synchronize_quietly();  // earlier work does not reach into the first step
        cupti::discard();
      }
      steps.clear();
      profile::start(mode());
    }
    step_begin_ns = profile::now_ns();
  }

  // A profile without kernel times is better than none: the result says what is missing.
  void start_cupti() {
    no_cuda.clear();
    if (cuda_device_count() == 0) {
      no_cuda = "CUDA times not available: " + cudart::unavailable_reason();
      return;
    }
    try {
      cupti::start();
      cupti_on = true;
    } catch (const Error& e) {
      no_cuda = std::string("CUDA times not available: ") + e.what();
    }
  }

  void stop_recording() {
    recording = false;
    if (std::exchange(cupti_on, false)) cupti::stop();
    profile::stop();
  }

  void end_step() {
    if (plan.phase == ProfilerPhase::active)
      steps.push_back({.number = step, .begin_ns = step_begin_ns, .end_ns = profile::now_ns()});
  }

  // An error of the device is for whoever waits next; the profile up to it is worth keeping.
  static void synchronize_quietly() noexcept {
    for (int i = 0; i < cuda_device_count(); ++i) cudart::synchronize_device_quietly(i);
  }

  // ---- results ---------------------------------------------------------------------------------

  ProfileResult collect() {
    const std::int64_t end_ns = profile::now_ns();
    if (cupti_on) synchronize_quietly();
    profile::Recording recorded = profile::stop();
    ProfileResult result{.window = windows++,
                         .steps = std::exchange(steps, {}),
                         .ranges = std::move(recorded.ranges),
                         .memory = std::move(recorded.memory),
                         .threads = std::move(recorded.threads)};
    std::uint64_t lost = recorded.lost;
    if (cupti_on) lost += collect_cupti(result);
    if (!no_cuda.empty()) result.notes.push_back(no_cuda);
    if (lost > 0)
      result.notes.push_back(std::to_string(lost) + " events were lost for lack of memory");
    sort_events(result);
    if (stopped) add_partial_step(result, end_ns);
    if (options.flops) {
      const bool on_device = !result.activities.empty();
      result.copy_rate =
          detail::copy_rate(on_device ? Device::cuda(result.activities[0].device) : Device::cpu());
    }
    return result;
  }

  std::uint64_t collect_cupti(ProfileResult& result) {
    try {
      cupti::Activities taken = cupti::take();
      result.activities = std::move(taken.device);
      result.calls = std::move(taken.calls);
      return taken.lost;
    } catch (const Error& e) {
      result.notes.push_back(std::string("CUDA times not available: ") + e.what());
      return 0;
    }
  }

  /// The step that stop() cut, if anything was done in it. A schedule without an end is complete
  /// then, another is not.
  void add_partial_step(ProfileResult& result, std::int64_t end_ns) const {
    const bool any = std::any_of(result.ranges.begin(), result.ranges.end(),
                                 [&](const HostRange& r) { return r.begin_ns >= step_begin_ns; });
    if (any) result.steps.push_back({.number = step, .begin_ns = step_begin_ns, .end_ns = end_ns});
    result.complete = options.schedule.active == 0;
    if (!result.complete)
      result.notes.emplace_back("recording ended before the schedule's last active step");
  }

  void hand_over(ProfileResult result) {
    last = std::move(result);
    if (options.on_trace) options.on_trace(*last);
  }
};

Profiler::Profiler(ProfilerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  MT_CHECK(!in_use.exchange(true), "Profiler: expected one at a time, got a second");
  try {
    impl_->plan = plan_step(impl_->options.schedule, 0);
    impl_->begin_step();
  } catch (...) {
    impl_->stop_recording();
    in_use = false;
    throw;
  }
}

Profiler::~Profiler() {
  try {
    stop();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mixtape: Profiler: its last result was not handled: %s\n", e.what());
  } catch (...) {
    std::fputs("mixtape: Profiler: its last result was not handled\n", stderr);
  }
}

void Profiler::step() {
  Impl& self = *impl_;
  if (self.plan.phase == ProfilerPhase::done) return;
  self.end_step();
  std::exception_ptr error;
  const bool finished = self.plan.last_active;
  std::optional<ProfileResult> result;
  if (finished) result = self.collect();
  self.plan = plan_step(self.options.schedule, ++self.step);
  if (finished) {
    try {  // on_trace takes its time between two steps, and the next begins even if it throws
      self.hand_over(std::move(*result));
    } catch (...) {
      error = std::current_exception();
    }
  }
  self.begin_step();
  if (error) std::rethrow_exception(error);
}

void Profiler::stop() {
  Impl& self = *impl_;
  if (std::exchange(self.stopped, true)) return;
  const bool active = self.plan.phase == ProfilerPhase::active;
  self.plan.phase = ProfilerPhase::done;
  std::optional<ProfileResult> finished;
  if (active) finished = self.collect();
  self.stop_recording();
  in_use = false;
  const bool empty = finished && finished->steps.empty() && !finished->complete;
  if (finished && !empty) self.hand_over(std::move(*finished));
}

ProfilerPhase Profiler::phase() const { return impl_->plan.phase; }

const ProfileResult& Profiler::result() const {
  MT_CHECK(impl_->last.has_value(), "Profiler::result: expected a finished repetition, got none");
  return *impl_->last;
}

}  // namespace mixtape
