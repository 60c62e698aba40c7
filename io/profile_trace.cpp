// Profiles as Chrome trace events (the "Trace Event Format" document; Perfetto reads it). The host
// is process 0 with a row for each thread, each device a process with a row for each stream. Times
// are microseconds from the first event.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "engine/check.h"
#include "engine/profile_result.h"
#include "io/file.h"
#include "io/text.h"

namespace mixtape {
namespace {

using nlohmann::json;

constexpr int kStepRow = 1 << 20;  // thread number of the row of steps
constexpr int kFirstDevice = 1;    // process number of cuda:0

const char* category(ProfileKind kind) {
  switch (kind) {
    case ProfileKind::op: return "op";
    case ProfileKind::function: return "function";
    case ProfileKind::module: return "module";
    case ProfileKind::user: return "user";
    case ProfileKind::data: return "data";
    case ProfileKind::synchronize: return "synchronize";
  }
  return "range";
}

const char* category(ActivityKind kind) {
  switch (kind) {
    case ActivityKind::kernel: return "kernel";
    case ActivityKind::copy: return "copy";
    case ActivityKind::fill: return "fill";
  }
  return "activity";
}

std::int64_t first_time(const ProfileResult& r) {
  std::int64_t first = INT64_MAX;
  for (const ProfileStep& s : r.steps) first = std::min(first, s.begin_ns);
  for (const HostRange& h : r.ranges) first = std::min(first, h.begin_ns);
  for (const DeviceActivity& a : r.activities) first = std::min(first, a.begin_ns);
  for (const MemoryChange& m : r.memory) first = std::min(first, m.time_ns);
  return first == INT64_MAX ? 0 : first;
}

/// Writes one event after the other, so that a long trace is never in memory as a whole.
class Writer {
 public:
  Writer(const ProfileResult& result, io::AtomicFile& file)
      : result_(result), file_(file), origin_ns_(first_time(result)) {
    for (const HostRange& r : result.ranges) thread_of_[r.id] = r.thread;
  }

  void write() {
    text_ = R"({"displayTimeUnit":"ms","traceEvents":[)";
    names();
    for (const ProfileStep& s : result_.steps)
      event(complete("step " + std::to_string(s.number), "step", 0, kStepRow, s.begin_ns, s.end_ns,
                     json::object()));
    for (const HostRange& r : result_.ranges) range(r);
    for (const ApiCall& c : result_.calls) call(c);
    for (const DeviceActivity& a : result_.activities) activity(a);
    backward_flows();
    memory();
    text_ += R"(],"otherData":)" + other_data().dump() + "}\n";
    file_.write(text_);
  }

 private:
  double us(std::int64_t ns) const { return static_cast<double>(ns - origin_ns_) / 1000; }

  void event(const json& e) {
    text_ += (first_ ? "\n" : ",\n") + e.dump();
    first_ = false;
    if (text_.size() < (std::size_t{1} << 20)) return;
    file_.write(text_);
    text_.clear();
  }

  json complete(const std::string& name, const char* cat, int process, std::int64_t row,
                std::int64_t begin, std::int64_t end, json args) const {
    return {{"ph", "X"},
            {"name", io::valid_utf8(name)},
            {"cat", cat},
            {"pid", process},
            {"tid", row},
            {"ts", us(begin)},
            {"dur", static_cast<double>(end - begin) / 1000},
            {"args", std::move(args)}};
  }

  void name(const char* what, int process, std::int64_t row, const std::string& text) {
    event({{"ph", "M"},
           {"name", what},
           {"pid", process},
           {"tid", row},
           {"args", {{"name", io::valid_utf8(text)}}}});
  }

  void names() {
    name("process_name", 0, 0, "host");
    for (std::size_t i = 0; i < result_.threads.size(); ++i)
      name("thread_name", 0, static_cast<std::int64_t>(i), result_.threads[i]);
    if (!result_.steps.empty()) name("thread_name", 0, kStepRow, "steps");
    std::set<std::pair<int, std::uint32_t>> rows;
    for (const DeviceActivity& a : result_.activities) rows.insert({a.device, a.stream});
    int named = -1;
    for (const auto& [device, stream] : rows) {
      if (device != std::exchange(named, device))
        name("process_name", kFirstDevice + device, 0, "cuda:" + std::to_string(device));
      name("thread_name", kFirstDevice + device, stream, "stream " + std::to_string(stream));
    }
  }

  void range(const HostRange& r) {
    json args = {{"id", r.id}};
    if (!r.module.empty()) args["module"] = io::valid_utf8(r.module);
    if (r.kind == ProfileKind::op) args["direction"] = r.backward ? "backward" : "forward";
    if (r.sequence != 0) args["sequence"] = r.sequence;
    if (r.flops > 0) args["flops"] = r.flops;
    if (r.bytes > 0) args["bytes"] = r.bytes;
    if (r.allocated > 0) args["allocated"] = r.allocated;
    if (r.freed > 0) args["freed"] = r.freed;
    if (r.unfinished) args["unfinished"] = true;
    for (const TypedShape& t : r.inputs) args["inputs"].push_back(detail::concat(t.dtype, t.shape));
    event(complete(r.name, category(r.kind), 0, r.thread, r.begin_ns, r.end_ns, std::move(args)));
  }

  int thread_of(std::uint64_t range) const {
    const auto it = thread_of_.find(range);
    return it == thread_of_.end() ? 0 : it->second;
  }

  void call(const ApiCall& c) {
    calls_[c.correlation] = &c;
    event(complete(c.name, "cuda", 0, thread_of(c.range), c.begin_ns, c.end_ns,
                   {{"correlation", c.correlation}, {"range", c.range}}));
  }

  void activity(const DeviceActivity& a) {
    json args = {{"range", a.range}, {"correlation", a.correlation}};
    if (a.bytes > 0) args["bytes"] = a.bytes;
    event(complete(a.name, category(a.kind), kFirstDevice + a.device, a.stream, a.begin_ns,
                   a.end_ns, std::move(args)));
    launch_flow(a);
  }

  void flow(const char* phase, const char* name, std::uint64_t id, int process, std::int64_t row,
            std::int64_t time) {
    json e = {{"ph", phase},    {"name", name}, {"cat", name},   {"id", id},
              {"pid", process}, {"tid", row},   {"ts", us(time)}};
    if (*phase == 'f') e["bp"] = "e";
    event(e);
  }

  /// From the call that launched it, or the op where the call is not known.
  void launch_flow(const DeviceActivity& a) {
    const auto call = calls_.find(a.correlation);
    if (call == calls_.end() && !thread_of_.contains(a.range)) return;
    const std::uint64_t id = ++flows_;
    if (call != calls_.end())
      flow("s", "launch", id, 0, thread_of(call->second->range), call->second->begin_ns);
    else
      flow("s", "launch", id, 0, thread_of(a.range), begin_of(a.range));
    flow("f", "launch", id, kFirstDevice + a.device, a.stream, a.begin_ns);
  }

  std::int64_t begin_of(std::uint64_t range) {
    if (begin_of_.empty())
      for (const HostRange& r : result_.ranges) begin_of_[r.id] = r.begin_ns;
    return begin_of_.at(range);
  }

  /// From an op's forward to its backward.
  void backward_flows() {
    std::unordered_map<std::uint64_t, const HostRange*> forward;
    for (const HostRange& r : result_.ranges)
      if (r.sequence != 0 && !r.backward) forward.emplace(r.sequence, &r);
    for (const HostRange& r : result_.ranges) {
      const auto from = r.backward ? forward.find(r.sequence) : forward.end();
      if (from == forward.end()) continue;
      const std::uint64_t id = ++flows_;
      flow("s", "backward", id, 0, from->second->thread, from->second->begin_ns);
      flow("f", "backward", id, 0, r.thread, r.begin_ns);
    }
  }

  void memory() {
    for (const MemoryChange& m : result_.memory)
      event({{"ph", "C"},
             {"name", detail::concat("memory of ", m.pinned ? "pinned host" : "",
                                     m.pinned ? "" : detail::concat(m.device))},
             {"pid", 0},
             {"tid", 0},
             {"ts", us(m.time_ns)},
             {"args", {{"allocated", m.allocated}, {"reserved", m.reserved}}}});
  }

  json other_data() const {
    json notes = json::array();
    for (const std::string& note : result_.notes) notes.push_back(io::valid_utf8(note));
    return {{"library", "mixtape"},
            {"complete", result_.complete},
            {"notes", std::move(notes)},
            {"copy_bytes_per_second", result_.copy_rate}};
  }

  const ProfileResult& result_;
  io::AtomicFile& file_;
  const std::int64_t origin_ns_;
  std::string text_;
  bool first_ = true;
  std::uint64_t flows_ = 0;
  std::unordered_map<std::uint64_t, int> thread_of_;
  std::unordered_map<std::uint64_t, std::int64_t> begin_of_;
  std::unordered_map<std::uint64_t, const ApiCall*> calls_;
};

}  // namespace

void ProfileResult::write_trace(const std::string& path) const {
  io::AtomicFile file("write_trace", path);
  Writer(*this, file).write();
  file.commit();
}

}  // namespace mixtape
