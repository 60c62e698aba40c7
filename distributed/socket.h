// TCP sockets with deadlines. Internal.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace mixtape::distributed {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// That many seconds from now; a century for anything longer.
Deadline deadline_in(double seconds);
/// Milliseconds until then for poll(), rounded up; 0 when it has passed.
int poll_timeout(Deadline deadline);

/// A file descriptor, closed at the end.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket() { close(); }
  int descriptor() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }
  void close() noexcept;

 private:
  int descriptor_ = -1;
};

/// Listens on all of this host's addresses, IPv6 and IPv4; port 0 takes a free one. `port` becomes
/// the one in use. Throws, naming the port, when it is taken.
Socket listen_on(int& port);

/// Connects to the first of `hosts` that answers and that `greet` accepts (it throws otherwise),
/// trying again until the deadline: the other side may not be up yet, and a name may lead to a host
/// where something else listens. Throws with hosts, port and the last reason.
Socket connect_to(const std::vector<std::string>& hosts, int port, Deadline deadline,
                  const std::function<void(const Socket&)>& greet);

/// Sends a framed message. Throws when the other side is gone or the deadline passes.
void send_message(const Socket& socket, const std::string& framed, Deadline deadline);
/// The body of the next message. Throws as send_message, and on a length above the bound.
std::string receive_message(const Socket& socket, Deadline deadline);

/// Addresses of this host that others may reach, the host name first.
std::vector<std::string> host_addresses();

}  // namespace mixtape::distributed
