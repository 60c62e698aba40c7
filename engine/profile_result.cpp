#include "engine/profile_result.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <tuple>
#include <unordered_map>

namespace mixtape {

void sort_events(ProfileResult& result) {
  std::stable_sort(result.ranges.begin(), result.ranges.end(),
                   [](const HostRange& a, const HostRange& b) {
                     return std::tuple(a.thread, a.begin_ns, -a.end_ns, a.id) <
                            std::tuple(b.thread, b.begin_ns, -b.end_ns, b.id);
                   });
  std::stable_sort(result.activities.begin(), result.activities.end(),
                   [](const DeviceActivity& a, const DeviceActivity& b) {
                     return std::tuple(a.device, a.begin_ns) < std::tuple(b.device, b.begin_ns);
                   });
  std::stable_sort(
      result.memory.begin(), result.memory.end(),
      [](const MemoryChange& a, const MemoryChange& b) { return a.time_ns < b.time_ns; });
}

namespace detail {

RangeTree::RangeTree(const std::vector<HostRange>& ranges)
    : parent(ranges.size(), -1), self_ns(ranges.size()) {
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const HostRange& r = ranges[i];
    self_ns[i] = r.duration_ns();
    while (!open.empty() &&
           (ranges[open.back()].thread != r.thread || ranges[open.back()].end_ns < r.end_ns ||
            ranges[open.back()].end_ns <= r.begin_ns))
      open.pop_back();
    if (!open.empty()) {
      parent[i] = static_cast<std::int64_t>(open.back());
      self_ns[open.back()] -= r.duration_ns();
    }
    open.push_back(i);
  }
}

}  // namespace detail

namespace {

using Key = std::tuple<std::string, std::string, std::string, bool, ProfileKind>;

std::string shapes_text(const HostRange& r) {
  std::ostringstream out;
  for (std::size_t i = 0; i < r.inputs.size(); ++i)
    out << (i ? " " : "") << r.inputs[i].dtype << r.inputs[i].shape;
  return out.str();
}

Key key_of(const HostRange& r, ProfileGroup group) {
  switch (group) {
    case ProfileGroup::op: return {r.name, "", "", r.backward, r.kind};
    case ProfileGroup::op_and_shapes: return {r.name, "", shapes_text(r), r.backward, r.kind};
    case ProfileGroup::module: return {"", r.module, "", r.backward, ProfileKind::module};
    case ProfileGroup::op_and_module: return {r.name, r.module, "", r.backward, r.kind};
  }
  MT_THROW("ProfileResult::rows: invalid group ", static_cast<int>(group));
}

bool before(const ProfileRow& a, const ProfileRow& b, ProfileSort by) {
  const auto value = [by](const ProfileRow& r) -> double {
    switch (by) {
      case ProfileSort::device_time: return r.device_self;
      case ProfileSort::host_time: return r.host_self;
      case ProfileSort::host_total: return r.host_total;
      case ProfileSort::calls: return static_cast<double>(r.calls);
      case ProfileSort::flops: return r.flops;
      case ProfileSort::allocated: return static_cast<double>(r.allocated);
      case ProfileSort::name: return 0;
    }
    MT_THROW("ProfileResult::rows: invalid order ", static_cast<int>(by));
  };
  const double va = value(a), vb = value(b);
  if (va != vb) return va > vb;
  return std::tie(a.name, a.module, a.shapes, a.backward) <
         std::tie(b.name, b.module, b.shapes, b.backward);
}

constexpr double kSecond = 1e-9;  // seconds in a nanosecond

/// Device time that each range launched itself and with the ranges within.
struct DeviceTimes {
  std::vector<std::int64_t> self_ns, total_ns;
  DeviceTimes(const ProfileResult& result, const detail::RangeTree& tree)
      : self_ns(result.ranges.size()), total_ns(result.ranges.size()) {
    std::unordered_map<std::uint64_t, std::size_t> by_id;
    for (std::size_t i = 0; i < result.ranges.size(); ++i) by_id.emplace(result.ranges[i].id, i);
    for (const DeviceActivity& a : result.activities) {
      const auto it = a.range == 0 ? by_id.end() : by_id.find(a.range);
      if (it == by_id.end()) continue;
      self_ns[it->second] += a.duration_ns();
      for (auto i = static_cast<std::int64_t>(it->second); i >= 0;
           i = tree.parent[static_cast<std::size_t>(i)])
        total_ns[static_cast<std::size_t>(i)] += a.duration_ns();
    }
  }
};

}  // namespace

std::vector<ProfileRow> ProfileResult::rows(const ProfileTableOptions& options) const {
  MT_CHECK(options.rows >= 0, "ProfileResult::rows: expected at least 0 rows, got ", options.rows);
  const detail::RangeTree tree(ranges);
  const DeviceTimes device(*this, tree);
  std::map<Key, ProfileRow> by_key;
  std::vector<Key> keys;
  keys.reserve(ranges.size());
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const HostRange& r = ranges[i];
    keys.push_back(key_of(r, options.group_by));
    ProfileRow& row = by_key[keys.back()];
    if (row.calls == 0)
      std::tie(row.name, row.module, row.shapes, row.backward, row.kind) = keys.back();
    ++row.calls;
    row.host_self += kSecond * static_cast<double>(tree.self_ns[i]);
    row.device_self += kSecond * static_cast<double>(device.self_ns[i]);
    row.flops += r.flops;
    row.bytes += r.bytes;
    row.allocated += r.allocated;
    row.freed += r.freed;
    bool within_own_row = false;
    for (auto p = tree.parent[i]; p >= 0 && !within_own_row;
         p = tree.parent[static_cast<std::size_t>(p)])
      within_own_row = keys[static_cast<std::size_t>(p)] == keys.back();
    if (within_own_row) continue;
    row.host_total += kSecond * static_cast<double>(r.duration_ns());
    row.device_total += kSecond * static_cast<double>(device.total_ns[i]);
  }
  std::vector<ProfileRow> rows;
  rows.reserve(by_key.size());
  for (auto& [key, row] : by_key) rows.push_back(std::move(row));
  ProfileSort by = options.sort_by;
  if (by == ProfileSort::device_time && activities.empty()) by = ProfileSort::host_time;
  std::sort(rows.begin(), rows.end(),
            [by](const ProfileRow& a, const ProfileRow& b) { return before(a, b, by); });
  if (options.rows > 0 && rows.size() > static_cast<std::size_t>(options.rows))
    rows.resize(static_cast<std::size_t>(options.rows));
  return rows;
}

}  // namespace mixtape
