#include "distributed/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "distributed/wire.h"

namespace mixtape::distributed {
namespace {

constexpr double kCentury = 3.2e9;

std::string error_text(int error) { return std::strerror(error); }

void set_options(int descriptor) {
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

/// Waits until the socket can be read or written; throws at the deadline.
void wait_for(int descriptor, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{descriptor, events, 0};
    const int ready = poll(&entry, 1, poll_timeout(deadline));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) MT_THROW("socket: poll failed: ", error_text(errno));
    MT_CHECK(Clock::now() < deadline, "socket: timed out");
  }
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Addresses of a host; an empty list and the reason when there are none.
AddressList resolve(const std::string& host, int port, std::string& reason) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) reason = gai_strerror(error);
  return AddressList(error == 0 ? found : nullptr, &freeaddrinfo);
}

/// One attempt. An unopened socket and the reason when it fails.
Socket try_connect(const addrinfo& address, Deadline deadline, std::string& reason) {
  Socket socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) {
    reason = error_text(errno);
    return Socket();
  }
  set_options(socket.descriptor());
  if (connect(socket.descriptor(), address.ai_addr, address.ai_addrlen) == 0) return socket;
  if (errno != EINPROGRESS) {
    reason = error_text(errno);
    return Socket();
  }
  pollfd entry{socket.descriptor(), POLLOUT, 0};
  if (poll(&entry, 1, poll_timeout(deadline)) <= 0) {
    reason = "no answer";
    return Socket();
  }
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == 0) return socket;
  reason = error_text(error);
  return Socket();
}

}  // namespace

Deadline deadline_in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(std::clamp(seconds, 0.0, kCentury)));
}

int poll_timeout(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 1'000'000'000));
}

void Socket::close() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Socket listen_on(int& port) {
  int family = AF_INET6;
  Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1, off = 0;
  sockaddr_storage address{};
  socklen_t size = 0;
  if (socket.open() &&
      setsockopt(socket.descriptor(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    v6.sin6_family = AF_INET6;
    v6.sin6_addr = in6addr_any;
    v6.sin6_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof v6;
  } else {  // a host without IPv6
    socket = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    auto& v4 = reinterpret_cast<sockaddr_in&>(address);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_ANY);
    v4.sin_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof v4;
  }
  MT_CHECK(socket.open(), "store: cannot open a socket: ", error_text(errno));
  setsockopt(socket.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  MT_CHECK(bind(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), size) == 0 &&
               listen(socket.descriptor(), SOMAXCONN) == 0,
           "store: cannot listen on port ", port, ": ", error_text(errno),
           "; is another run using MASTER_PORT?");
  MT_CHECK(getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), &size) == 0,
           "store: getsockname failed: ", error_text(errno));
  port = ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
  return socket;
}

Socket connect_to(const std::vector<std::string>& hosts, int port, Deadline deadline,
                  const std::function<void(const Socket&)>& greet) {
  constexpr double kAttemptSeconds = 3, kPauseSeconds = 0.05;
  std::string reason = "no address to try", tried;
  for (const std::string& host : hosts) tried += (tried.empty() ? "" : " or ") + host;
  do {
    for (const std::string& host : hosts) {
      const AddressList list = resolve(host, port, reason);
      for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
        Socket socket = try_connect(*a, std::min(deadline, deadline_in(kAttemptSeconds)), reason);
        if (!socket.open()) continue;
        try {
          greet(socket);
          return socket;
        } catch (const Error& e) {
          reason = e.what();
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(kPauseSeconds));
  } while (Clock::now() < deadline);
  MT_THROW("store: cannot connect to rank 0 at ", tried, " port ", port, ": ", reason);
}

void send_message(const Socket& socket, const std::string& framed, Deadline deadline) {
  std::size_t sent = 0;
  while (sent < framed.size()) {
    const ssize_t n =
        send(socket.descriptor(), framed.data() + sent, framed.size() - sent, MSG_NOSIGNAL);
    if (n >= 0) {
      sent += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_for(socket.descriptor(), POLLOUT, deadline);
    } else if (errno != EINTR) {
      MT_THROW("socket: send failed: ", error_text(errno));
    }
  }
}

std::string receive_message(const Socket& socket, Deadline deadline) {
  const auto receive = [&](char* to, std::size_t size) {
    std::size_t got = 0;
    while (got < size) {
      const ssize_t n = recv(socket.descriptor(), to + got, size - got, 0);
      MT_CHECK(n != 0, "socket: the other side closed the connection");
      if (n > 0) {
        got += static_cast<std::size_t>(n);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        wait_for(socket.descriptor(), POLLIN, deadline);
      } else if (errno != EINTR) {
        MT_THROW("socket: receive failed: ", error_text(errno));
      }
    }
  };
  std::uint32_t size = 0;
  receive(reinterpret_cast<char*>(&size), sizeof size);
  MT_CHECK(size <= kMaxMessageBytes, "socket: expected a message of at most ", kMaxMessageBytes,
           " bytes, got ", size);
  std::string body(size, '\0');
  receive(body.data(), size);
  return body;
}

std::vector<std::string> host_addresses() {
  std::vector<std::string> addresses;
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) == 0) addresses.emplace_back(name);
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  for (const ifaddrs* a = list; a != nullptr; a = a->ifa_next) {
    if (a->ifa_addr == nullptr || (a->ifa_flags & IFF_UP) == 0) continue;
    if (a->ifa_addr->sa_family != AF_INET) continue;  // host names cover IPv6
    char text[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(a->ifa_addr)->sin_addr, text,
              sizeof text);
    if ((a->ifa_flags & IFF_LOOPBACK) == 0) addresses.emplace_back(text);
  }
  freeifaddrs(list);
  addresses.emplace_back("127.0.0.1");  // ranks of this host, where it has no network at all
  return addresses;
}

}  // namespace mixtape::distributed
