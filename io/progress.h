// Training progress for people: on a terminal one line that redraws in place, elsewhere (log files,
// CI) plain lines. Reading a loss from a device costs a synchronisation, so metrics are asked for
// only when a line is about to be drawn: at most ten times a second.
//
//   io::ProgressBar bar(stdout, {.epochs = 5, .samples_per_epoch = 60000});
//   for (int epoch = 0; epoch < 5; ++epoch) {
//     bar.start_epoch(epoch);
//     for (auto& [x, y] : loader) {
//       ...
//       bar.advance(x.size(0), [&] { return io::ProgressMetrics{.loss = loss.item<float>()}; });
//     }
//     bar.finish_epoch({.loss = mean_loss, .accuracy = test_accuracy});
//   }
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mixtape::io {

/// What is shown besides the counts; absent values are left out.
struct ProgressMetrics {
  std::optional<double> loss = {};
  std::optional<double> accuracy = {};    // fraction in [0, 1], shown in per cent
  std::optional<double> loss_scale = {};  // powers of two are shown as 2^n
};

struct ProgressOptions {
  int epochs = 1;
  std::int64_t samples_per_epoch = 0;  // 0: unknown, then neither bar nor ETA
  /// Redraw in place? Default: whether the stream is a terminal (never for a std::ostream).
  std::optional<bool> terminal = {};
  int width = 0;            // columns; 0: ask the terminal at each redraw
  double plain_every = 10;  // plain lines: seconds without one after which the next is due
  /// Seconds from any fixed point; default the steady clock. For tests.
  std::function<double()> clock = {};
};

class ProgressBar {
 public:
  /// Neither stream is owned. TERM=dumb counts as no terminal; NO_COLOR turns colour off; a locale
  /// that names another charset than UTF-8 gets an ASCII bar.
  ProgressBar(std::FILE* out, ProgressOptions options);
  ProgressBar(std::ostream& out, ProgressOptions options);
  /// Leaves the cursor on a fresh line, also when an exception ends an epoch half way.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// `epoch` counts from 0 and is shown from 1.
  void start_epoch(int epoch);
  /// Counts `samples` as done and, if a line is due, calls metrics() for what it shows.
  template <class Metrics>
  void advance(std::int64_t samples, Metrics&& metrics) {
    done_ += samples;
    if (due()) show(std::forward<Metrics>(metrics)());
  }
  /// The epoch's closing line, which stays.
  void finish_epoch(const ProgressMetrics& metrics);
  /// A line of text of its own, above a live bar.
  void note(const std::string& text);

 private:
  struct Field {
    int rank;  // 0 is kept longest
    std::string text, narrow = {};
  };
  bool due() const;
  std::vector<Field> fields(const ProgressMetrics& metrics, bool finished) const;
  void show(const ProgressMetrics& metrics);
  std::string line(const ProgressMetrics& metrics, int width, bool finished) const;
  int columns() const;
  void put(const std::string& text);
  double now() const;

  ProgressOptions options_;
  std::FILE* file_ = nullptr;
  std::ostream* stream_ = nullptr;
  bool terminal_ = false, utf8_ = true, color_ = false;
  bool live_ = false;  // the cursor is on an unfinished line
  int epoch_ = 0;
  std::int64_t done_ = 0, shown_tenth_ = 0;
  double epoch_start_ = 0, last_shown_ = 0;
};

namespace detail {
/// `width` columns of bar for a fraction in [0, 1], in eighths of a column or, without UTF-8, '#'.
std::string bar_text(double fraction, int width, bool utf8);
/// "0:07", "12:34" or "1:02:03".
std::string duration_text(double seconds);
/// Three significant digits with k, M or G: 950, 12.3k, 1.05M.
std::string rate_text(double per_second);
}  // namespace detail

}  // namespace mixtape::io
