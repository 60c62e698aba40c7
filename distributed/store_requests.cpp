// The store's answers (distributed/store_server.h).
#include <algorithm>
#include <charconv>

#include "distributed/store_server.h"

namespace mixtape::distributed {
namespace {

constexpr std::size_t kMaxKeyBytes = 4096, kMaxStoredBytes = std::size_t{1} << 30;

MessageWriter start_reply(Reply kind) {
  MessageWriter message;
  message.u8(static_cast<std::uint8_t>(kind));
  return message;
}

std::string read_key(MessageReader& message) {
  std::string key = message.text();
  MT_CHECK(!key.empty() && key.size() <= kMaxKeyBytes, "store: expected a key of 1 to ",
           kMaxKeyBytes, " bytes, got ", key.size());
  return key;
}

Deadline read_deadline(MessageReader& message) {
  return deadline_in(static_cast<double>(message.i64()) / 1e3);
}

}  // namespace

StoreServer::Connection* StoreServer::find(std::uint64_t id) {
  for (const auto& c : connections_)
    if (c->id == id && !c->closing) return c.get();
  return nullptr;
}

void StoreServer::reply(Connection& c, const MessageWriter& message) {
  if (c.closing) return;
  c.unsent += message.framed();
  flush(c);
}

void StoreServer::refuse(Connection& c, const std::string& why) {
  reply(c, start_reply(Reply::refused).text(why));
}

void StoreServer::handle(Connection& c, MessageReader message) {
  const auto request = static_cast<Request>(message.u8());
  if (!c.greeted) {
    MT_CHECK(request == Request::hello && message.text() == kStoreMagic,
             "store: expected a greeting");
    const std::string run = message.text();
    MT_CHECK(run == options_.run, "store: this is the store of another run");
    c.greeted = true;
    reply(c, start_reply(Reply::ok));
    return;
  }
  switch (request) {
    case Request::set: {
      const std::string key = read_key(message);
      put(key, message.text());
      reply(c, start_reply(Reply::ok));
      answer_waiters(key);
      return;
    }
    case Request::get: {
      const std::string key = read_key(message);
      waiters_.push_back({c.id, key, false, read_deadline(message)});
      answer_waiters(key);
      return;
    }
    case Request::add: {
      const std::string key = read_key(message);
      std::int64_t sum = 0;
      if (const auto found = values_.find(key); found != values_.end()) {
        const std::string& text = found->second;
        const auto end = text.data() + text.size();
        if (std::from_chars(text.data(), end, sum).ptr != end || text.empty()) {
          refuse(c,
                 "add: expected a number under \"" + key + "\", got \"" + text.substr(0, 64) + '"');
          return;
        }
      }
      std::int64_t total = 0;
      MT_CHECK(!__builtin_add_overflow(sum, message.i64(), &total), "store: sum overflows");
      put(key, std::to_string(total));
      reply(c, start_reply(Reply::ok).i64(total));
      answer_waiters(key);
      return;
    }
    case Request::remove: {
      const auto found = values_.find(read_key(message));
      const bool there = found != values_.end();
      if (there) {
        value_bytes_ -= found->first.size() + found->second.size();
        values_.erase(found);
      }
      reply(c, start_reply(Reply::ok).i64(there));
      return;
    }
    case Request::gather: handle_gather(c, message); return;
    default: handle_watchdog(c, request, message);
  }
}

void StoreServer::put(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : key.size() + found->second.size();
  const std::size_t after = key.size() + value.size();
  MT_CHECK(value_bytes_ - before + after <= kMaxStoredBytes, "store: full (1 GiB)");
  value_bytes_ = value_bytes_ - before + after;
  values_[key] = std::move(value);
}

void StoreServer::answer_waiters(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return;
  const MessageWriter message = start_reply(Reply::ok).text(found->second);
  std::erase_if(waiters_, [&](const Waiter& w) {
    if (w.gather || w.key != key) return false;
    if (Connection* c = find(w.connection)) reply(*c, message);
    return true;
  });
}

void StoreServer::handle_gather(Connection& c, MessageReader& message) {
  const std::string key = read_key(message);
  const std::int64_t rank = message.i64(), count = message.i64();
  MT_CHECK(
      count >= 1 && count <= static_cast<std::int64_t>(ranks_.size()) && rank >= 0 && rank < count,
      "store: gather of rank ", rank, " of ", count);
  const Deadline deadline = read_deadline(message);
  Gathering& gathering = gatherings_[key];
  if (gathering.values.empty()) gathering.values.resize(static_cast<std::size_t>(count));
  MT_CHECK(gathering.values.size() == static_cast<std::size_t>(count),
           "store: ranks gather under one key with different counts");
  auto& slot = gathering.values[static_cast<std::size_t>(rank)];
  MT_CHECK(!slot, "store: rank ", rank, " gathers twice under one key");
  slot = message.text();
  ++gathering.present;
  waiters_.push_back({c.id, key, true, deadline});
  if (gathering.present == gathering.values.size()) answer_gathering(key);
}

void StoreServer::answer_gathering(const std::string& key) {
  MessageWriter message = start_reply(Reply::ok);
  for (const auto& value : gatherings_[key].values) message.text(*value);
  gatherings_.erase(key);
  std::erase_if(waiters_, [&](const Waiter& w) {
    if (!w.gather || w.key != key) return false;
    if (Connection* c = find(w.connection)) reply(*c, message);
    return true;
  });
}

void StoreServer::answer_timeout(const Waiter& w) {
  Connection* c = find(w.connection);
  if (c == nullptr) return;
  MessageWriter message = start_reply(Reply::timeout);
  if (w.gather) {
    const auto& values = gatherings_[w.key].values;
    for (std::size_t r = 0; r < values.size(); ++r)
      if (!values[r]) message.i64(static_cast<std::int64_t>(r));
  }
  reply(*c, message);
}

void StoreServer::handle_watchdog(Connection& c, Request request, MessageReader& message) {
  if (request == Request::attach) {
    const std::int64_t rank = message.i64();
    MT_CHECK(rank >= 0 && rank < static_cast<std::int64_t>(ranks_.size()), "store: no rank ", rank);
    Rank& mine = ranks_[static_cast<std::size_t>(rank)];
    if (mine.presence == Presence::here) {
      refuse(c, "two processes say that they are rank " + std::to_string(rank) + ": " +
                    mine.description + " and " + message.text());
      return;
    }
    mine = {Presence::here, message.text(), ""};
    c.rank = static_cast<int>(rank);
    ++attached_;
    reply(c, start_reply(Reply::ok));
    if (failure_) reply(c, start_reply(Reply::failure).i64(failed_rank_).text(*failure_));
  }
  MT_CHECK(c.rank >= 0, "store: request ", static_cast<int>(request), " before attach");
  Rank& mine = ranks_[static_cast<std::size_t>(c.rank)];
  c.deadline = deadline_in(options_.silence);
  switch (request) {
    case Request::attach: return;
    case Request::beat:
      mine.status = message.text();
      reply(c, start_reply(Reply::ok));
      return;
    case Request::statuses: {
      MessageWriter answer = start_reply(Reply::statuses);
      for (const Rank& rank : ranks_)
        answer.u8(static_cast<std::uint8_t>(rank.presence))
            .text(rank.description)
            .text(rank.status);
      reply(c, answer);
      return;
    }
    case Request::fail: record_failure(c.rank, message.text()); return;
    case Request::leave:
      if (mine.presence == Presence::here) --attached_;
      mine.presence = Presence::left;
      reply(c, start_reply(Reply::ok));
      return;
    default: MT_THROW("store: unknown request ", static_cast<int>(request));
  }
}

void StoreServer::record_failure(int rank, const std::string& text) {
  if (failure_) return;  // what follows from the first is noise
  failure_ = text;
  failed_rank_ = rank;
  const MessageWriter message = start_reply(Reply::failure).i64(rank).text(text);
  // Rank 0 last: its process holds this server and ends when it learns of the failure.
  for (const bool zero : {false, true})
    for (const auto& c : connections_)
      if (c->rank >= 0 && (c->rank == 0) == zero) reply(*c, message);
}

}  // namespace mixtape::distributed
