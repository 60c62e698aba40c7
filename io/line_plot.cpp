#include "io/line_plot.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "engine/check.h"
#include "io/file.h"
#include "io/text.h"

namespace mixtape::io {
namespace {

constexpr std::array kColors = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                "#E69F00", "#56B4E9", "#333333"};
constexpr std::array kDashes = {"", "7 4", "2 4"};  // for the series after the colours run out
constexpr const char* kInk = "#24292f";
constexpr const char* kMuted = "#57606a";
constexpr const char* kGrid = "#e4e7eb";
constexpr double kLargest = 1e300, kSmallest = 1e-290;  // keep differences finite and nonzero

struct Point {
  double x, y;
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void add(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
  bool empty() const { return low > high; }
  // Makes room around the data; a constant is centred in a range of its own size.
  void widen(double margin) {
    if (empty()) low = 0, high = 1;
    const double center = low / 2 + high / 2;
    const double least = std::max(std::abs(center) * 1e-12, kSmallest);
    if (high - low <= least) {
      const double half = std::max(std::abs(center) * 0.1, center == 0 ? 1.0 : least * 4);
      low = center - half, high = center + half;
    } else {
      const double pad = (high - low) * margin;
      low -= pad, high += pad;
    }
  }
};

// A coordinate, to a hundredth of a pixel.
std::string number(double v) {
  char text[400];  // room for the largest double
  const auto end = std::to_chars(text, text + sizeof text, v, std::chars_format::fixed, 2);
  std::string s(text, end.ptr);
  if (s.find('.') != s.npos) s.erase(s.find_last_not_of('0') + 1);
  if (s.back() == '.') s.pop_back();
  return s == "-0" ? "0" : s;
}

std::string shortest(double v) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, v).ptr};
}

// XML 1.0 text: valid UTF-8, the five special characters escaped, forbidden ones replaced.
std::string escape(std::string_view text) {
  std::string out;
  const std::string valid = valid_utf8(text);
  for (std::size_t i = 0; i < valid.size(); ++i) {
    const char c = valid[i];
    const std::string_view three = std::string_view(valid).substr(i, 3);
    if (three == "\xEF\xBF\xBE" || three == "\xEF\xBF\xBF") {  // U+FFFE, U+FFFF
      out += "\xEF\xBF\xBD";
      i += 2;
      continue;
    }
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&apos;"; break;
      case '\t':
      case '\n':
      case '\r': out += ' '; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F)
          out += "\xEF\xBF\xBD";
        else
          out += c;
    }
  }
  return out;
}

// Rough width of sans-serif text in pixels: code points times an average advance.
double text_width(std::string_view text, double size) {
  const auto points = std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  });
  return static_cast<double>(points) * size * 0.6;
}

/// Data to pixels, and the SVG text as it grows.
class Plot {
 public:
  Plot(const std::vector<PlotSeries>& series, const LinePlotOptions& options)
      : series_(series), o_(options) {}
  std::string draw();

 private:
  Point data(const PlotSeries& s, std::size_t i) const;
  void measure();
  void lay_out();
  void axes();
  void legend();
  void lines();
  void dots(const std::vector<std::vector<Point>>& runs, const char* color);
  void path(const std::vector<std::vector<Point>>& runs, const std::string& style);
  std::vector<std::vector<Point>> pixel_runs(const PlotSeries& s, double smoothing) const;
  void bad_values(const PlotSeries& s, const char* color);
  void append(std::string_view text) { svg_.append(text); }
  void append(double v) { svg_ += number(v); }
  template <class... Parts>
  void emit(const Parts&... parts) {
    (append(parts), ...);
  }
  void text(double x, double y, std::string_view content, const std::string& attributes);
  double px(double x) const { return left_ + (x - x_.low) / (x_.high - x_.low) * (right_ - left_); }
  double py(double y) const {
    return bottom_ - (y - y_.low) / (y_.high - y_.low) * (bottom_ - top_);
  }

  const std::vector<PlotSeries>& series_;
  const LinePlotOptions& o_;
  Range x_, y_;
  bool no_data_ = false;
  std::vector<detail::Tick> x_ticks_, y_ticks_;
  std::vector<Point> legend_at_;  // per series; x < 0: not in the legend
  double left_ = 0, right_ = 0, top_ = 0, bottom_ = 0;
  std::string svg_;
};

// y is on the axis' scale (log10 for log_y); NaN where the point cannot be drawn.
Point Plot::data(const PlotSeries& s, std::size_t i) const {
  const double x = s.x.empty() ? static_cast<double>(i) : s.x[i];
  double y = s.y[i];
  if (o_.log_y) y = y > 0 ? std::log10(y) : std::numeric_limits<double>::quiet_NaN();
  if (!std::isfinite(x) || !std::isfinite(y)) return {x, std::numeric_limits<double>::quiet_NaN()};
  return {std::clamp(x, -kLargest, kLargest), std::clamp(y, -kLargest, kLargest)};
}

void Plot::measure() {
  for (const PlotSeries& s : series_)
    for (std::size_t i = 0; i < s.y.size(); ++i)
      if (const Point p = data(s, i); !std::isnan(p.y)) x_.add(p.x), y_.add(p.y);
  no_data_ = x_.empty();
  if (o_.log_y && !no_data_ && y_.high - y_.low < 0.02) {
    const double center = (y_.low + y_.high) / 2;
    y_.low = center - 0.1, y_.high = center + 0.1;
  }
  x_.widen(0.0);
  y_.widen(0.05);
}

void Plot::lay_out() {
  top_ = 18;
  if (!o_.title.empty()) top_ += 28;
  bottom_ = o_.height - (o_.x_label.empty() ? 34 : 54);
  right_ = o_.width - 24;
  const int rows = std::clamp(static_cast<int>((bottom_ - top_) / 48), 3, 9);
  y_ticks_ = o_.log_y ? detail::log_ticks(y_.low, y_.high, rows)
                      : detail::linear_ticks(y_.low, y_.high, rows);
  double widest = 0;
  for (const auto& t : y_ticks_) widest = std::max(widest, text_width(t.label, 12));
  left_ = std::min(22 + widest + (o_.y_label.empty() ? 0 : 22), o_.width * 0.5);
  for (int most = 10; most >= 2; --most) {
    x_ticks_ = detail::linear_ticks(x_.low, x_.high, most);
    double needed = 0;
    for (const auto& t : x_ticks_) needed += text_width(t.label, 12) + 24;
    if (needed <= right_ - left_) break;
  }
  double x = left_;
  bool any = false;
  for (const PlotSeries& s : series_) {
    if (s.name.empty()) {
      legend_at_.push_back({-1, 0});
      continue;
    }
    const double width = 28 + text_width(valid_utf8(s.name), 13) + 18;
    if (x > left_ && x + width > right_) x = left_, top_ += 20;
    if (!any) top_ += 20;
    any = true;
    legend_at_.push_back({x, top_ - 14});
    x += width;
  }
  top_ = std::min(top_, bottom_ - 40);
}

void Plot::text(double x, double y, std::string_view content, const std::string& attributes) {
  emit("<text x='", x, "' y='", y, "' ", attributes, ">", escape(content), "</text>\n");
}

// Attributes of text: size in pixels, colour, start, middle or end.
std::string font(int size, std::string_view color, std::string_view anchor) {
  return join(
      {"font-size='", std::to_string(size), "' fill='", color, "' text-anchor='", anchor, "'"});
}

void Plot::axes() {
  const auto segment = [&](double x1, double y1, double x2, double y2, std::string_view color) {
    emit("<path d='M", x1, " ", y1, "L", x2, " ", y2, "' stroke='", color, "'/>\n");
  };
  for (const auto& t : y_ticks_) {
    segment(left_, py(t.value), right_, py(t.value), kGrid);
    text(left_ - 10, py(t.value) + 4, t.label, font(12, kMuted, "end"));
  }
  for (const auto& t : x_ticks_) {
    segment(px(t.value), bottom_, px(t.value), bottom_ + 5, kMuted);
    text(px(t.value), bottom_ + 20, t.label, font(12, kMuted, "middle"));
  }
  segment(left_, bottom_, right_, bottom_, kMuted);
  if (!o_.title.empty())
    text(left_, 32, o_.title, join({font(17, kInk, "start"), " font-weight='600'"}));
  const double center = (left_ + right_) / 2, middle = (top_ + bottom_) / 2;
  if (!o_.x_label.empty()) text(center, o_.height - 12, o_.x_label, font(13, kInk, "middle"));
  if (!o_.y_label.empty())
    text(18, middle, o_.y_label,
         join({font(13, kInk, "middle"), " transform='rotate(-90 18 ", number(middle), ")'"}));
  if (no_data_) text(center, middle, "no finite values", font(14, kMuted, "middle"));
}

// Attributes of a series' line.
std::string stroke(std::size_t index, double width, double opacity) {
  std::string style =
      join({"fill='none' stroke='", kColors[index % kColors.size()], "' stroke-width='",
            number(width), "' stroke-linejoin='round' stroke-linecap='round'"});
  const std::string_view dash = kDashes[index / kColors.size() % kDashes.size()];
  if (!dash.empty()) style += join({" stroke-dasharray='", dash, "'"});
  if (opacity < 1) style += join({" opacity='", number(opacity), "'"});
  return style;
}

void Plot::legend() {
  for (std::size_t i = 0; i < series_.size(); ++i) {
    const auto [x, y] = legend_at_[i];
    if (x < 0) continue;
    emit("<path d='M", x, " ", y, "h20' ", stroke(i, 2.5, 1), "/>\n");
    text(x + 27, y + 4.5, series_[i].name, font(13, kInk, "start"));
  }
}

// Unbroken pieces of the line in pixels, thinned to four points a pixel column.
std::vector<std::vector<Point>> Plot::pixel_runs(const PlotSeries& s, double smoothing) const {
  std::vector<std::vector<Point>> runs(1);
  std::vector<Point> column;
  const auto end_column = [&] {
    if (column.size() > 4) {
      const auto by_y = [](const Point& a, const Point& b) { return a.y < b.y; };
      auto [low, high] = std::minmax_element(column.begin(), column.end(), by_y);
      if (high < low) std::swap(low, high);
      column = {column.front(), *low, *high, column.back()};
    }
    runs.back().insert(runs.back().end(), column.begin(), column.end());
    column.clear();
  };
  double average = 0, weight = 0;
  for (std::size_t i = 0; i < s.y.size(); ++i) {
    Point p = data(s, i);
    if (std::isnan(p.y)) {
      end_column();
      if (!runs.back().empty()) runs.emplace_back();
      continue;
    }
    if (smoothing > 0) {  // started at zero, so divided by the weight gathered so far
      average = smoothing * average + (1 - smoothing) * p.y;
      weight = smoothing * weight + (1 - smoothing);
      p.y = average / weight;
    }
    const Point pixel{px(p.x), py(p.y)};
    if (!column.empty() && std::floor(column.back().x) != std::floor(pixel.x)) end_column();
    column.push_back(pixel);
  }
  end_column();
  return runs;
}

void Plot::path(const std::vector<std::vector<Point>>& runs, const std::string& style) {
  if (runs.front().empty()) return;
  emit("<path d='");
  for (const auto& run : runs) {
    for (std::size_t i = 0; i < run.size(); ++i) emit(i == 0 ? "M" : "L", run[i].x, " ", run[i].y);
    if (run.size() == 1) emit("h0");  // a lone point shows through its round line cap
  }
  emit("' ", style, "/>\n");
}

// A cross at the plot's upper edge for each run of values that cannot be drawn.
void Plot::bad_values(const PlotSeries& s, const char* color) {
  bool inside = false;
  for (std::size_t i = 0; i < s.y.size(); ++i) {
    const Point p = data(s, i);
    const bool bad = std::isnan(p.y) && std::isfinite(p.x);
    if (bad && !inside) {
      const double x = std::clamp(px(p.x), left_, right_);
      emit("<path d='M", x - 4, " ", top_ + 4, "l8 8m0 -8l-8 8' stroke='", color,
           "' stroke-width='2'><title>", escape(s.name), ": ", shortest(s.y[i]), " at ",
           shortest(p.x), "</title></path>\n");
    }
    inside = bad;
  }
}

// All raw lines lie under all smoothed ones.
void Plot::lines() {
  const auto smooth = [&](const PlotSeries& s) {
    return o_.smoothing > 0 && s.y.size() > 2 && !s.markers;
  };
  for (std::size_t i = 0; i < series_.size(); ++i)
    if (smooth(series_[i])) path(pixel_runs(series_[i], 0), stroke(i, 1.2, 0.28));
  for (std::size_t i = 0; i < series_.size(); ++i) {
    const PlotSeries& s = series_[i];
    const char* color = kColors[i % kColors.size()];
    const auto runs = pixel_runs(s, smooth(s) ? o_.smoothing : 0);
    path(runs, stroke(i, 2.2, 1));
    if (s.markers) dots(runs, color);
    bad_values(s, color);
  }
}

void Plot::dots(const std::vector<std::vector<Point>>& runs, const char* color) {
  for (const auto& run : runs)
    for (const Point& p : run)
      emit("<circle cx='", p.x, "' cy='", p.y, "' r='4' stroke='#fff' stroke-width='1.5' fill='",
           color, "'/>\n");
}

std::string Plot::draw() {
  measure();
  lay_out();
  emit("<svg xmlns='http://www.w3.org/2000/svg' width='", o_.width, "' height='", o_.height,
       "' viewBox='0 0 ", o_.width, " ", o_.height,
       "' font-family='system-ui, \"Segoe UI\", Roboto, \"Helvetica Neue\", \"DejaVu Sans\", "
       "sans-serif'>\n<rect width='100%' height='100%' fill='#ffffff'/>\n");
  axes();
  lines();
  legend();
  emit("</svg>\n");
  return std::move(svg_);
}

}  // namespace

std::string line_plot_svg(const std::vector<PlotSeries>& series, const LinePlotOptions& options) {
  MT_CHECK(options.width >= 240 && options.height >= 160 && options.width <= 20000 &&
               options.height <= 20000,
           "line_plot: expected a size from 240 x 160 to 20000 x 20000, got ", options.width, " x ",
           options.height);
  MT_CHECK(options.smoothing >= 0 && options.smoothing < 1,
           "line_plot: expected smoothing in [0, 1), got ", options.smoothing);
  for (const PlotSeries& s : series)
    MT_CHECK(s.x.empty() || s.x.size() == s.y.size(), "line_plot: series \"", s.name,
             "\": expected as many x as y values (", s.y.size(), "), got ", s.x.size());
  return Plot(series, options).draw();
}

void write_line_plot(const std::filesystem::path& path, const std::vector<PlotSeries>& series,
                     const LinePlotOptions& options) {
  write_file(path, line_plot_svg(series, options));
}

}  // namespace mixtape::io
