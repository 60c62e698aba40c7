#include "distributed/store_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace mixtape::distributed {
namespace {

constexpr double kHelloSeconds = 20;
constexpr std::size_t kMaxUnsent = 256u << 20;  // a client that does not read is dropped

}  // namespace

StoreServer::StoreServer(const Options& options)
    : options_(options), port_(options.port), ranks_(static_cast<std::size_t>(options.world_size)) {
  listener_ = listen_on(port_);
  int ends[2];
  MT_CHECK(pipe(ends) == 0, "store: cannot make a pipe");
  wake_read_ = Socket(ends[0]);
  wake_write_ = Socket(ends[1]);
  thread_ = std::thread([this] { loop(); });
}

StoreServer::~StoreServer() {
  wake_write_.close();  // the loop sees its end of the pipe hang up
  thread_.join();
}

void StoreServer::wait_until_left(double seconds) const {
  for (const Deadline end = deadline_in(seconds); attached_ > 0 && Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

void StoreServer::loop() {
  std::vector<pollfd> entries;
  for (;;) {
    entries.clear();
    entries.push_back({wake_read_.descriptor(), POLLIN, 0});
    entries.push_back({listener_.descriptor(), POLLIN, 0});
    for (const auto& c : connections_) {
      const int events = POLLIN | (c->unsent.empty() ? 0 : POLLOUT);
      entries.push_back({c->socket.descriptor(), static_cast<short>(events), 0});
    }
    if (poll(entries.data(), entries.size(), poll_timeout(next_deadline())) < 0 && errno != EINTR)
      return;
    if (entries[0].revents != 0) return;
    const std::size_t known = connections_.size();
    for (std::size_t i = 0; i < known; ++i) {
      const short events = entries[i + 2].revents;
      if (events & POLLOUT) flush(*connections_[i]);
      if (events & (POLLIN | POLLHUP | POLLERR)) receive(*connections_[i]);
    }
    if (entries[1].revents != 0) accept_all();
    expire();
    drop_closed();
  }
}

void StoreServer::accept_all() {
  const std::size_t limit = 64 + 8 * ranks_.size();
  for (;;) {
    Socket socket(accept4(listener_.descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.open()) return;
    if (connections_.size() >= limit) continue;  // closes it; a rank tries again
    auto c = std::make_unique<Connection>();
    c->socket = std::move(socket);
    c->id = next_id_++;
    c->deadline = deadline_in(kHelloSeconds);
    connections_.push_back(std::move(c));
  }
}

void StoreServer::receive(Connection& c) {
  char chunk[1 << 16];
  while (!c.closing) {
    const ssize_t n = recv(c.socket.descriptor(), chunk, sizeof chunk, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
      lost(c, "its connection closed: it was killed, crashed or left without finalize()");
      return;
    }
    c.received.append(chunk, static_cast<std::size_t>(n));
    std::size_t used = 0;
    try {
      std::uint32_t size = 0;
      while (!c.closing && c.received.size() - used >= sizeof size) {
        std::memcpy(&size, c.received.data() + used, sizeof size);
        MT_CHECK(size <= (c.greeted ? kMaxMessageBytes : 4096u), "store: message of ", size,
                 " bytes");
        if (c.received.size() - used < sizeof size + size) break;
        handle(c, MessageReader(std::string_view(c.received).substr(used + sizeof size, size)));
        used += sizeof size + size;
      }
    } catch (const std::exception& e) {
      refuse(c, e.what());
      lost(c, std::string("it sent what is no message of this store: ") + e.what());
    }
    c.received.erase(0, used);
  }
}

void StoreServer::flush(Connection& c) {
  while (!c.unsent.empty()) {
    const ssize_t n =
        send(c.socket.descriptor(), c.unsent.data(), c.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n <= 0) {
      lost(c, "its connection broke");
      return;
    }
    c.unsent.erase(0, static_cast<std::size_t>(n));
  }
  if (c.unsent.size() > kMaxUnsent) lost(c, "it does not read what it is sent");
}

Deadline StoreServer::next_deadline() const {
  Deadline next = deadline_in(3600);
  for (const auto& c : connections_)
    if (!c->greeted || c->rank >= 0) next = std::min(next, c->deadline);
  for (const Waiter& w : waiters_) next = std::min(next, w.deadline);
  return next;
}

void StoreServer::expire() {
  const Deadline now = Clock::now();
  for (const auto& c : connections_) {
    if (c->closing || c->deadline > now) continue;
    if (!c->greeted) c->closing = true;
    if (c->rank >= 0)
      lost(*c, "it has not been heard of for " +
                   std::to_string(static_cast<int>(options_.silence + 0.5)) +
                   " s: its host or network is down, or it was stopped");
  }
  std::vector<Waiter> expired;
  std::erase_if(waiters_, [&](const Waiter& w) {
    if (w.deadline > now) return false;
    expired.push_back(w);
    return true;
  });
  for (const Waiter& w : expired) answer_timeout(w);
}

void StoreServer::drop_closed() {
  std::erase_if(connections_, [](const auto& c) { return c->closing; });
  std::erase_if(waiters_, [this](const Waiter& w) { return find(w.connection) == nullptr; });
}

void StoreServer::lost(Connection& c, const std::string& how) {
  if (c.closing) return;
  c.closing = true;
  if (c.rank < 0) return;
  Rank& rank = ranks_[static_cast<std::size_t>(c.rank)];
  if (rank.presence != Presence::here) return;
  rank.presence = Presence::lost;
  --attached_;
  record_failure(c.rank, rank.description + ": " + how);
}

}  // namespace mixtape::distributed
