// The store's server, in rank 0's process: one thread that waits for all connections at once.
//
// A client that sends nonsense, too much or nothing at all loses its connection and changes nothing
// for the others. Internal; distributed/store.h is the client.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "distributed/socket.h"
#include "distributed/store_protocol.h"
#include "distributed/wire.h"

namespace mixtape::distributed {

class StoreServer {
 public:
  struct Options {
    int port = 0;  // 0: any free one
    int world_size = 1;
    std::string run;       // clients of another run are refused
    double silence = 600;  // seconds without a beat after which a rank counts as lost
  };
  explicit StoreServer(const Options& options);
  /// Closes all connections.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  int port() const { return port_; }
  /// Waits until no rank's watchdog is attached: all have left, or `seconds` have passed.
  void wait_until_left(double seconds) const;

 private:
  struct Connection {
    Socket socket;
    std::uint64_t id = 0;
    std::string received, unsent;
    bool greeted = false, closing = false;
    int rank = -1;      // of an attached watchdog
    Deadline deadline;  // for hello, then of an attached watchdog's next beat
  };
  /// A request that cannot be answered yet.
  struct Waiter {
    std::uint64_t connection;
    std::string key;
    bool gather;
    Deadline deadline;
  };
  struct Gathering {
    std::vector<std::optional<std::string>> values;
    std::size_t present = 0;
  };
  struct Rank {
    Presence presence = Presence::never_came;
    std::string description, status;
  };

  void loop();
  void accept_all();
  void receive(Connection& c);
  void flush(Connection& c);
  void expire();
  Deadline next_deadline() const;
  void drop_closed();
  void lost(Connection& c, const std::string& how);

  // store_requests.cpp
  void handle(Connection& c, MessageReader message);
  void handle_gather(Connection& c, MessageReader& message);
  void handle_watchdog(Connection& c, Request request, MessageReader& message);
  void reply(Connection& c, const MessageWriter& message);
  void refuse(Connection& c, const std::string& why);
  void answer_waiters(const std::string& key);
  void answer_gathering(const std::string& key);
  void answer_timeout(const Waiter& waiter);
  void put(const std::string& key, std::string value);
  void record_failure(int rank, const std::string& text);
  Connection* find(std::uint64_t id);

  Options options_;
  Socket listener_, wake_read_, wake_write_;
  int port_ = 0;
  std::uint64_t next_id_ = 1;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<std::string, std::string> values_;
  std::size_t value_bytes_ = 0;
  std::map<std::string, Gathering> gatherings_;
  std::vector<Waiter> waiters_;
  std::vector<Rank> ranks_;
  std::optional<std::string> failure_;
  int failed_rank_ = -1;
  std::atomic<int> attached_{0};
  std::thread thread_;
};

}  // namespace mixtape::distributed
