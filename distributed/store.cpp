#include "distributed/store.h"

#include <cmath>

#include "distributed/store_protocol.h"

namespace mixtape::distributed {
namespace {

/// A store that is busy with others answers late; one that is gone never does.
constexpr double kAnswerSeconds = 30;

MessageWriter start_request(Request kind) {
  MessageWriter message;
  message.u8(static_cast<std::uint8_t>(kind));
  return message;
}

std::int64_t milliseconds(double seconds) {
  return static_cast<std::int64_t>(std::ceil(std::min(seconds, 1e9) * 1e3));
}

std::string list_of(const std::vector<std::int64_t>& ranks) {
  constexpr std::size_t kShown = 16;
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

void say_hello(const Socket& socket, const std::string& run) {
  const Deadline deadline = deadline_in(5);
  send_message(socket, start_request(Request::hello).text(kStoreMagic).text(run).framed(),
               deadline);
  const std::string answer = receive_message(socket, deadline);
  MessageReader reply(answer);
  const auto kind = static_cast<Reply>(reply.u8());
  if (kind == Reply::refused) MT_THROW(reply.text());
  MT_CHECK(kind == Reply::ok, "what listens there is no store");
}

}  // namespace

Socket connect_to_store(const StoreAddress& address, double timeout) {
  return connect_to(address.hosts, address.port, deadline_in(timeout),
                    [&](const Socket& socket) { say_hello(socket, address.run); });
}

Store::Store(StoreAddress address, double timeout) : address_(std::move(address)) {
  idle_.push_back(connect_to_store(address_, timeout));
}

std::string Store::request(const MessageWriter& message, double timeout) {
  Socket socket;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      socket = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!socket.open()) socket = connect_to_store(address_, kAnswerSeconds);
  std::string answer;
  const std::string framed = message.framed();
  try {
    const Deadline deadline = deadline_in(timeout + kAnswerSeconds);
    send_message(socket, framed, deadline);
    answer = receive_message(socket, deadline);
  } catch (const Error& e) {
    MT_THROW("store: rank 0 at ", address_.hosts.front(), " port ", address_.port,
             " does not answer: ", e.what());
  }
  if (answer.empty() || static_cast<Reply>(answer[0]) == Reply::refused) return answer;
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(socket));
  return answer;
}

namespace {

/// The fields of an answer. Throws when the server refused; `timed_out` tells of the other end.
MessageReader read_reply(const std::string& answer, bool& timed_out) {
  MessageReader reply(answer);
  const auto kind = static_cast<Reply>(reply.u8());
  if (kind == Reply::refused) MT_THROW("store: refused: ", reply.text());
  MT_CHECK(kind == Reply::ok || kind == Reply::timeout, "store: unexpected reply ",
           static_cast<int>(kind));
  timed_out = kind == Reply::timeout;
  return reply;
}

}  // namespace

void Store::set(const std::string& key, const std::string& value) {
  bool timed_out = false;
  read_reply(request(start_request(Request::set).text(key).text(value), 0), timed_out);
}

std::string Store::get(const std::string& key, double timeout) {
  bool timed_out = false;
  const std::string answer =
      request(start_request(Request::get).text(key).i64(milliseconds(timeout)), timeout);
  MessageReader reply = read_reply(answer, timed_out);
  MT_CHECK(!timed_out, "store: nobody set \"", key, "\" at ", address_.hosts.front(), " port ",
           address_.port, " within ", timeout, " s");
  return reply.text();
}

bool Store::wait(const std::string& key, double timeout) {
  bool timed_out = false;
  const std::string answer =
      request(start_request(Request::get).text(key).i64(milliseconds(timeout)), timeout);
  read_reply(answer, timed_out);
  return !timed_out;
}

std::int64_t Store::add(const std::string& key, std::int64_t delta) {
  bool timed_out = false;
  const std::string answer = request(start_request(Request::add).text(key).i64(delta), 0);
  return read_reply(answer, timed_out).i64();
}

bool Store::remove(const std::string& key) {
  bool timed_out = false;
  const std::string answer = request(start_request(Request::remove).text(key), 0);
  return read_reply(answer, timed_out).i64() != 0;
}

std::vector<std::string> Store::gather(const std::string& key, int rank, int count,
                                       const std::string& value, double timeout,
                                       const std::string& what) {
  bool timed_out = false;
  const MessageWriter message = start_request(Request::gather)
                                    .text(key)
                                    .i64(rank)
                                    .i64(count)
                                    .i64(milliseconds(timeout))
                                    .text(value);
  std::string answer;
  try {
    answer = request(message, timeout);
  } catch (const Error& e) {
    MT_THROW(what, ": ", e.what());
  }
  MessageReader reply = read_reply(answer, timed_out);
  if (timed_out) {
    std::vector<std::int64_t> missing;
    while (!reply.empty()) missing.push_back(reply.i64());
    MT_THROW(what, ": ", list_of(missing), " of ", count, " did not arrive within ", timeout, " s");
  }
  std::vector<std::string> values;
  while (!reply.empty()) values.push_back(reply.text());
  return values;
}

}  // namespace mixtape::distributed
