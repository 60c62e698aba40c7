// The progress bar under a clock of the test's own: how often it draws and asks for metrics, that a
// line never wraps, and what it writes where there is no terminal.
#include "io/progress.h"

#include <fcntl.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <vector>

#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

std::size_t code_points(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) parts.push_back(part);
  return parts;
}

struct Fixture {
  double time = 100;
  std::ostringstream out;
  int asked = 0;
  ProgressOptions options() {
    return {.epochs = 3, .samples_per_epoch = 6000, .clock = [this] { return time; }};
  }
  // One epoch of 60 batches of 100 samples, `seconds` long.
  void epoch(ProgressBar& bar, int number, double seconds) {
    bar.start_epoch(number);
    for (int i = 0; i < 60; ++i) {
      time += seconds / 60;
      bar.advance(100, [&] {
        ++asked;
        return ProgressMetrics{.loss = 0.5, .accuracy = 0.875, .loss_scale = 65536};
      });
    }
    bar.finish_epoch({.loss = 0.25, .accuracy = 0.9});
  }
};

TEST(Progress, TerminalRedrawsInPlaceAtMostTenTimesASecond) {
  Fixture f;
  ProgressOptions options = f.options();
  options.terminal = true;
  options.width = 120;
  ProgressBar bar(f.out, options);
  f.epoch(bar, 0, 2.0);
  EXPECT_LE(f.asked, 20);
  EXPECT_GE(f.asked, 14);
  const std::string text = f.out.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  const auto draws = split(text, '\r');
  ASSERT_EQ(draws.size(), static_cast<std::size_t>(f.asked) + 2);  // "" first, closing line last
  const std::string& middle = draws[draws.size() / 2];
  for (const char* part : {"epoch 1/3", "%", "█", "loss 0.5000", "acc 87.5%", "ETA 0:01",
                           "3.00k samples/s", "scale 2^16"})
    EXPECT_NE(middle.find(part), middle.npos) << part << " in " << middle;
  for (const char* part : {"epoch 1/3", "loss 0.2500", "acc 90.00%", "0:02", "3.00k samples/s"})
    EXPECT_NE(draws.back().find(part), std::string::npos) << part << " in " << draws.back();
}

TEST(Progress, EightyColumnsHoldEveryField) {
  Fixture f;
  ProgressOptions options = f.options();
  options.terminal = true;
  options.width = 80;
  ProgressBar bar(f.out, options);
  f.epoch(bar, 0, 2.0);
  const auto draws = split(f.out.str(), '\r');
  const std::string& middle = draws[draws.size() / 2];
  for (const char* part :
       {"epoch 1/3 ▕███", "%", "loss 0.5000", "acc 87.5%", "ETA 0:01", "3.00k/s", "scale 2^16"})
    EXPECT_NE(middle.find(part), middle.npos) << part << " in " << middle;
}

TEST(Progress, LineNeverReachesTheTerminalsEdge) {
  for (int width = 1; width <= 200; ++width) {
    Fixture f;
    ProgressOptions options = f.options();
    options.terminal = true;
    options.width = width;
    ProgressBar bar(f.out, options);
    f.epoch(bar, 1, 2.0);
    for (std::string draw : split(f.out.str(), '\r')) {
      for (const char* control : {"\x1b[K", "\n"})
        if (const auto at = draw.find(control); at != draw.npos)
          draw.erase(at, std::string(control).size());
      ASSERT_LT(code_points(draw), static_cast<std::size_t>(width)) << draw;
    }
  }
}

TEST(Progress, PlainLinesAboutEveryTenthAndNoControlCharacters) {
  Fixture f;
  ProgressBar bar(f.out, f.options());
  f.epoch(bar, 2, 60.0);
  const std::string text = f.out.str();
  EXPECT_EQ(text.find_first_of("\r\x1b"), text.npos);
  const auto lines = split(text, '\n');
  EXPECT_EQ(lines.size(), 10u) << text;  // nine tenths and the closing line
  EXPECT_NE(
      lines[0].find("epoch 3/3  10%  loss 0.5000  acc 87.5%  100 samples/s  scale 2^16  ETA 0:54"),
      std::string::npos)
      << lines[0];
}

TEST(Progress, PlainLinesOfShortAndLongEpochs) {
  Fixture quick;
  ProgressBar fast(quick.out, quick.options());
  for (int e = 0; e < 3; ++e) quick.epoch(fast, e, 0.5);
  EXPECT_EQ(split(quick.out.str(), '\n').size(), 3u);  // closing lines only
  Fixture slow;
  ProgressBar hourly(slow.out, slow.options());
  slow.epoch(hourly, 0, 3600.0);
  EXPECT_EQ(slow.asked, 60);  // every batch takes longer than plain_every
}

TEST(Progress, UnknownLengthShowsNeitherBarNorEta) {
  Fixture f;
  ProgressOptions options = f.options();
  options.samples_per_epoch = 0;
  options.terminal = true;
  ProgressBar bar(f.out, options);
  f.epoch(bar, 0, 2.0);
  EXPECT_EQ(f.out.str().find("ETA"), std::string::npos);
  EXPECT_EQ(f.out.str().find("█"), std::string::npos);
  EXPECT_NE(f.out.str().find("loss 0.5000"), std::string::npos);
}

TEST(Progress, NonFiniteMetricsAndTooManySamples) {
  Fixture f;
  ProgressBar bar(f.out, f.options());
  bar.start_epoch(0);
  f.time += 20;
  bar.advance(9000, [] {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    return ProgressMetrics{.loss = -kInf, .accuracy = kInf - kInf, .loss_scale = 0.3};
  });
  EXPECT_NE(f.out.str().find("100%  loss -inf"), std::string::npos) << f.out.str();
  EXPECT_NE(f.out.str().find("ETA 0:00"), std::string::npos);
  EXPECT_NE(f.out.str().find("scale 0.3"), std::string::npos);
}

TEST(Progress, DestructionMidEpochEndsTheLine) {
  Fixture f;
  ProgressOptions options = f.options();
  options.terminal = true;
  {
    ProgressBar bar(f.out, options);
    bar.start_epoch(0);
    f.time += 1;
    bar.advance(100, [] { return ProgressMetrics{}; });
    bar.note("saved");
    f.time += 1;
    bar.advance(100, [] { return ProgressMetrics{}; });
  }
  EXPECT_NE(f.out.str().find("\rsaved\x1b[K\n"), std::string::npos);
  EXPECT_EQ(f.out.str().back(), '\n');
}

TEST(Progress, RealTerminalIsRecognisedAndItsWidthUsed) {
  const int primary = ::posix_openpt(O_RDWR | O_NOCTTY);
  if (primary < 0 || ::grantpt(primary) != 0 || ::unlockpt(primary) != 0)
    GTEST_SKIP() << "no pseudo-terminals here";
  std::FILE* tty = std::fopen(::ptsname(primary), "w");
  ASSERT_NE(tty, nullptr);
  winsize size{};
  size.ws_col = 43;
  ASSERT_EQ(::ioctl(primary, TIOCSWINSZ, &size), 0);
  ::setenv("TERM", "xterm", 1);
  ::setenv("NO_COLOR", "1", 1);
  Fixture f;
  {
    ProgressBar bar(tty, f.options());
    bar.start_epoch(0);
    f.time += 1;
    bar.advance(3000, [] { return ProgressMetrics{.loss = 1}; });
  }
  std::fclose(tty);
  char text[512] = {};
  const ssize_t n = ::read(primary, text, sizeof text - 1);
  ::close(primary);
  ASSERT_GT(n, 0);
  std::string drawn(text);
  ASSERT_EQ(drawn.front(), '\r');
  drawn = drawn.substr(1, drawn.find("\x1b[K") - 1);
  EXPECT_LT(code_points(drawn), 43u) << drawn;
  EXPECT_NE(drawn.find(" 50%"), drawn.npos) << drawn;
}

TEST(Progress, FileIsNoTerminal) {
  const mixtape::testing::TempDir dir;
  Fixture f;
  std::FILE* file = std::fopen((dir / "log").c_str(), "w");
  {
    ProgressBar bar(file, f.options());
    f.epoch(bar, 0, 60.0);
  }
  std::fclose(file);
  EXPECT_EQ(mixtape::testing::slurp(dir / "log").find_first_of("\r\x1b"), std::string::npos);
}

TEST(Progress, Texts) {
  EXPECT_EQ(detail::bar_text(0.5, 4, true), "██  ");
  EXPECT_EQ(detail::bar_text(0.53125, 4, true), "██▏ ");
  EXPECT_EQ(detail::bar_text(2.0, 3, true), "███");
  EXPECT_EQ(detail::bar_text(std::numeric_limits<double>::quiet_NaN(), 3, true), "   ");
  EXPECT_EQ(detail::bar_text(0.5, 4, false), "##--");
  EXPECT_EQ(detail::duration_text(7.4), "0:07");
  EXPECT_EQ(detail::duration_text(754), "12:34");
  EXPECT_EQ(detail::duration_text(3723), "1:02:03");
  EXPECT_EQ(detail::duration_text(-1), "0:00");
  EXPECT_EQ(detail::rate_text(9.5), "9.50");
  EXPECT_EQ(detail::rate_text(950), "950");
  EXPECT_EQ(detail::rate_text(999.7), "1.00k");
  EXPECT_EQ(detail::rate_text(12345), "12.3k");
  EXPECT_EQ(detail::rate_text(1.05e6), "1.05M");
}

}  // namespace
}  // namespace mixtape::io
