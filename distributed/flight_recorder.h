// What this process's collectives are doing: which are under way, for how long, and the last ones
// of each group. The watchdog reads it, sends it to rank 0 and, when a collective does not finish,
// compares it with what the other ranks sent. Internal.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "distributed/backend.h"
#include "distributed/socket.h"
#include "distributed/store_protocol.h"

namespace mixtape::distributed {

/// One call, as other ranks compare it.
struct FlightEntry {
  std::string group;
  std::vector<int> members;  // world ranks
  std::uint64_t sequence = 0;
  std::string signature;  // equal on all ranks that are in step; empty for send and recv
  std::string text;       // for messages
  Deadline started = {};
  std::shared_ptr<WorkState> state = {};  // null while it is being started
  bool finished() const { return state && state->done(); }
};

/// What is known of a rank.
struct RankStatus {
  Presence presence = Presence::never_came;
  std::string description;  // "rank 1 (host, pid 12)"
  std::string recorded;     // FlightRecorder::status() of that rank
};

class FlightRecorder {
 public:
  static FlightRecorder& instance();

  /// Notes a call that begins; the id is for the other two.
  std::uint64_t begin(FlightEntry entry);
  void started(std::uint64_t id, std::shared_ptr<WorkState> state);
  /// Forgets a call: it failed at once, or it blocked and is over.
  void end(std::uint64_t id);

  /// The call that has been under way for the longest, if any.
  std::optional<FlightEntry> oldest();
  /// What went wrong in a collective whose Work was dropped: nobody else would hear of it.
  void note_unheard(const std::string& error);
  /// The first of those; empty as a rule.
  std::string unheard();
  /// "is in world: all_reduce ... since 3.1 s" or "is in no collective; its last was ...".
  std::string describe();
  /// The last calls of each group, encoded for others.
  std::string status();

 private:
  struct Past {
    std::uint64_t sequence;
    std::string signature, text;
  };
  /// Works end outside of the lock: the end of one that failed calls note_unheard().
  using Dropped = std::vector<std::shared_ptr<WorkState>>;
  Dropped take_finished();

  std::mutex mutex_;
  std::uint64_t next_id_ = 1;
  std::deque<std::pair<std::uint64_t, FlightEntry>> under_way_;
  std::map<std::string, std::deque<Past>> recent_;
  std::string last_, unheard_;
};

/// A blocking call noted for as long as it lasts.
class FlightScope {
 public:
  explicit FlightScope(FlightEntry entry)
      : id_(FlightRecorder::instance().begin(std::move(entry))) {}
  ~FlightScope() { FlightRecorder::instance().end(id_); }
  FlightScope(const FlightScope&) = delete;
  FlightScope& operator=(const FlightScope&) = delete;

 private:
  std::uint64_t id_;
};

/// Says which ranks keep `entry` of rank `me` from finishing, from what each rank sent last.
std::string blame(const FlightEntry& entry, int me, const std::vector<RankStatus>& ranks);

}  // namespace mixtape::distributed
