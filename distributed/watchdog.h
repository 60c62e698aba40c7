// Ends this process, with a message, when the run cannot go on: another rank died, left main by an
// exception or does not take part in a collective. A thread of its own, connected to rank 0's store
// (distributed/store_server.h), which learns of a lost rank from its connection. Internal.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "distributed/flight_recorder.h"
#include "distributed/store.h"
#include "engine/function.h"

namespace mixtape::distributed {

class Watchdog {
 public:
  struct Options {
    StoreAddress store;
    int rank = 0;
    std::string description;  // "rank 0 (host, pid 11)"
    double timeout = 600;     // seconds of a collective, and of silence of rank 0
    /// Called before the process ends, with a few seconds to return: ncclCommAbort.
    Function<void()> abort = {};
  };
  explicit Watchdog(Options options);
  /// Leaves the run: from here on the others do not miss this rank.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Tells all other ranks that this one ends because of `text`, which ends them too. Returns when
  /// they were told or after a second. For exit and terminate handlers.
  void announce_failure(const std::string& text) noexcept;
  /// From a SIGTERM handler: a launcher that ends this rank because another died leaves a second
  /// for the message.
  void note_terminated() noexcept;

 private:
  void loop();
  /// Waits for messages until then, or until it is woken.
  void receive(Deadline deadline);
  void handle(MessageReader message);
  void read_wakes();
  void check_collectives();
  [[noreturn]] void fail(const std::string& text);
  void check_terminated();
  void check_silence();
  void send(const MessageWriter& message);
  [[noreturn]] void end_process(const std::string& text);

  Options options_;
  Socket socket_, wake_read_, wake_write_;
  std::mutex send_mutex_;
  std::atomic<int> unanswered_{0};     // requests that get Reply::ok
  std::atomic<bool> stopping_{false};  // the destructor runs
  std::atomic<bool> failing_{false};   // this rank has announced a failure
  std::atomic<bool> told_{false};      // rank 0 has told the others of a failure
  // Of the thread:
  Deadline last_answer_;
  std::optional<Deadline> end_at_;  // after SIGTERM
  std::optional<std::vector<RankStatus>> statuses_;
  std::thread thread_;
};

}  // namespace mixtape::distributed
