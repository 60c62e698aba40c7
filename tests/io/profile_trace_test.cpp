// The trace file: strict JSON whatever the names, whole or not at all, every event in its place.
// CASES 112.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "engine/profiler.h"
#include "io/data_loader.h"
#include "io/json.h"
#include "ops/ops.h"
#include "tests/engine/profile_once.h"
#include "tests/io/io_test_util.h"

namespace mixtape {
namespace {

using mixtape::testing::profile_once;
using mixtape::testing::ranges_named;
using mixtape::testing::slurp;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;
using nlohmann::json;

json trace_of(const ProfileResult& result) {
  const TempDir folder;
  const auto path = folder / "trace.json";
  result.write_trace(path.string());
  return io::parse_json("trace", path.string(), slurp(path));
}

std::vector<json> events(const json& trace, const std::string& phase,
                         const std::string& category = "") {
  std::vector<json> found;
  for (const json& e : trace.at("traceEvents"))
    if (e.at("ph") == phase && (category.empty() || e.at("cat") == category)) found.push_back(e);
  return found;
}

TEST(Trace, any_name_round_trips) {
  const std::vector<std::string> names = {R"(a"b)",
                                          R"(a\b)",
                                          "line\nbreak",
                                          "byte \x01",
                                          "tab\t",
                                          "",
                                          "gr\xC3\xB6\xC3\x9F"
                                          "e",
                                          "\x7f",
                                          "</script>",
                                          std::string("nul\0inside", 10)};
  const ProfileResult result = profile_once([&] {
    for (const std::string& name : names) const RecordFunction range(name);
  });
  std::vector<std::string> read;
  for (const json& e : events(trace_of(result), "X", "user")) read.push_back(e.at("name"));
  EXPECT_EQ(read, names);
}

TEST(Trace, invalid_utf8_is_replaced) {
  const ProfileResult result = profile_once([] {
    const RecordFunction lone("a\xFFz");
    const RecordFunction cut("a\xC3");
    const RecordFunction overlong("\xC0\xAF");
    const RecordFunction surrogate("\xED\xA0\x80");
  });
  const auto ranges = events(trace_of(result), "X", "user");
  ASSERT_EQ(ranges.size(), 4u);
  EXPECT_EQ(ranges[0].at("name"), "a\xEF\xBF\xBDz");
  EXPECT_EQ(ranges[1].at("name"), "a\xEF\xBF\xBD");
  for (const json& e : ranges)
    EXPECT_NE(e.at("name").get<std::string>().find("\xEF\xBF\xBD"), std::string::npos);
}

TEST(Trace, of_no_events_is_valid) {
  const json trace = trace_of(ProfileResult{});
  EXPECT_TRUE(events(trace, "X").empty());
  EXPECT_EQ(trace.at("displayTimeUnit"), "ms");
  trace_of(profile_once([] {}));
}

TEST(Trace, holds_ops_steps_threads_and_memory) {
  const Tensor w = ones({3, 4}).set_requires_grad();
  const ProfileResult result = profile_once(
      [&] {
        sum(ones({2, 3}).matmul(w)).backward();
      },
      {.shapes = true});
  const json trace = trace_of(result);
  std::map<std::string, json> ops;
  for (const json& e : events(trace, "X", "op"))
    ops[e.at("name").get<std::string>() + " " + e.at("args").at("direction").get<std::string>()] =
        e;
  ASSERT_TRUE(ops.contains("matmul forward") && ops.contains("matmul backward"));
  const json& product = ops["matmul forward"];
  EXPECT_EQ(product.at("args").at("flops"), 2 * 2 * 3 * 4);
  EXPECT_EQ(product.at("args").at("inputs"), json({"float32(2, 3)", "float32(3, 4)"}));
  EXPECT_EQ(product.at("args").at("sequence"), ops["matmul backward"].at("args").at("sequence"));
  EXPECT_GE(product.at("ts").get<double>(), 0);
  EXPECT_GT(product.at("dur").get<double>(), 0);
  EXPECT_EQ(events(trace, "X", "step").size(), 1u);
  std::set<std::string> names;
  for (const json& e : events(trace, "M")) names.insert(e.at("args").at("name"));
  for (const char* name : {"host", "main thread", "steps"})
    EXPECT_TRUE(names.contains(name)) << name;
  const auto counters = events(trace, "C");
  ASSERT_FALSE(counters.empty());
  EXPECT_EQ(counters[0].at("name"), "memory of cpu");
  EXPECT_GE(counters[0].at("args").at("reserved"), counters[0].at("args").at("allocated"));
  std::multiset<json> starts, ends;
  for (const json& e : events(trace, "s", "backward")) starts.insert(e.at("id"));
  for (const json& e : events(trace, "f", "backward")) ends.insert(e.at("id"));
  EXPECT_EQ(starts, ends);
  EXPECT_GE(starts.size(), 2u);  // of matmul and sum
}

TEST(Trace, arrows_lead_from_the_call_to_its_kernel) {
  const HostRange op{.id = 5, .thread = 1, .begin_ns = 1000, .end_ns = 9000, .name = "relu"};
  const ApiCall call{
      .name = "cudaLaunchKernel", .range = 5, .correlation = 77, .begin_ns = 2000, .end_ns = 3000};
  const DeviceActivity kernel{.name = "void k<\"x\">()",
                              .device = 1,
                              .stream = 7,
                              .begin_ns = 4000,
                              .end_ns = 8000,
                              .range = 5,
                              .correlation = 77};
  const DeviceActivity late{.name = "k",
                            .device = 1,
                            .stream = 8,
                            .begin_ns = 8000,
                            .end_ns = 8500,
                            .range = 5,
                            .correlation = 78};
  const DeviceActivity unknown{.name = "k", .begin_ns = 8000, .end_ns = 8500};
  const json trace = trace_of({.ranges = {op},
                               .activities = {unknown, kernel, late},
                               .calls = {call},
                               .threads = {"main thread", "worker"}});
  const auto starts = events(trace, "s", "launch"), ends = events(trace, "f", "launch");
  ASSERT_EQ(starts.size(), 2u);
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_EQ(starts[0].at("tid"), 1);
  EXPECT_EQ(starts[0].at("ts"), 1.0);  // microseconds from the first event
  EXPECT_EQ(starts[1].at("ts"), 0.0);  // without a call: from the op
  EXPECT_EQ(ends[0].at("pid"), 2);
  EXPECT_EQ(ends[0].at("tid"), 7);
  EXPECT_EQ(ends[0].at("ts"), 3.0);
  EXPECT_EQ(ends[0].at("bp"), "e");
  EXPECT_EQ(starts[0].at("id"), ends[0].at("id"));
  EXPECT_EQ(events(trace, "X", "kernel").size(), 3u);
  EXPECT_EQ(events(trace, "X", "cuda").size(), 1u);
  std::set<std::string> names;
  for (const json& e : events(trace, "M")) names.insert(e.at("args").at("name"));
  for (const char* name : {"cuda:0", "cuda:1", "stream 7", "stream 8", "worker"})
    EXPECT_TRUE(names.contains(name)) << name;
}

TEST(Trace, is_written_whole_or_not_at_all) {
  const TempDir folder;
  const ProfileResult result = profile_once([] { ones({3}) + ones({3}); });
  EXPECT_TRUE(throws_error([&] { result.write_trace((folder / "none" / "t.json").string()); },
                           {"write_trace", "t.json"}));
  const auto path = folder / "trace.json";
  mixtape::testing::spew(path, "old");
  result.write_trace(path.string());
  io::parse_json("trace", path.string(), slurp(path));
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    files += entry.is_regular_file();
  EXPECT_EQ(files, 1u);
}

struct Numbers : io::Dataset {
  std::int64_t size() const override { return 8; }
  io::Example get(std::int64_t i, io::SampleRandom&) const override {
    return {tensor({static_cast<float>(i)}), scalar_tensor(i, {.dtype = Dtype::i64})};
  }
};

TEST(Trace, a_loaders_workers_and_the_wait_for_them_have_ranges) {
  const Numbers numbers;
  const ProfileResult result = profile_once([&] {
    io::DataLoader loader(numbers, {.batch_size = 2, .workers = 2});
    for (auto& [x, y] : loader) x + x;
  });
  const auto waits = ranges_named(result, "DataLoader::next"),
             loads = ranges_named(result, "DataLoader::load");
  EXPECT_EQ(waits.size(), 5u);  // four batches and the end
  EXPECT_EQ(loads.size(), 4u);
  for (const HostRange& r : waits) {
    EXPECT_EQ(r.kind, ProfileKind::data);
    EXPECT_EQ(r.thread, 0);
  }
  for (const HostRange& r : loads) EXPECT_NE(r.thread, 0);
  EXPECT_GT(result.bottlenecks().share("waiting for data"), 0);
}

}  // namespace
}  // namespace mixtape
