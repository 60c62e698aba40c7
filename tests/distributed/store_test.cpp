// The store: values, waiting, many threads, and clients that break the rules.
#include "distributed/store.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "distributed/store_protocol.h"
#include "distributed/store_server.h"
#include "tests/support/expect_error.h"

namespace mixtape::distributed {
namespace {

using testing::expect_error;

constexpr double kLong = 30;  // never reached unless something is wrong

class StoreTest : public ::testing::Test {
 protected:
  StoreAddress address(const std::string& run = "run") const {
    return {{"127.0.0.1"}, server_.port(), run};
  }
  StoreServer server_{{.world_size = 8, .run = "run"}};
};

/// Whatever bytes one likes.
Socket connect_raw(int port) {
  return connect_to({"127.0.0.1"}, port, deadline_in(kLong), [](const Socket&) {});
}
void send_raw(const Socket& socket, const std::string& bytes) {
  send_message(socket, bytes, deadline_in(kLong));
}
/// True when the server closes the connection, whatever it said before.
bool closed_by_server(const Socket& socket) {
  try {
    for (;;) receive_message(socket, deadline_in(kLong));
  } catch (const Error& e) {
    return std::string(e.what()).find("timed out") == std::string::npos;
  }
}

TEST_F(StoreTest, SetGetAddRemove) {
  Store store(address(), kLong);
  store.set("a", "1");
  store.set("a", std::string("x\0y", 3));
  EXPECT_EQ(store.get("a", kLong), std::string("x\0y", 3));
  EXPECT_EQ(store.add("n", 5), 5);
  EXPECT_EQ(store.add("n", -7), -2);
  EXPECT_EQ(store.get("n", kLong), "-2");
  EXPECT_TRUE(store.remove("a"));
  EXPECT_FALSE(store.remove("a"));
  EXPECT_FALSE(store.wait("a", 0.01));
  const std::string large(5 << 20, 'z');
  store.set("large", large);
  EXPECT_EQ(store.get("large", kLong), large);
}

TEST_F(StoreTest, ErrorsNameWhatAndWhere) {
  Store store(address(), kLong);
  const std::string where = "at 127.0.0.1 port " + std::to_string(server_.port());
  expect_error([&] { store.get("nobody's", 0.05); }, "nobody set \"nobody's\" " + where);
  store.set("text", "abc");
  expect_error([&] { store.add("text", 1); }, "expected a number under \"text\", got \"abc\"");
  expect_error([&] { store.set("", "x"); }, "expected a key of 1 to");
  expect_error([&] { store.set("x", std::string(17 << 20, 'x')); },
               "expected a message of at most");
  EXPECT_EQ(store.get("text", kLong), "abc");  // and the store is as it was
}

TEST_F(StoreTest, GetWaitsForSet) {
  Store store(address(), kLong);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    Store(address(), kLong).set("late", "here");
  });
  EXPECT_EQ(store.get("late", kLong), "here");
  later.join();
}

TEST_F(StoreTest, AnswersManyThreads) {
  constexpr int kThreads = 8, kRounds = 50;
  Store shared(address(), kLong);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      Store own(address(), kLong);
      for (int i = 0; i < kRounds; ++i) {
        (i % 2 ? own : shared).add("count", 1);
        const std::string key = std::to_string(t) + '/' + std::to_string(i);
        own.set(key, key);
        EXPECT_EQ(shared.get(key, kLong), key);
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(shared.add("count", 0), kThreads * kRounds);
}

TEST_F(StoreTest, GathersInRankOrder) {
  constexpr int kRanks = 5;
  std::vector<std::vector<std::string>> got(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r)
    threads.emplace_back([&, r] {
      Store store(address(), kLong);
      for (int i = 0; i < 10; ++i)
        got[static_cast<std::size_t>(r)] =
            store.gather("g" + std::to_string(i), r, kRanks, std::to_string(r * 10), kLong, "test");
    });
  for (std::thread& t : threads) t.join();
  for (const auto& values : got)
    EXPECT_EQ(values, (std::vector<std::string>{"0", "10", "20", "30", "40"}));
}

TEST_F(StoreTest, GatherNamesWhoIsMissing) {
  Store store(address(), kLong);
  expect_error([&] { store.gather("g", 1, 4, "", 0.05, "start"); },
               "start: ranks 0, 2, 3 of 4 did not arrive within 0.05 s");
}

TEST_F(StoreTest, RefusesAnotherRun) {
  expect_error([&] { Store(address("other"), 0.2); }, "this is the store of another run");
}

TEST_F(StoreTest, ForeignClientsLoseOnlyTheirConnection) {
  Store store(address(), kLong);
  store.set("k", "v");
  const std::string hello = MessageWriter().u8(0).text(kStoreMagic).text("run").framed();
  const std::string attacks[] = {
      "GET / HTTP/1.1\r\n\r\n",
      std::string(100'000, '\xff'),
      std::string("\0\0\0\0", 4),                             // an empty greeting
      MessageWriter().u8(1).text("k").text("evil").framed(),  // no greeting
      hello + MessageWriter().u8(77).framed(),                // no such request
      hello + MessageWriter().u8(1).i64(-5).framed(),         // a negative length
      hello + MessageWriter().u8(1).i64(1'000'000).framed(),  // more than there is
      hello + std::string("\xff\xff\xff\x7f", 4),             // 2 GiB announced
      hello + MessageWriter().u8(5).text("g").i64(9).i64(4).i64(0).text("").framed(),
      hello + MessageWriter().u8(7).text("beat before attach").framed(),
      hello + MessageWriter().u8(6).i64(99).text("no such rank").framed(),
  };
  for (const std::string& bytes : attacks) {
    const Socket socket = connect_raw(server_.port());
    try {
      send_raw(socket, bytes);
    } catch (const Error&) {  // it hung up half way
    }
    EXPECT_TRUE(closed_by_server(socket));
  }
  {
    const Socket half = connect_raw(server_.port());
    send_raw(half, hello.substr(0, 9));
  }
  EXPECT_EQ(store.get("k", kLong), "v");
  Store(address(), kLong).set("k2", "v2");
  EXPECT_EQ(store.get("k2", kLong), "v2");
}

TEST(StoreConnect, RetriesUntilTheServerIsThere) {
  int port = 0;
  { const Socket probe = listen_on(port); }
  std::unique_ptr<StoreServer> server;
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    server = std::make_unique<StoreServer>(StoreServer::Options{.port = port, .run = "r"});
  });
  Store store({{"127.0.0.1"}, port, "r"}, kLong);
  later.join();
  EXPECT_EQ(store.add("n", 1), 1);
}

TEST(StoreConnect, ErrorsNameHostAndPort) {
  int port = 0;
  { const Socket probe = listen_on(port); }
  expect_error(
      [&] {
        Store({{"127.0.0.1"}, port, "r"}, 0.2);
      },
      "store: cannot connect to rank 0 at 127.0.0.1 port " + std::to_string(port));
  expect_error(
      [&] {
        Store({{"no.such.host.invalid"}, port, "r"}, 0.2);
      },
      "at no.such.host.invalid port");
  StoreServer first({.run = "r"});
  expect_error([&] { StoreServer({.port = first.port(), .run = "r"}); },
               "store: cannot listen on port " + std::to_string(first.port()));
}

TEST(StoreConnect, ALostServerIsAnError) {
  auto server = std::make_unique<StoreServer>(StoreServer::Options{.run = "r"});
  Store store({{"127.0.0.1"}, server->port(), "r"}, kLong);
  store.set("a", "b");
  server.reset();
  expect_error([&] { store.get("a", kLong); }, "store: rank 0 at 127.0.0.1 port");
}

}  // namespace
}  // namespace mixtape::distributed
