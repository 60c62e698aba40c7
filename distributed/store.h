// A small key-value store that rank 0 serves over TCP: how ranks find each other, compare what they
// have and hand over NCCL's id, with or without MPI.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "distributed/socket.h"
#include "distributed/wire.h"

namespace mixtape::distributed {

/// Where a store is and who may use it.
struct StoreAddress {
  std::vector<std::string> hosts;  // names or addresses to try
  int port = 0;
  std::string run;  // the same text on all ranks of a run; others are refused
};

/// A client. Thread-safe: calls of several threads go over connections of their own. Times are in
/// seconds. Errors name host and port.
class Store {
 public:
  /// Connects, trying for `timeout` seconds, because rank 0 may not be up yet.
  Store(StoreAddress address, double timeout);
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// value: at most 16 MiB.
  void set(const std::string& key, const std::string& value);
  /// Waits for the key; throws, naming it, when nobody sets it in time.
  std::string get(const std::string& key, double timeout);
  /// As get, with false for a key that does not come.
  bool wait(const std::string& key, double timeout);
  /// Adds to the number under a key (0 when there is none) and returns the sum.
  std::int64_t add(const std::string& key, std::int64_t delta);
  /// True if the key was there.
  bool remove(const std::string& key);

  /// Values of ranks 0 .. count - 1 under a key that is used once. Throws on all that came when
  /// one does not in time; `what` begins the message, which names the ranks that are missing.
  std::vector<std::string> gather(const std::string& key, int rank, int count,
                                  const std::string& value, double timeout,
                                  const std::string& what);

  const StoreAddress& address() const { return address_; }

 private:
  std::string request(const MessageWriter& message, double timeout);

  StoreAddress address_;
  std::mutex mutex_;
  std::vector<Socket> idle_;
};

/// A connection that has said hello.
Socket connect_to_store(const StoreAddress& address, double timeout);

}  // namespace mixtape::distributed
