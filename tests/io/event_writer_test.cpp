// Event files, read back by a reader that shares no code with the writer: a bit-by-bit CRC and a
// protocol-buffer walk. CASES 114.
#include "io/event_writer.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "io/file.h"
#include "io/text.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::slurp;
using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

struct Event {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string file_version;
  std::vector<std::pair<std::string, float>> values;
};

std::uint32_t bitwise_crc32c(std::string_view bytes) {
  std::uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes)
    for (int bit = 0; bit < 8; ++bit) {
      const bool one =
          ((crc ^ static_cast<std::uint32_t>(static_cast<unsigned char>(byte) >> bit)) & 1) != 0;
      crc >>= 1;
      if (one) crc ^= 0x82F63B78u;
    }
  return crc ^ 0xFFFFFFFFu;
}

std::uint64_t little(std::string_view bytes) {
  std::uint64_t v = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) v = v << 8 | static_cast<unsigned char>(bytes[i]);
  return v;
}

bool crc_matches(std::string_view stored, std::string_view bytes) {
  const auto masked = static_cast<std::uint32_t>(little(stored) - 0xA282EAD8u);
  return (masked >> 17 | masked << 15) == bitwise_crc32c(bytes);
}

std::uint64_t varint(std::string_view& in) {
  std::uint64_t v = 0;
  for (int shift = 0;; shift += 7) {
    if (in.empty()) throw std::runtime_error("varint cut short");
    const auto b = static_cast<unsigned char>(in.front());
    in.remove_prefix(1);
    v |= std::uint64_t{b & 0x7Fu} << shift;
    if (b < 0x80) return v;
  }
}

// Calls on(field, bytes or little-endian value bytes, varint value) for each field of a message.
template <class F>
void walk(std::string_view in, F&& on) {
  while (!in.empty()) {
    const std::uint64_t key = varint(in);
    if ((key & 7) == 0) {
      on(static_cast<int>(key >> 3), std::string_view(), varint(in));
      continue;
    }
    const std::size_t n = (key & 7) == 1 ? 8 : (key & 7) == 5 ? 4 : varint(in);
    if ((key & 7) > 5 || in.size() < n) throw std::runtime_error("bad field");
    on(static_cast<int>(key >> 3), in.substr(0, n), std::uint64_t{0});
    in.remove_prefix(n);
  }
}

Event parse(std::string_view bytes) {
  Event event;
  walk(bytes, [&](int field, std::string_view data, std::uint64_t value) {
    if (field == 1) event.wall_time = std::bit_cast<double>(little(data));
    if (field == 2) event.step = static_cast<std::int64_t>(value);
    if (field == 3) event.file_version = data;
    if (field != 5) return;
    walk(data, [&](int, std::string_view entry, std::uint64_t) {
      std::pair<std::string, float> v;
      walk(entry, [&](int f, std::string_view d, std::uint64_t) {
        if (f == 1) v.first = d;
        if (f == 2) v.second = std::bit_cast<float>(static_cast<std::uint32_t>(little(d)));
      });
      event.values.push_back(v);
    });
  });
  return event;
}

// All whole records; stops at a tail cut short. A whole record with a wrong CRC throws.
std::vector<Event> read_events(std::string_view in) {
  std::vector<Event> events;
  while (in.size() >= 12) {
    if (!crc_matches(in.substr(8, 4), in.substr(0, 8))) throw std::runtime_error("length CRC");
    const std::uint64_t n = little(in.substr(0, 8));
    if (in.size() < 16 + n) break;
    if (!crc_matches(in.substr(12 + n, 4), in.substr(12, n))) throw std::runtime_error("data CRC");
    events.push_back(parse(in.substr(12, n)));
    in.remove_prefix(16 + n);
  }
  return events;
}

TEST(EventWriter, Crc32cOfKnownText) {
  EXPECT_EQ(detail::crc32c("123456789"), 0xE3069283u);  // RFC 3720, appendix B.4
  EXPECT_EQ(detail::crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(detail::crc32c(""), 0u);
}

TEST(EventWriter, ScalarsReadBack) {
  const TempDir dir;
  EventWriter log(dir / "runs/a");  // parents are made
  log.scalar("train/loss", 0.5, 0);
  log.scalars({{"loss", 0.25}, {"accuracy", 0.75}}, 1LL << 40);
  log.scalar("negative", -3, -1);
  log.flush();
  const std::string name = log.path().filename().string();
  EXPECT_EQ(name.rfind("events.out.tfevents.", 0), 0u) << name;
  const auto events = read_events(slurp(log.path()));
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_GT(events[0].wall_time, 1.6e9);
  EXPECT_EQ(events[1].values, (std::vector<std::pair<std::string, float>>{{"train/loss", 0.5f}}));
  EXPECT_EQ(events[2].step, 1LL << 40);
  EXPECT_EQ(events[2].values[1], (std::pair<std::string, float>{"accuracy", 0.75f}));
  EXPECT_EQ(events[3].step, -1);
}

TEST(EventWriter, Case114NonFiniteScalarsAndAnyTag) {
  const TempDir dir;
  EventWriter log(dir.path());
  constexpr double kInf = std::numeric_limits<double>::infinity();
  log.scalar("nan", std::nan(""), 1);
  log.scalars({{"inf", kInf}, {"-inf", -kInf}, {"1e300", 1e300}}, 2);
  const std::string odd = std::string("a\"b\\c\n\x01\0z é 損失 🙂", 25);
  log.scalar(odd, 1, 3);
  log.scalar("", 1, 4);
  log.scalar("bad \xFF\xC0\xAF\xED\xA0\x80\xF0\x9F tail", 1, 5);
  const auto events = read_events(slurp(log.path()));
  ASSERT_EQ(events.size(), 6u);
  EXPECT_TRUE(std::isnan(events[1].values[0].second));
  EXPECT_EQ(events[2].values[0].second, kInf);
  EXPECT_EQ(events[2].values[1].second, -kInf);
  EXPECT_EQ(events[2].values[2].second, kInf);
  EXPECT_EQ(events[3].values[0].first, odd);
  EXPECT_EQ(events[4].values[0].first, "");
  std::string replaced = "bad ";
  for (int i = 0; i < 7; ++i) replaced += "\xEF\xBF\xBD";  // FF, C0, AF, ED, A0, 80, F0 9F
  EXPECT_EQ(events[5].values[0].first, replaced + " tail");
}

TEST(EventWriter, Case114EveryTruncationKeepsTheWholeRecords) {
  const TempDir dir;
  EventWriter log(dir.path());
  std::vector<std::size_t> ends{slurp(log.path()).size()};
  for (int i = 0; i < 3; ++i) {
    log.scalar("loss", i, i);
    ends.push_back(slurp(log.path()).size());
  }
  const std::string bytes = slurp(log.path());
  for (std::size_t n = 0; n <= bytes.size(); ++n) {
    std::size_t whole = 0;
    for (const std::size_t end : ends) whole += end <= n;
    ASSERT_EQ(read_events(bytes.substr(0, n)).size(), whole) << n;
  }
}

TEST(EventWriter, Case114KilledWriterLeavesWholeRecords) {
  const TempDir dir;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    EventWriter log(dir.path());
    for (std::int64_t i = 0;; ++i) log.scalar("loss", static_cast<double>(i), i);
  }
  std::size_t size = 0;
  while (size < 20000) {  // until it has written some hundred records
    ASSERT_EQ(::waitpid(child, nullptr, WNOHANG), 0) << "the writer ended by itself";
    for (const auto& e : std::filesystem::directory_iterator(dir.path()))
      size = std::filesystem::file_size(e.path());
  }
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto file = std::filesystem::directory_iterator(dir.path())->path();
  const auto events = read_events(slurp(file));
  ASSERT_GT(events.size(), 300u);
  for (std::size_t i = 1; i < events.size(); ++i)
    ASSERT_EQ(events[i].step, static_cast<std::int64_t>(i - 1));
}

TEST(EventWriter, Case114TwoWritersInOneDirectoryUseTwoFiles) {
  const TempDir dir;
  EventWriter a(dir.path()), b(dir.path());
  EXPECT_NE(a.path(), b.path());
  for (int i = 0; i < 10; ++i) a.scalar("a", i, i), b.scalar("b", i, i);
  for (const EventWriter* w : {&a, &b}) {
    const auto events = read_events(slurp(w->path()));
    ASSERT_EQ(events.size(), 11u);
    for (std::size_t i = 1; i < events.size(); ++i)
      EXPECT_EQ(events[i].values[0].first, w == &a ? "a" : "b");
  }
}

TEST(EventWriter, ThreadsShareOneWriter) {
  const TempDir dir;
  EventWriter log(dir.path());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 250; ++i) log.scalar("t" + std::to_string(t), i, i);
    });
  for (auto& t : threads) t.join();
  std::map<std::string, std::set<std::int64_t>> steps;
  for (const Event& e : read_events(slurp(log.path())))
    for (const auto& [tag, value] : e.values) steps[tag].insert(e.step);
  ASSERT_EQ(steps.size(), 4u);
  for (const auto& [tag, seen] : steps) EXPECT_EQ(seen.size(), 250u) << tag;
}

// A file-size limit stands in for a full disk: the kernel writes a part of the record.
TEST(EventWriter, ShortWriteIsCutOffAndReported) {
  const TempDir dir;
  EventWriter log(dir.path());
  log.scalar("loss", 1, 1);
  rlimit saved{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  const auto previous = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limited = saved;
  limited.rlim_cur = std::filesystem::file_size(log.path()) + 10;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limited), 0);
  const auto first = throws_error([&] { log.scalar("loss", 2, 2); }, {log.path().string()});
  const auto size = std::filesystem::file_size(log.path());
  ::setrlimit(RLIMIT_FSIZE, &saved);
  std::signal(SIGXFSZ, previous);
  EXPECT_TRUE(first);
  EXPECT_EQ(size, limited.rlim_cur - 10);
  log.scalar("loss", 3, 3);
  const auto events = read_events(slurp(log.path()));
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2].step, 3);
}

TEST(EventWriter, UnusableDirectoryIsNamed) {
  const TempDir dir;
  spew(dir / "file", "x");
  EXPECT_TRUE(throws_error([&] { EventWriter log(dir / "file"); }, {"EventWriter", "file"}));
}

TEST(Text, Utf8RepairKeepsWhatIsWellFormed) {
  const std::string well =
      "\x7F \xC2\x80 \xE0\xA0\x80 \xED\x9F\xBF \xEF\xBF\xBF \xF0\x90\x80\x80 "
      "\xF4\x8F\xBF\xBF";
  EXPECT_EQ(valid_utf8(well), well);
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(valid_utf8("\x80"), r);
  EXPECT_EQ(valid_utf8("\xC1\xBF"), r + r);
  EXPECT_EQ(valid_utf8("\xE0\x80\x80"), r + r + r);
  EXPECT_EQ(valid_utf8("\xF4\x90\x80\x80"), r + r + r + r);
  EXPECT_EQ(valid_utf8("\xF0\x90\x80"), r);
  EXPECT_EQ(valid_utf8("\xE2\x82"
                       "a"),
            r + "a");
}

TEST(File, FailedWriteKeepsTheOldFileAndLeavesNoTemporary) {
  const TempDir dir;
  write_file(dir / "a", "old");
  write_file(dir / "a", "new");
  EXPECT_EQ(slurp(dir / "a"), "new");
  std::filesystem::create_directory(dir / "sub");
  EXPECT_TRUE(throws_error([&] { write_file(dir / "sub", "x"); }, {"sub", "directory"}));
  EXPECT_TRUE(throws_error([&] { write_file(dir / "none/a", "x"); }, {"No such file"}));
  std::set<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(dir.path()))
    names.insert(e.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"a", "sub"}));
}

}  // namespace
}  // namespace mixtape::io
