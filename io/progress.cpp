#include "io/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ostream>
#include <string_view>
#include <vector>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::io {
namespace detail {

std::string bar_text(double fraction, int width, bool utf8) {
  constexpr const char* kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const double f = std::isfinite(fraction) ? std::clamp(fraction, 0.0, 1.0) : 0.0;
  const int eighths = static_cast<int>(f * width * 8 + 1e-9);
  std::string text;
  int column = 0;
  for (; column < eighths / 8; ++column) text += utf8 ? "█" : "#";
  if (utf8 && eighths % 8 != 0) text += kEighths[eighths % 8], ++column;
  for (; column < width; ++column) text += utf8 ? " " : "-";
  return text;
}

std::string duration_text(double seconds) {
  const auto s = static_cast<long long>(std::clamp(std::ceil(seconds - 0.5), 0.0, 3.5e9));
  char text[40];
  if (s >= 3600)
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
  else
    std::snprintf(text, sizeof text, "%lld:%02lld", s / 60, s % 60);
  return text;
}

std::string rate_text(double v) {
  const char* suffix = "";
  for (const char* next : {"k", "M", "G"}) {
    if (v < 999.5) break;
    v /= 1000;
    suffix = next;
  }
  char text[40];
  std::snprintf(text, sizeof text, "%.*f%s", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, suffix);
  return text;
}

}  // namespace detail

namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int kMaxBar = 32, kMinBar = 6, kBarEdges = 3, kNoLimit = -1;

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (!value || !*value) continue;
    const std::string_view v(value);
    const auto charset = v.find('.');
    if (charset == v.npos) return true;
    return v.find("UTF-8") != v.npos || v.find("utf8") != v.npos || v.find("utf-8") != v.npos;
  }
  return true;
}

std::string format(const char* form, double v) {
  char text[64];
  std::snprintf(text, sizeof text, form, v);
  return text;
}

std::string scale_text(double v) {
  int exponent = 0;
  if (std::isfinite(v) && v > 0 && std::frexp(v, &exponent) == 0.5)
    return join({"2^", std::to_string(exponent - 1)});
  return format("%g", v);
}

}  // namespace

ProgressBar::ProgressBar(std::FILE* out, ProgressOptions options)
    : options_(std::move(options)), file_(out) {
  MT_CHECK(out != nullptr, "ProgressBar: expected a stream, got a null FILE*");
  const char* term = std::getenv("TERM");
  const bool dumb = term && std::string_view(term) == "dumb";
  terminal_ = options_.terminal.value_or(::isatty(::fileno(out)) == 1 && !dumb);
  utf8_ = locale_is_utf8();
  const char* no_color = std::getenv("NO_COLOR");
  color_ = terminal_ && !(no_color && *no_color);
  last_shown_ = epoch_start_ = now();
}

ProgressBar::ProgressBar(std::ostream& out, ProgressOptions options)
    : options_(std::move(options)), stream_(&out) {
  terminal_ = options_.terminal.value_or(false);
  utf8_ = locale_is_utf8();
  last_shown_ = epoch_start_ = now();
}

ProgressBar::~ProgressBar() {
  if (live_) put("\n");
}

double ProgressBar::now() const {
  if (options_.clock) return options_.clock();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int ProgressBar::columns() const {
  if (options_.width > 0) return options_.width;
  winsize size{};
  if (file_ && ::ioctl(::fileno(file_), TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    return size.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const int n = columns ? std::atoi(columns) : 0;
  return n > 0 ? n : 80;
}

void ProgressBar::put(const std::string& text) {
  if (file_) {
    std::fwrite(text.data(), 1, text.size(), file_);
    std::fflush(file_);
  } else {
    *stream_ << text << std::flush;
  }
}

void ProgressBar::start_epoch(int epoch) {
  epoch_ = epoch;
  done_ = shown_tenth_ = 0;
  epoch_start_ = now();
  if (!terminal_) last_shown_ = epoch_start_;
}

bool ProgressBar::due() const {
  const double waited = now() - last_shown_;
  if (terminal_) return waited >= kRedrawSeconds;
  const std::int64_t total = options_.samples_per_epoch;
  const bool next_tenth = total > 0 && done_ * 10 / total > shown_tenth_ && done_ < total;
  return (next_tenth && waited >= 1.0) || waited >= options_.plain_every;
}

void ProgressBar::show(const ProgressMetrics& metrics) {
  last_shown_ = now();
  if (options_.samples_per_epoch > 0) shown_tenth_ = done_ * 10 / options_.samples_per_epoch;
  if (terminal_) {
    put(join({"\r", line(metrics, columns() - 1, false), "\x1b[K"}));
    live_ = true;
  } else {
    put(join({line(metrics, kNoLimit, false), "\n"}));
  }
}

void ProgressBar::finish_epoch(const ProgressMetrics& metrics) {
  const std::string text = line(metrics, terminal_ ? columns() - 1 : kNoLimit, true);
  put(terminal_ ? join({"\r", text, "\x1b[K\n"}) : join({text, "\n"}));
  live_ = false;
  last_shown_ = now();
}

void ProgressBar::note(const std::string& text) {
  put(terminal_ ? join({"\r", text, "\x1b[K\n"}) : join({text, "\n"}));
  live_ = false;
}

// The fields in order of display; a narrow terminal drops them from the highest rank on.
std::vector<ProgressBar::Field> ProgressBar::fields(const ProgressMetrics& m, bool finished) const {
  const double elapsed = now() - epoch_start_;
  const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;
  const std::int64_t total = options_.samples_per_epoch;
  std::vector<Field> fields;
  if (m.loss) fields.push_back({0, format("  loss %.4f", *m.loss)});
  if (m.accuracy)
    fields.push_back({1, format(finished ? "  acc %.2f%%" : "  acc %.1f%%", *m.accuracy * 100)});
  if (rate > 0) {
    const std::string text = detail::rate_text(rate);
    fields.push_back({3, join({"  ", text, " samples/s"}), join({"  ", text, "/s"})});
  }
  if (m.loss_scale) fields.push_back({4, join({"  scale ", scale_text(*m.loss_scale)})});
  if (finished)
    fields.push_back({2, join({"  ", detail::duration_text(elapsed)})});
  else if (total > 0 && rate > 0)
    fields.push_back(
        {2, join({"  ETA ", detail::duration_text(static_cast<double>(total - done_) / rate)})});
  return fields;
}

std::string ProgressBar::line(const ProgressMetrics& metrics, int width, bool finished) const {
  const std::int64_t total = options_.samples_per_epoch;
  const double fraction =
      total > 0 ? std::min(1.0, static_cast<double>(done_) / static_cast<double>(total)) : 0;
  const std::string head =
      join({"epoch ", std::to_string(epoch_ + 1), "/", std::to_string(options_.epochs)});
  const std::string percent = total > 0 ? format(" %3.0f%%", std::floor(fraction * 100)) : "";
  std::vector<Field> shown = fields(metrics, finished);
  const auto length = [&] {
    std::size_t n = head.size() + percent.size();
    for (const Field& f : shown) n += f.text.size();
    return static_cast<int>(n);
  };
  const auto joined = [&] {
    std::string text;
    for (const Field& f : shown) text += f.text;
    return text;
  };
  if (width < 0) return join({head, percent, joined()});

  const int bar_least = total > 0 ? kMinBar + kBarEdges : 0;
  if (length() + bar_least > width)
    for (Field& f : shown)
      if (!f.narrow.empty()) f.text = f.narrow;
  while (!shown.empty() && length() + bar_least > width)
    shown.erase(std::max_element(shown.begin(), shown.end(),
                                 [](const Field& a, const Field& b) { return a.rank < b.rank; }));
  if (total == 0 || length() + bar_least > width)
    return join({join({head, percent}).substr(0, static_cast<std::size_t>(width)), joined()});
  const std::string bar =
      detail::bar_text(fraction, std::min(width - length() - kBarEdges, kMaxBar), utf8_);
  const char* left = utf8_ ? " ▕" : " [";
  const char* right = utf8_ ? "▏" : "]";
  return join({head, left, color_ ? "\x1b[36m" : "", bar, color_ ? "\x1b[0m" : "", right, percent,
               joined()});
}

}  // namespace mixtape::io
