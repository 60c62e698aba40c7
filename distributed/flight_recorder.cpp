#include "distributed/flight_recorder.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "distributed/wire.h"

namespace mixtape::distributed {
namespace {

constexpr std::size_t kRecent = 8;     // calls of a group that a rank tells of
constexpr std::size_t kMaxText = 300;  // a status is sent every second
constexpr int kMaxNamed = 16;          // ranks that a message tells of one by one

std::string seconds_since(Deadline start) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1)
      << std::chrono::duration<double>(Clock::now() - start).count() << " s";
  return out.str();
}

struct Call {
  std::string group;
  std::uint64_t sequence;
  std::string signature, text;
};

struct Report {
  std::string summary;
  std::vector<Call> calls;  // oldest first within a group
};

Report read_report(const std::string& recorded) {
  Report report;
  if (recorded.empty()) return report;
  MessageReader reader(recorded);
  report.summary = reader.text();
  while (!reader.empty()) {
    Call call;
    call.group = reader.text();
    call.sequence = static_cast<std::uint64_t>(reader.i64());
    call.signature = reader.text();
    call.text = reader.text();
    report.calls.push_back(std::move(call));
  }
  return report;
}

/// Why this rank holds `entry` up; empty when it does not.
std::string reason(const FlightEntry& entry, const RankStatus& rank) {
  switch (rank.presence) {
    case Presence::never_came: return "has not arrived";
    case Presence::left: return "has left the run (finalize() or the end of main)";
    case Presence::lost: return "is gone";
    case Presence::here: break;
  }
  const Report report = read_report(rank.recorded);
  const Call* same = nullptr;
  std::uint64_t last = 0;
  for (const Call& call : report.calls) {
    if (call.group != entry.group || call.signature.empty()) continue;
    last = std::max(last, call.sequence);
    if (call.sequence == entry.sequence) same = &call;
  }
  if (entry.signature.empty())  // send, recv: its other end says what it does instead
    return report.summary;
  if (last < entry.sequence) return "has not called it: it " + report.summary;
  if (same != nullptr && same->signature != entry.signature)
    return "is out of step: its #" + std::to_string(entry.sequence) + " is " + same->text;
  return "";
}

}  // namespace

FlightRecorder& FlightRecorder::instance() {
  static FlightRecorder* recorder = new FlightRecorder;  // exit handlers may come late
  return *recorder;
}

FlightRecorder::Dropped FlightRecorder::take_finished() {
  Dropped finished;
  std::erase_if(under_way_, [&](auto& e) {
    if (!e.second.finished()) return false;
    finished.push_back(std::move(e.second.state));
    return true;
  });
  return finished;
}

std::uint64_t FlightRecorder::begin(FlightEntry entry) {
  entry.started = Clock::now();
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  while (!under_way_.empty() && under_way_.front().second.finished()) {
    dropped.push_back(std::move(under_way_.front().second.state));
    under_way_.pop_front();
  }
  std::deque<Past>& recent = recent_[entry.group];
  recent.push_back({entry.sequence, entry.signature, entry.text});
  if (recent.size() > kRecent) recent.pop_front();
  last_ = entry.text;
  const std::uint64_t id = next_id_++;
  under_way_.emplace_back(id, std::move(entry));
  return id;
}

void FlightRecorder::started(std::uint64_t id, std::shared_ptr<WorkState> state) {
  const std::lock_guard lock(mutex_);
  for (auto e = under_way_.rbegin(); e != under_way_.rend(); ++e)
    if (e->first == id) e->second.state = std::move(state);
}

void FlightRecorder::end(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(under_way_, [id](const auto& e) { return e.first == id; });
}

std::optional<FlightEntry> FlightRecorder::oldest() {
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  dropped = take_finished();
  if (under_way_.empty()) return std::nullopt;
  return under_way_.front().second;
}

void FlightRecorder::note_unheard(const std::string& error) {
  const std::lock_guard lock(mutex_);
  if (unheard_.empty()) unheard_ = error;
}

std::string FlightRecorder::unheard() {
  const std::lock_guard lock(mutex_);
  return unheard_;
}

std::string FlightRecorder::describe() {
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  dropped = take_finished();
  if (under_way_.empty()) {
    if (last_.empty()) return "is in no collective and has called none";
    return "is in no collective; its last was " + last_;
  }
  const FlightEntry& first = under_way_.front().second;
  std::string text = "is in " + first.text + " since " + seconds_since(first.started);
  if (under_way_.size() > 1)
    text += ", with " + std::to_string(under_way_.size() - 1) + " more behind it";
  return text;
}

std::string FlightRecorder::status() {
  MessageWriter status;
  status.text(describe());
  const std::lock_guard lock(mutex_);
  for (const auto& [group, recent] : recent_)
    for (const Past& past : recent)
      status.text(group)
          .i64(static_cast<std::int64_t>(past.sequence))
          .text(past.signature)
          .text(std::string_view(past.text).substr(0, kMaxText));
  return status.body();
}

std::string blame(const FlightEntry& entry, int me, const std::vector<RankStatus>& ranks) {
  std::string text = entry.text + " has not finished after " + seconds_since(entry.started);
  int named = 0, left_out = 0;
  for (const int member : entry.members) {
    if (member == me) continue;
    const RankStatus& rank = ranks[static_cast<std::size_t>(member)];
    const std::string why = reason(entry, rank);
    if (why.empty()) continue;
    if (named == kMaxNamed) {
      ++left_out;
      continue;
    }
    const std::string who =
        rank.description.empty() ? "rank " + std::to_string(member) : rank.description;
    text += (named++ == 0 ? ": " : "; ") + who + ' ' + why;
  }
  if (left_out > 0) text += "; and " + std::to_string(left_out) + " more ranks";
  if (named == 0)
    text +=
        ": all ranks called it, so the network or a device is stuck (NCCL_DEBUG=INFO says more)";
  return text;
}

}  // namespace mixtape::distributed
