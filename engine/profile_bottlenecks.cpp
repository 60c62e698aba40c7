// The bottleneck report: interval arithmetic on one timeline. BottleneckReport says how each share
// is defined.
#include <algorithm>
#include <map>
#include <span>
#include <unordered_map>

#include "engine/profile_result.h"
#include "engine/profile_text.h"

namespace mixtape {
namespace {

constexpr const char* kCasts = "casts";
constexpr const char* kBandwidth = "memory bandwidth";
constexpr const char* kProducts = "matrix products";
constexpr const char* kData = "waiting for data";
constexpr const char* kSynchronisation = "synchronisation";
constexpr double kNearCopyRate = 0.5;  // of the copy rate: limited by memory
constexpr double kNotable = 0.05;      // share of the step from which a loss is worth advice

// ---- intervals ---------------------------------------------------------------------------------

struct Interval {
  std::int64_t begin, end;
};
using Intervals = std::vector<Interval>;  // disjoint and in order, once united

Intervals united(Intervals all) {
  std::sort(all.begin(), all.end(), [](Interval a, Interval b) { return a.begin < b.begin; });
  Intervals out;
  for (const Interval& i : all) {
    if (i.begin >= i.end) continue;
    if (!out.empty() && i.begin <= out.back().end)
      out.back().end = std::max(out.back().end, i.end);
    else
      out.push_back(i);
  }
  return out;
}

/// The parts of a that b covers, or does not.
Intervals cut(const Intervals& a, const Intervals& b, bool covered) {
  Intervals out;
  std::size_t first = 0;
  for (const Interval& i : a) {
    std::int64_t at = i.begin;
    while (first < b.size() && b[first].end <= i.begin) ++first;
    for (std::size_t k = first; k < b.size() && b[k].begin < i.end; ++k) {
      const Interval common{std::max(b[k].begin, i.begin), std::min(b[k].end, i.end)};
      if (covered)
        out.push_back(common);
      else if (at < common.begin)
        out.push_back({at, common.begin});
      at = common.end;
    }
    if (!covered && at < i.end) out.push_back({at, i.end});
  }
  return out;
}

std::int64_t length(const Intervals& all) {
  std::int64_t total = 0;
  for (const Interval& i : all) total += i.end - i.begin;
  return total;
}

// ---- what both kinds of report share -----------------------------------------------------------

struct Spent {
  double ns = 0, flops = 0, bytes = 0;
};

/// Collects time by cause over the steps' window.
class Account {
 public:
  explicit Account(const ProfileResult& result) : result_(result) {
    bool any = !result.steps.empty();
    if (any) window_ = {result.steps.front().begin_ns, result.steps.back().end_ns};
    for (const DeviceActivity& a : result.activities) {
      window_ = any ? Interval{window_.begin, std::max(window_.end, a.end_ns)}
                    : Interval{a.begin_ns, a.end_ns};
      any = true;
    }
  }
  Interval window() const { return window_; }
  double window_ns() const { return static_cast<double>(window_.end - window_.begin); }
  Interval clipped(std::int64_t begin, std::int64_t end) const {
    begin = std::clamp(begin, window_.begin, window_.end);
    return {begin, std::clamp(end, begin, window_.end)};
  }

  void add(const char* cause, double ns) { spent_[cause].ns += ns; }
  void add_work(const char* cause, const HostRange& r) {
    spent_[cause].flops += r.flops;
    spent_[cause].bytes += r.bytes;
  }
  /// What limits the work of r, which took `ns` on whatever carried it out.
  const char* cause_of(const HostRange& r, double ns, const char* other) const {
    if (r.kind == ProfileKind::op && r.name == "cast") return kCasts;
    const double rate = ns > 0 ? r.bytes / (ns * 1e-9) : 0;
    if (result_.copy_rate > 0 && rate >= kNearCopyRate * result_.copy_rate) return kBandwidth;
    return r.flops > 0 ? kProducts : other;
  }

  BottleneckReport report(int carriers) const {
    BottleneckReport report;
    report.steps = static_cast<int>(result_.steps.size());
    const double steps = std::max(1, report.steps), whole = window_ns() * carriers;
    report.step_seconds = window_ns() * 1e-9 / steps;
    if (whole <= 0) return report;
    for (const auto& [name, spent] : spent_) {
      if (spent.ns <= 0) continue;
      Bottleneck b{.name = name, .share = spent.ns / whole};
      b.seconds = b.share * report.step_seconds;
      const double seconds = spent.ns * 1e-9;
      if (name == kProducts) b.detail = detail::format_rate(spent.flops / seconds, "FLOP/s");
      if (name == kBandwidth)
        b.detail = detail::format_rate(spent.bytes / seconds, "B/s") + " of " +
                   detail::format_rate(result_.copy_rate, "B/s");
      report.causes.push_back(std::move(b));
    }
    std::stable_sort(report.causes.begin(), report.causes.end(),
                     [](const Bottleneck& a, const Bottleneck& b) { return a.share > b.share; });
    double flops = 0;
    for (const HostRange& r : result_.ranges) flops += r.flops;
    report.flops_per_second = flops / (window_ns() * 1e-9);
    return report;
  }

 private:
  const ProfileResult& result_;
  Interval window_{0, 0};
  std::map<std::string, Spent> spent_;
};

Intervals ranges_of(const ProfileResult& result, const Account& account, int thread,
                    ProfileKind kind) {
  Intervals found;
  for (const HostRange& r : result.ranges)
    if (r.thread == thread && r.kind == kind)
      found.push_back(account.clipped(r.begin_ns, r.end_ns));
  return united(std::move(found));
}

// ---- on a device -------------------------------------------------------------------------------

/// Ranges that launched something: by id, and the device time of each.
struct Launchers {
  std::unordered_map<std::uint64_t, const HostRange*> by_id;
  std::unordered_map<std::uint64_t, double> device_ns;
  int thread = 0;  // that launched most

  explicit Launchers(const ProfileResult& result) {
    for (const HostRange& r : result.ranges) by_id.emplace(r.id, &r);
    std::map<int, std::int64_t> launches;
    for (const DeviceActivity& a : result.activities) {
      device_ns[a.range] += static_cast<double>(a.duration_ns());
      if (const HostRange* r = find(a.range)) ++launches[r->thread];
    }
    std::int64_t most = 0;
    for (const auto& [t, n] : launches)
      if (n > most) thread = t, most = n;
  }
  const HostRange* find(std::uint64_t id) const {
    const auto it = by_id.find(id);
    return it == by_id.end() ? nullptr : it->second;
  }
};

const char* cause_of(const DeviceActivity& a, const Account& account, const Launchers& launchers) {
  constexpr const char* kOther = "other kernels";
  if (a.kind != ActivityKind::kernel) return "copies";
  const HostRange* r = launchers.find(a.range);
  if (r == nullptr) return kOther;
  if (r->kind == ProfileKind::function && r->name == "replay captured step")
    return "kernels of captured steps";
  return account.cause_of(*r, launchers.device_ns.at(a.range), kOther);
}

/// Adds one device's busy time by cause and returns its busy intervals. `all` is in order of begin.
Intervals add_busy(Account& account, const Launchers& launchers,
                   std::span<const DeviceActivity> all) {
  Intervals busy;
  std::int64_t covered = account.window().begin;
  for (const DeviceActivity& a : all) {
    const Interval part = account.clipped(std::max(a.begin_ns, covered), a.end_ns);
    covered = std::max(covered, part.end);
    if (part.begin == part.end) continue;
    account.add(cause_of(a, account, launchers), static_cast<double>(part.end - part.begin));
    busy.push_back(part);
  }
  return united(std::move(busy));
}

/// From the begin of each wait to the first activity that begins after its end.
Intervals drained(const Account& account, const Intervals& waits,
                  std::span<const DeviceActivity> all) {
  Intervals zones;
  for (const Interval& wait : waits) {
    const auto next =
        std::lower_bound(all.begin(), all.end(), wait.end,
                         [](const DeviceActivity& a, std::int64_t t) { return a.begin_ns < t; });
    zones.push_back(
        account.clipped(wait.begin, next == all.end() ? account.window().end : next->begin_ns));
  }
  return united(std::move(zones));
}

BottleneckReport report_of_device(const ProfileResult& result) {
  Account account(result);
  const Launchers launchers(result);
  const Intervals waits = ranges_of(result, account, launchers.thread, ProfileKind::synchronize),
                  data = ranges_of(result, account, launchers.thread, ProfileKind::data);
  const Intervals window{account.window()};
  int devices = 0;
  double busy_ns = 0;
  for (auto first = result.activities.begin(); first != result.activities.end(); ++devices) {
    const auto last = std::find_if(first, result.activities.end(), [&](const DeviceActivity& a) {
      return a.device != first->device;
    });
    const std::span<const DeviceActivity> all(first, last);
    const Intervals busy = add_busy(account, launchers, all);
    const Intervals idle = cut(window, busy, false), zones = drained(account, waits, all),
                    rest = cut(idle, zones, false);
    busy_ns += static_cast<double>(length(busy));
    account.add(kSynchronisation, static_cast<double>(length(cut(idle, zones, true))));
    account.add(kData, static_cast<double>(length(cut(rest, data, true))));
    account.add("launch overhead", static_cast<double>(length(cut(rest, data, false))));
    first = last;
  }
  for (const auto& [id, ns] : launchers.device_ns)
    if (const HostRange* r = launchers.find(id))
      account.add_work(account.cause_of(*r, ns, "other kernels"), *r);
  BottleneckReport report = account.report(devices);
  report.on_device = true;
  report.busy_share = busy_ns / (account.window_ns() * devices);
  report.host_blocked_share = static_cast<double>(length(waits)) / account.window_ns();
  return report;
}

// ---- on the host -------------------------------------------------------------------------------

BottleneckReport report_of_host(const ProfileResult& result) {
  Account account(result);
  const detail::RangeTree tree(result.ranges);
  std::vector<char> in_data(result.ranges.size());
  double known = 0;
  const auto add = [&](const char* cause, double ns) {
    account.add(cause, ns);
    known += ns;
  };
  double blocked = 0;
  for (std::size_t i = 0; i < result.ranges.size(); ++i) {
    const HostRange& r = result.ranges[i];
    if (r.thread != 0) continue;
    const auto parent = tree.parent[i];
    in_data[i] =
        r.kind == ProfileKind::data || (parent >= 0 && in_data[static_cast<std::size_t>(parent)]);
    const Interval inside = account.clipped(r.begin_ns, r.end_ns);
    if (inside.begin == inside.end) continue;
    const auto self = static_cast<double>(tree.self_ns[i]);
    if (in_data[i]) {
      add(kData, self);
      continue;
    }
    const double allocator = std::min(self, static_cast<double>(r.allocator_ns));
    add("allocator", allocator);
    const double own = self - allocator;
    if (r.kind == ProfileKind::synchronize) {
      blocked += self;
      add(kSynchronisation, own);
    } else if (r.kind == ProfileKind::op || r.kind == ProfileKind::function) {
      const char* cause = account.cause_of(r, own, "other ops");
      add(cause, own);
      account.add_work(cause, r);
    }
  }
  account.add("host code between ops", std::max(0.0, account.window_ns() - known));
  BottleneckReport report = account.report(1);
  report.busy_share = 1;
  if (account.window_ns() > 0) report.host_blocked_share = blocked / account.window_ns();
  return report;
}

const char* advice_for(const std::string& cause) {
  static const std::map<std::string, const char*> kAdvice = {
      {"launch overhead",
       "the device waits for the host: capture() the step, or enlarge the batch"},
      {kBandwidth, "fuse ops (linear with act, mlp, add_layer_norm), keep activations in 16 bits"},
      {kSynchronisation,
       "the step waits for the device: item(), printing and copies to the host "
       "belong outside, or into every n-th step"},
      {kCasts,
       "tensors change their dtype: make inputs in the autocast dtype, let the optimizer "
       "write the 16-bit weights, keep sums out of autocast's way"},
      {kData, "more DataLoader workers or prefetch"},
      {"copies", "pin host memory, copy with non_blocking, and keep data on the device"},
      {"allocator", "memory comes from the system again and again: keep shapes the same"},
      {"kernels of captured steps",
       "their ops are not known: profile the step without capture to see them"},
  };
  const auto it = kAdvice.find(cause);
  return it == kAdvice.end() ? "" : it->second;
}

}  // namespace

BottleneckReport ProfileResult::bottlenecks() const {
  BottleneckReport report = activities.empty() ? report_of_host(*this) : report_of_device(*this);
  for (Bottleneck& b : report.causes) {
    b.advice = advice_for(b.name);
    if (b.name == kSynchronisation)
      b.detail = "host blocked " + detail::format_percent(report.host_blocked_share);
  }
  return report;
}

double BottleneckReport::share(const std::string& name) const {
  for (const Bottleneck& b : causes)
    if (b.name == name) return b.share;
  return 0;
}

std::string BottleneckReport::text() const {
  std::string out = "Where " + std::to_string(steps) + (steps == 1 ? " step" : " steps") + " of " +
                    detail::format_seconds(step_seconds) + " went";
  if (on_device) out += ", device busy " + detail::format_percent(busy_share);
  if (flops_per_second > 0) out += ", " + detail::format_rate(flops_per_second, "FLOP/s");
  out += "\n";
  std::string losses;
  for (const Bottleneck& b : causes) {
    const std::string percent = detail::format_percent(b.share),
                      time = detail::format_seconds(b.seconds);
    out += std::string(percent.size() < 9 ? 9 - percent.size() : 0, ' ') + percent +
           std::string(time.size() < 12 ? 12 - time.size() : 0, ' ') + time + "  " + b.name;
    if (!b.detail.empty()) out += " (" + b.detail + ")";
    out += "\n";
    if (b.share >= kNotable && !b.advice.empty())
      losses += "  " + b.name + " " + percent + ": " + b.advice + "\n";
  }
  out += losses.empty() ? "No loss reaches 5 % of the step.\n" : "Losses\n" + losses;
  return out;
}

}  // namespace mixtape
