// The profiler's schedule and what it does when a run ends early; nesting of ranges. CASES 115.
#include "engine/profiler.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/cuda/nvtx.h"
#include "ops/ops.h"
#include "tests/engine/profile_once.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

using testing::expect_error;
using testing::profile_once;
using testing::ranges_named;

// ---- schedule ----------------------------------------------------------------------------------

std::string phases(const ProfilerSchedule& schedule, int steps) {
  std::string text;
  for (int i = 0; i < steps; ++i) {
    const ProfilerStepPlan plan = plan_step(schedule, i);
    text += "wuad"[static_cast<int>(plan.phase)];  // wait, warm-up, active, done
    if (plan.first_active) text += '<';
    if (plan.last_active) text += '>';
  }
  return text;
}

TEST(ProfilerSchedule, phases_of_steps) {
  EXPECT_EQ(phases({.wait = 1, .warmup = 1, .active = 2, .repeat = 1}, 6), "wua<a>dd");
  EXPECT_EQ(phases({.wait = 1, .warmup = 1, .active = 2, .repeat = 2}, 9), "wua<a>wua<a>d");
  EXPECT_EQ(phases({.wait = 1, .warmup = 0, .active = 1, .repeat = 0}, 6), "wa<>wa<>wa<>");
  EXPECT_EQ(phases({.active = 1}, 3), "a<>a<>a<>");
  EXPECT_EQ(phases({.wait = 1, .warmup = 2}, 6), "wuua<aa");
  EXPECT_EQ(phases({.active = 1, .repeat = 1, .skip_first = 2}, 4), "wwa<>d");
}

/// Runs `steps` steps of one op each and returns what on_trace got.
std::vector<ProfileResult> windows(const ProfilerSchedule& schedule, int steps) {
  std::vector<ProfileResult> results;
  Profiler profiler({.schedule = schedule,
                     .cuda = false,
                     .flops = false,
                     .on_trace = [&](const ProfileResult& r) { results.push_back(r); }});
  const Tensor x = ones({3});
  for (int i = 0; i < steps; ++i) {
    x + x;
    profiler.step();
  }
  return results;
}

TEST(Profiler, records_the_active_steps_alone) {
  const auto results = windows({.wait = 1, .warmup = 1, .active = 3, .repeat = 1}, 8);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(results[0].complete);
  EXPECT_EQ(ranges_named(results[0], "add").size(), 3u);
  ASSERT_EQ(results[0].steps.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(results[0].steps[i].number, static_cast<std::int64_t>(i + 2));
    EXPECT_LE(results[0].steps[i].begin_ns, ranges_named(results[0], "add")[i].begin_ns);
    EXPECT_GE(results[0].steps[i].end_ns, ranges_named(results[0], "add")[i].end_ns);
  }
}

TEST(Profiler, repeats_as_often_as_asked) {
  EXPECT_EQ(windows({.wait = 1, .active = 1, .repeat = 2}, 9).size(), 2u);
  const auto for_ever = windows({.wait = 1, .active = 1, .repeat = 0}, 9);
  ASSERT_EQ(for_ever.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(for_ever[static_cast<std::size_t>(i)].window, i);
    EXPECT_EQ(ranges_named(for_ever[static_cast<std::size_t>(i)], "add").size(), 1u);
  }
}

TEST(Profiler, back_to_back_windows_share_no_step) {
  const auto results = windows({.active = 2}, 4);
  ASSERT_EQ(results.size(), 2u);
  for (const ProfileResult& r : results) EXPECT_EQ(ranges_named(r, "add").size(), 2u);
}

TEST(Profiler, destroyed_within_the_active_steps_hands_over_what_there_is) {
  std::vector<ProfileResult> results;
  {
    Profiler profiler({.schedule = {.active = 5, .repeat = 1},
                       .on_trace = [&](const ProfileResult& r) { results.push_back(r); }});
    ones({3}) + ones({3});
    profiler.step();
    ones({3}) + ones({3});
  }
  ASSERT_EQ(results.size(), 1u);
  EXPECT_FALSE(results[0].complete);
  EXPECT_EQ(results[0].steps.size(), 2u);
  EXPECT_EQ(ranges_named(results[0], "add").size(), 2u);
  EXPECT_NE(results[0].table().find("ended before the schedule's last"), std::string::npos);
}

TEST(Profiler, an_exception_in_a_step_loses_nothing) {
  std::vector<ProfileResult> results;
  try {
    Profiler profiler({.schedule = {.active = 5, .repeat = 1},
                       .on_trace = [&](const ProfileResult& r) { results.push_back(r); }});
    ones({3}) * ones({3});
    ones({3}) + ones({4});
    FAIL() << "expected the sum to throw";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("add"), std::string::npos);
  }
  ASSERT_EQ(results.size(), 1u);
  EXPECT_FALSE(results[0].complete);
  EXPECT_EQ(ranges_named(results[0], "mul").size(), 1u);
  EXPECT_FALSE(ranges_named(results[0], "add").at(0).unfinished);  // closed by the exception
  Profiler next;                                                   // the failed one is gone
}

TEST(Profiler, destroyed_outside_of_active_steps_hands_over_nothing) {
  int calls = 0;
  {
    Profiler profiler({.schedule = {.wait = 1, .warmup = 1, .active = 1, .repeat = 1},
                       .on_trace = [&](const ProfileResult&) { ++calls; }});
    profiler.step();
    ones({3}) + ones({3});
    EXPECT_EQ(profiler.phase(), ProfilerPhase::warmup);
    expect_error([&] { profiler.result(); }, "expected a finished repetition");
  }
  EXPECT_EQ(calls, 0);
}

TEST(Profiler, goes_on_when_on_trace_throws) {
  int calls = 0;
  Profiler profiler({.schedule = {.active = 1}, .on_trace = [&](const ProfileResult&) {
                       if (++calls == 1) throw std::runtime_error("disk full");
                     }});
  EXPECT_THROW(profiler.step(), std::runtime_error);
  ones({3}) + ones({3});
  profiler.step();
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(ranges_named(profiler.result(), "add").size(), 1u);
}

TEST(Profiler, a_destructor_reports_what_on_trace_throws) {
  ::testing::internal::CaptureStderr();
  {
    Profiler profiler(
        {.on_trace = [](const ProfileResult&) { throw std::runtime_error("disk full"); }});
  }
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("disk full"), std::string::npos);
}

TEST(Profiler, refuses_a_second_one_and_bad_schedules) {
  {
    Profiler profiler;
    expect_error([] { Profiler second; }, "expected one at a time");
    ones({3}) + ones({3});
    profiler.stop();
    EXPECT_EQ(ranges_named(profiler.result(), "add").size(),
              1u);  // the refused one changed nothing
    Profiler after_stop;
  }
  expect_error([] { Profiler p({.schedule = {.wait = -1}}); }, "expected a schedule of numbers");
  expect_error([] { Profiler p({.schedule = {.repeat = 2}}); }, "expected active steps");
}

TEST(Profiler, records_nothing_when_it_is_off) {
  const ProfileResult result = profile_once([] { ones({3}) + ones({3}); });
  ones({3}) * ones({3});
  EXPECT_EQ(profile::mode(), 0u);
  EXPECT_FALSE(profile::any_open());
  const ProfileResult later = profile_once([] {});
  EXPECT_TRUE(later.ranges.empty());
  EXPECT_TRUE(later.memory.empty());
  EXPECT_TRUE(later.complete);
  EXPECT_TRUE(ranges_named(result, "mul").empty());
}

TEST(Profiler, says_why_there_are_no_kernel_times) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  const ProfileResult result = profile_once([] { ones({3}) + ones({3}); });
  ASSERT_EQ(result.notes.size(), 1u);
  EXPECT_NE(result.notes[0].find("CUDA times not available"), std::string::npos);
  EXPECT_TRUE(profile_once([] {}, {.cuda = false}).notes.empty());
}

// ---- ranges ------------------------------------------------------------------------------------

void expect_inside(const HostRange& inner, const HostRange& outer) {
  EXPECT_GE(inner.begin_ns, outer.begin_ns);
  EXPECT_LE(inner.end_ns, outer.end_ns);
}

TEST(RecordFunction, ranges_nest) {
  const ProfileResult result = profile_once([] {
    const RecordFunction outer("outer");
    {
      const RecordFunction inner("inner");
      ones({3}) + ones({3});
    }
    const RecordFunction second("inner");
  });
  ASSERT_EQ(ranges_named(result, "outer").size(), 1u);
  ASSERT_EQ(ranges_named(result, "inner").size(), 2u);
  const HostRange outer = ranges_named(result, "outer")[0];
  for (const HostRange& inner : ranges_named(result, "inner")) expect_inside(inner, outer);
  expect_inside(ranges_named(result, "add")[0], ranges_named(result, "inner")[0]);
  const detail::RangeTree tree(result.ranges);
  for (std::size_t i = 0; i < result.ranges.size(); ++i) {
    if (result.ranges[i].name != "add") continue;
    ASSERT_GE(tree.parent[i], 0);
    EXPECT_EQ(result.ranges[static_cast<std::size_t>(tree.parent[i])].name, "inner");
  }
}

// Push A, push B, end A, end B: B ends with A, and its own end changes nothing.
void end_in_the_wrong_order() {
  std::optional<RecordFunction> a, b;
  const RecordFunction around("around");
  a.emplace("a");
  b.emplace("b");
  a.reset();
  const RecordFunction next("next");
  b.reset();
}

void expect_balanced(const ProfileResult& result) {
  const HostRange a = ranges_named(result, "a")[0], b = ranges_named(result, "b")[0],
                  next = ranges_named(result, "next")[0],
                  around = ranges_named(result, "around")[0];
  EXPECT_EQ(a.end_ns, b.end_ns);
  expect_inside(b, a);
  EXPECT_GE(next.begin_ns, a.end_ns);
  expect_inside(next, around);
}

TEST(RecordFunction, is_last_in_first_out_whatever_the_order_of_ends) {
  expect_balanced(profile_once(end_in_the_wrong_order));
  EXPECT_FALSE(profile::any_open());
}

TEST(RecordFunction, stays_balanced_under_nvtx) {
  if (!nvtx::available()) {
    expect_error([] { EmitNvtx on; }, "this build has no NVTX");
    GTEST_SKIP() << "this build has no NVTX";
  }
  {
    const EmitNvtx on, twice;
    end_in_the_wrong_order();  // no profile: NVTX alone
    EXPECT_FALSE(profile::any_open());
    expect_balanced(profile_once(end_in_the_wrong_order));
    EXPECT_NE(profile::mode() & profile::kNvtx, 0u);
  }
  EXPECT_EQ(profile::mode(), 0u);
}

TEST(RecordFunction, ends_when_an_exception_passes) {
  const ProfileResult result = profile_once([] {
    const RecordFunction outer("outer");
    try {
      const RecordFunction a("a");
      const RecordFunction b("b");
      throw std::runtime_error("in b");
    } catch (const std::runtime_error&) {
    }
    EXPECT_TRUE(profile::any_open());  // outer is
    const RecordFunction next("next");
  });
  expect_inside(ranges_named(result, "next")[0], ranges_named(result, "outer")[0]);
  EXPECT_GE(ranges_named(result, "next")[0].begin_ns, ranges_named(result, "a")[0].end_ns);
  EXPECT_FALSE(profile::any_open());
}

TEST(RecordFunction, ended_on_another_thread_leaves_both_intact) {
  const ProfileResult result = profile_once([] {
    const RecordFunction around("around");
    auto moved = std::make_unique<RecordFunction>("moved");
    std::thread([range = std::move(moved)]() mutable {
      const RecordFunction there("there");
      range.reset();
    }).join();
    const RecordFunction next("next");
  });
  EXPECT_EQ(ranges_named(result, "there").size(), 1u);
  const HostRange around = ranges_named(result, "around")[0];
  EXPECT_EQ(ranges_named(result, "moved")[0].end_ns, around.end_ns);  // closed by the one around it
  expect_inside(ranges_named(result, "next")[0], around);
}

TEST(RecordFunction, open_at_the_end_is_cut_and_marked) {
  std::optional<RecordFunction> open;
  Profiler profiler;
  open.emplace("epoch");
  ones({3}) + ones({3});
  profiler.stop();
  open.reset();
  const auto found = ranges_named(profiler.result(), "epoch");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(found[0].unfinished);
  EXPECT_FALSE(ranges_named(profiler.result(), "add")[0].unfinished);
  EXPECT_TRUE(profile_once([] {}).ranges.empty());  // its end is nobody's
}

TEST(RecordFunction, opened_before_recording_does_not_disturb) {
  const RecordFunction before("before");
  const ProfileResult result = profile_once([] { ones({3}) + ones({3}); });
  EXPECT_TRUE(ranges_named(result, "before").empty());
  EXPECT_EQ(ranges_named(result, "add").size(), 1u);
}

}  // namespace
}  // namespace mixtape
