// The table and the bottleneck report on timelines made by hand, whose shares are known.
#include <gtest/gtest.h>

#include <numeric>

#include "engine/profile_result.h"
#include "engine/profile_text.h"
#include "tests/support/expect_error.h"

namespace mixtape {
namespace {

constexpr double kCopyRate = 1e9;  // one byte a nanosecond

HostRange range(std::uint64_t id, const char* name, std::int64_t begin, std::int64_t end,
                ProfileKind kind = ProfileKind::op) {
  return {.id = id, .kind = kind, .begin_ns = begin, .end_ns = end, .name = name};
}

DeviceActivity kernel(std::int64_t begin, std::int64_t end, std::uint64_t launched_by) {
  return {.name = "kernel", .begin_ns = begin, .end_ns = end, .range = launched_by};
}

ProfileResult result(std::int64_t begin, std::int64_t end, std::vector<HostRange> ranges,
                     std::vector<DeviceActivity> activities = {}) {
  ProfileResult r{.steps = {{.number = 0, .begin_ns = begin, .end_ns = end}},
                  .ranges = std::move(ranges),
                  .activities = std::move(activities),
                  .threads = {"main thread"},
                  .copy_rate = kCopyRate};
  sort_events(r);
  return r;
}

double sum_of_shares(const BottleneckReport& report) {
  return std::accumulate(report.causes.begin(), report.causes.end(), 0.0,
                         [](double total, const Bottleneck& b) { return total + b.share; });
}

// ---- on a device -------------------------------------------------------------------------------

TEST(DeviceReport, idle_time_is_launch_overhead_where_the_host_does_not_wait) {
  const BottleneckReport report =
      result(0, 1000, {range(1, "relu", 0, 10), range(2, "relu", 500, 510)},
             {kernel(100, 300, 1), kernel(600, 1000, 2)})
          .bottlenecks();
  EXPECT_TRUE(report.on_device);
  EXPECT_DOUBLE_EQ(report.busy_share, 0.6);
  EXPECT_DOUBLE_EQ(report.share("launch overhead"), 0.4);  // [0, 100) and [300, 600)
  EXPECT_DOUBLE_EQ(report.share("other kernels"), 0.6);
  EXPECT_DOUBLE_EQ(sum_of_shares(report), 1);
  EXPECT_NE(report.text().find("launch overhead 40.0 %: the device waits for the host"),
            std::string::npos)
      << report.text();
}

TEST(DeviceReport, synchronisation_lasts_until_the_device_has_work_again) {
  const BottleneckReport report =
      result(0, 1000,
             {range(1, "relu", 0, 10),
              range(2, "synchronize stream", 50, 400, ProfileKind::synchronize),
              range(3, "relu", 600, 610)},
             {kernel(0, 400, 1), kernel(700, 900, 3)})
          .bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("synchronisation"), 0.3);  // [400, 700): drained by the wait
  EXPECT_DOUBLE_EQ(report.share("launch overhead"), 0.1);  // [900, 1000)
  EXPECT_DOUBLE_EQ(report.host_blocked_share, 0.35);
  EXPECT_DOUBLE_EQ(sum_of_shares(report), 1);
}

TEST(DeviceReport, a_wait_without_later_work_lasts_until_the_end) {
  const BottleneckReport report =
      result(0, 1000,
             {range(1, "relu", 0, 10),
              range(2, "synchronize stream", 300, 500, ProfileKind::synchronize)},
             {kernel(0, 500, 1)})
          .bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("synchronisation"), 0.5);
  EXPECT_DOUBLE_EQ(report.share("launch overhead"), 0);
}

TEST(DeviceReport, waiting_for_data_is_told_from_launching) {
  const BottleneckReport report =
      result(0, 1000,
             {range(1, "DataLoader::next", 0, 300, ProfileKind::data), range(2, "relu", 400, 410)},
             {kernel(450, 1000, 2)})
          .bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("waiting for data"), 0.3);
  EXPECT_DOUBLE_EQ(report.share("launch overhead"), 0.15);
  EXPECT_DOUBLE_EQ(report.share("other kernels"), 0.55);
}

TEST(DeviceReport, busy_time_by_what_limits_it) {
  HostRange product = range(1, "linear", 0, 10), copy_like = range(2, "add", 10, 20),
            slow = range(3, "softmax", 20, 30), cast = range(4, "cast", 30, 40),
            thin = range(5, "linear", 40, 50);
  product.flops = 4e5, product.bytes = 100;  // 400 ns: 0.25 of a byte a ns
  copy_like.bytes = 150;                     // 200 ns: 0.75
  slow.bytes = 10;                           // 100 ns: 0.1
  cast.bytes = 100;                          // 100 ns: 1.0, but a cast
  thin.flops = 10, thin.bytes = 90;          // 100 ns: 0.9, a product limited by memory
  DeviceActivity upload = kernel(900, 1000, 0);
  upload.kind = ActivityKind::copy;
  const BottleneckReport report =
      result(0, 1000, {product, copy_like, slow, cast, thin},
             {kernel(0, 400, 1), kernel(400, 600, 2), kernel(600, 700, 3), kernel(700, 800, 4),
              kernel(800, 900, 5), upload})
          .bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("matrix products"), 0.4);
  EXPECT_DOUBLE_EQ(report.share("memory bandwidth"), 0.3);
  EXPECT_DOUBLE_EQ(report.share("other kernels"), 0.1);
  EXPECT_DOUBLE_EQ(report.share("casts"), 0.1);
  EXPECT_DOUBLE_EQ(report.share("copies"), 0.1);
  EXPECT_DOUBLE_EQ(report.busy_share, 1);
  EXPECT_DOUBLE_EQ(report.flops_per_second, (4e5 + 10) / 1e-6);
  const auto products =
      std::find_if(report.causes.begin(), report.causes.end(),
                   [](const Bottleneck& b) { return b.name == "matrix products"; });
  EXPECT_EQ(products->detail, "1.00 TFLOP/s");
  EXPECT_EQ(report.causes.front().name, "matrix products");
}

TEST(DeviceReport, an_op_of_several_kernels_is_judged_as_a_whole) {
  HostRange add = range(1, "add", 0, 10);
  add.bytes = 60;  // over 100 ns of two kernels
  const BottleneckReport report =
      result(0, 100, {add}, {kernel(0, 50, 1), kernel(50, 100, 1)}).bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("memory bandwidth"), 1);
}

TEST(DeviceReport, overlapping_kernels_count_each_instant_once) {
  HostRange cast = range(1, "cast", 0, 1);
  DeviceActivity beside = kernel(50, 150, 2);
  beside.stream = 7;
  const BottleneckReport report =
      result(0, 200, {cast, range(2, "relu", 1, 2)}, {kernel(0, 100, 1), beside}).bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("casts"), 0.5);
  EXPECT_DOUBLE_EQ(report.share("other kernels"), 0.25);
  EXPECT_DOUBLE_EQ(report.share("launch overhead"), 0.25);
}

TEST(DeviceReport, device_work_after_the_last_step_belongs_to_it) {
  const BottleneckReport report =
      result(0, 100, {range(1, "relu", 0, 1)}, {kernel(100, 400, 1)}).bottlenecks();
  EXPECT_DOUBLE_EQ(report.step_seconds, 400e-9);
  EXPECT_DOUBLE_EQ(report.share("other kernels"), 0.75);
}

TEST(DeviceReport, is_averaged_over_devices) {
  DeviceActivity second = kernel(0, 50, 1);
  second.device = 1;
  const BottleneckReport report =
      result(0, 100, {range(1, "relu", 0, 1)}, {kernel(0, 100, 1), second}).bottlenecks();
  EXPECT_DOUBLE_EQ(report.busy_share, 0.75);
  EXPECT_DOUBLE_EQ(report.share("launch overhead"), 0.25);
  EXPECT_DOUBLE_EQ(sum_of_shares(report), 1);
}

TEST(DeviceReport, replays_and_unknown_kernels_have_names) {
  const BottleneckReport report =
      result(0, 100, {range(1, "replay captured step", 0, 1, ProfileKind::function)},
             {kernel(0, 60, 1), kernel(60, 100, 99)})
          .bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("kernels of captured steps"), 0.6);
  EXPECT_DOUBLE_EQ(report.share("other kernels"), 0.4);
  EXPECT_NE(report.text().find("without capture"), std::string::npos);
}

// ---- on the host -------------------------------------------------------------------------------

TEST(HostReport, each_instant_belongs_to_the_innermost_range) {
  HostRange product = range(2, "linear", 100, 500), cast = range(3, "cast", 100, 200),
            copy_like = range(4, "add", 500, 700),
            data = range(5, "DataLoader::next", 700, 800, ProfileKind::data);
  product.flops = 3e5;
  cast.bytes = 100;
  copy_like.bytes = 100;
  copy_like.allocator_ns = 50;  // 150 ns of its own: 0.67 bytes a ns
  const ProfileResult r =
      result(0, 1000,
             {range(1, "net", 50, 700, ProfileKind::module), product, cast, copy_like, data,
              range(6, "load", 720, 780, ProfileKind::function), range(7, "argmax", 800, 900)});
  const BottleneckReport report = r.bottlenecks();
  EXPECT_FALSE(report.on_device);
  EXPECT_DOUBLE_EQ(report.share("matrix products"), 0.3);
  EXPECT_DOUBLE_EQ(report.share("casts"), 0.1);
  EXPECT_DOUBLE_EQ(report.share("memory bandwidth"), 0.15);
  EXPECT_DOUBLE_EQ(report.share("allocator"), 0.05);
  EXPECT_DOUBLE_EQ(report.share("waiting for data"), 0.1);
  EXPECT_DOUBLE_EQ(report.share("other ops"), 0.1);
  EXPECT_DOUBLE_EQ(report.share("host code between ops"), 0.2);  // [0, 100) and [900, 1000)
  EXPECT_DOUBLE_EQ(sum_of_shares(report), 1);
}

TEST(HostReport, counts_the_stepping_thread_alone) {
  HostRange elsewhere = range(2, "DataLoader::load", 0, 100, ProfileKind::function);
  elsewhere.thread = 1;
  const BottleneckReport report =
      result(0, 100, {range(1, "relu", 0, 40), elsewhere}).bottlenecks();
  EXPECT_DOUBLE_EQ(report.share("other ops"), 0.4);
  EXPECT_DOUBLE_EQ(report.share("host code between ops"), 0.6);
}

TEST(HostReport, of_nothing_is_empty) {
  const BottleneckReport none = ProfileResult{}.bottlenecks();
  EXPECT_TRUE(none.causes.empty());
  EXPECT_NE(none.text().find("0 steps"), std::string::npos);
  const BottleneckReport idle = result(0, 100, {}).bottlenecks();
  EXPECT_DOUBLE_EQ(idle.share("host code between ops"), 1);
  EXPECT_NE(idle.text().find("No loss reaches 5 %"), std::string::npos);
}

// ---- the table ---------------------------------------------------------------------------------

ProfileResult two_ops() {
  HostRange a = range(1, "a", 0, 1000), inner = range(2, "b", 200, 500),
            b = range(3, "b", 1000, 1100), back = range(4, "a", 1100, 1150);
  a.module = "net.first", inner.module = "net.first", b.module = "net.second";
  a.flops = 7;
  inner.allocated = 64, b.allocated = 64;
  back.backward = true;
  return result(0, 2000, {a, inner, b, back});
}

std::vector<std::string> names(const ProfileResult& r, ProfileSort by) {
  std::vector<std::string> out;
  for (const ProfileRow& row : r.rows({.sort_by = by}))
    out.push_back(row.name + (row.backward ? "'" : ""));
  return out;
}

TEST(Table, own_and_total_times) {
  const auto rows = two_ops().rows({.sort_by = ProfileSort::host_time});
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].name, "a");
  EXPECT_DOUBLE_EQ(rows[0].host_total, 1000e-9);
  EXPECT_DOUBLE_EQ(rows[0].host_self, 700e-9);
  EXPECT_EQ(rows[1].name, "b");
  EXPECT_EQ(rows[1].calls, 2);
  EXPECT_DOUBLE_EQ(rows[1].host_total, 400e-9);
  EXPECT_EQ(rows[1].allocated, 128);
}

TEST(Table, sorts_by_each_column) {
  const ProfileResult r = two_ops();
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(r, ProfileSort::host_time), (Names{"a", "b", "a'"}));
  EXPECT_EQ(names(r, ProfileSort::device_time), (Names{"a", "b", "a'"}));  // no device: host time
  EXPECT_EQ(names(r, ProfileSort::host_total), (Names{"a", "b", "a'"}));
  EXPECT_EQ(names(r, ProfileSort::calls), (Names{"b", "a", "a'"}));
  EXPECT_EQ(names(r, ProfileSort::flops), (Names{"a", "a'", "b"}));
  EXPECT_EQ(names(r, ProfileSort::allocated), (Names{"b", "a", "a'"}));
  EXPECT_EQ(names(r, ProfileSort::name), (Names{"a", "a'", "b"}));
}

TEST(Table, groups_by_module) {
  const auto rows =
      two_ops().rows({.sort_by = ProfileSort::host_time, .group_by = ProfileGroup::module});
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].module, "net.first");
  EXPECT_EQ(rows[0].calls, 2);
  EXPECT_DOUBLE_EQ(rows[0].host_total, 1000e-9);  // b within a counts once
  EXPECT_DOUBLE_EQ(rows[0].host_self, 1000e-9);
  EXPECT_EQ(rows[1].module, "net.second");
}

TEST(Table, device_times_go_to_the_launching_op_and_to_those_around_it) {
  ProfileResult r = two_ops();
  r.activities = {kernel(300, 700, 2), kernel(700, 800, 1), kernel(800, 900, 42)};
  const auto rows = r.rows();
  EXPECT_EQ(rows[0].name, "b");
  EXPECT_DOUBLE_EQ(rows[0].device_self, 400e-9);
  EXPECT_DOUBLE_EQ(rows[1].device_self, 100e-9);
  EXPECT_DOUBLE_EQ(rows[1].device_total, 500e-9);
  EXPECT_NE(r.table().find("device self"), std::string::npos);
}

TEST(Table, is_cut_and_says_so) {
  const std::string text = two_ops().table({.rows = 1});
  EXPECT_NE(text.find("... and 2 more"), std::string::npos) << text;
  EXPECT_NE(text.find("1 step, host 1.1 us"), std::string::npos) << text;
  EXPECT_EQ(two_ops().rows({.rows = 0}).size(), 3u);
  testing::expect_error([] { two_ops().rows({.rows = -1}); }, "expected at least 0 rows");
}

TEST(Table, odd_names_stay_on_their_line) {
  const std::string text =
      result(0, 10, {range(1, "line\nbreak\x01", 0, 5), range(2, "", 5, 6)}).table();
  EXPECT_NE(text.find("line\\x0abreak\\x01"), std::string::npos) << text;
  EXPECT_NE(text.find("\"\""), std::string::npos) << text;
}

TEST(ProfileText, numbers) {
  EXPECT_EQ(detail::format_seconds(0), "0.0 us");
  EXPECT_EQ(detail::format_seconds(12.34e-6), "12.3 us");
  EXPECT_EQ(detail::format_seconds(4.56e-3), "4.56 ms");
  EXPECT_EQ(detail::format_seconds(7.891), "7.89 s");
  EXPECT_EQ(detail::format_rate(3.12e14, "FLOP/s"), "312 TFLOP/s");
  EXPECT_EQ(detail::format_rate(0, "B/s"), "0.00 B/s");
  EXPECT_EQ(detail::format_percent(0.1234), "12.3 %");
}

}  // namespace
}  // namespace mixtape
