// Tensor printing, by NumPy's rules: the fewest digits (at most 8 after the point) that every
// element needs, aligned; scientific notation when the range of magnitudes calls for it; three
// items at each end of a dimension once there are more than 1,000 elements; lines of at most 75
// characters.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <ostream>
#include <sstream>

#include "engine/tensor.h"

namespace mixtape {
namespace {

constexpr int kPrecision = 8;
constexpr std::int64_t kThreshold = 1000, kEdgeItems = 3;
constexpr std::size_t kLineWidth = 75;

/// Shortest text that reads back as the same number of the tensor's dtype.
std::string shortest(double v, bool wide, bool scientific) {
  char text[64];
  const auto format = scientific ? std::chars_format::scientific : std::chars_format::fixed;
  char* end = wide ? std::to_chars(text, text + sizeof text, v, format).ptr
                   : std::to_chars(text, text + sizeof text, static_cast<float>(v), format).ptr;
  return std::string(text, end);
}

struct Parts {  // of one number: "-12", "5", "+05"
  std::string whole, fraction, exponent;
};

Parts split(double v, bool wide, bool scientific) {
  std::string s = shortest(v, wide, scientific);
  Parts p;
  if (scientific) {
    const std::size_t e = s.find('e');
    p.exponent = s.substr(e + 1);
    s.resize(e);
  }
  std::size_t point = s.find('.');
  if (point != std::string::npos && s.size() - point - 1 > kPrecision) {  // round to 8 places
    std::ostringstream rounded;
    rounded.setf(scientific ? std::ios::scientific : std::ios::fixed, std::ios::floatfield);
    rounded.precision(kPrecision);
    rounded << v;
    s = rounded.str().substr(0, rounded.str().find('e'));
    point = s.find('.');
    s.erase(s.find_last_not_of('0') + 1);
  }
  p.whole = s.substr(0, point);
  p.fraction = point == std::string::npos ? "" : s.substr(point + 1);
  return p;
}

using Formatter = std::function<std::string(double)>;

std::string pad_left(const std::string& s, std::size_t width) {
  return s.size() >= width ? s : std::string(width - s.size(), ' ') + s;
}

Formatter float_formatter(const std::vector<double>& values, bool wide) {
  double largest = 0, smallest = INFINITY;
  bool special = false;
  for (const double v : values) {
    if (!std::isfinite(v)) {
      special = true;
    } else if (v != 0) {
      largest = std::max(largest, std::fabs(v));
      smallest = std::min(smallest, std::fabs(v));
    }
  }
  const bool scientific =
      largest != 0 && (largest >= 1e8 || smallest < 1e-4 || largest / smallest > 1000);
  std::size_t whole = 1, fraction = 0, exponent = 0;
  for (const double v : values) {
    if (!std::isfinite(v)) continue;
    const Parts p = split(v, wide, scientific);
    whole = std::max(whole, p.whole.size());
    fraction = std::max(fraction, p.fraction.size());
    exponent = std::max(exponent, p.exponent.size());
  }
  std::size_t width = whole + 1 + fraction + (scientific ? 1 + exponent : 0);
  if (special) {
    const bool negative =
        std::any_of(values.begin(), values.end(), [](double v) { return v == -INFINITY; });
    if (width < 3u + negative) {
      whole += 3u + negative - width;
      width = 3u + negative;
    }
  }
  return [=](double v) {
    if (std::isnan(v)) return pad_left("nan", width);
    if (std::isinf(v)) return pad_left(v > 0 ? "inf" : "-inf", width);
    const Parts p = split(v, wide, scientific);
    std::string text = pad_left(p.whole, whole) + "." + p.fraction;
    text += std::string(fraction - p.fraction.size(), scientific ? '0' : ' ');
    if (scientific) text += "e" + p.exponent;
    return text;
  };
}

class Printer {
 public:
  explicit Printer(const Tensor& host) : t_(host), summarise_(host.numel() > kThreshold) {
    std::vector<double> shown;
    visit(0, 0, [&](std::int64_t offset) { shown.push_back(number(offset)); });
    if (is_floating(t_.dtype())) {
      format_ = float_formatter(shown, t_.dtype() == Dtype::f64);
      return;
    }
    std::size_t width = 0;
    for_each_shown(
        [&](std::int64_t offset) { width = std::max(width, whole_text(offset).size()); });
    width_ = width;
  }

  std::string text() {
    if (t_.dim() == 0) {
      std::string s = element(0);
      return s.substr(s.find_first_not_of(' '));
    }
    write(0, 0);
    return out_;
  }

 private:
  double number(std::int64_t offset) const {
    return dispatch_dtype(t_.dtype(), [&](auto tag) -> double {
      using T = typename decltype(tag)::type;
      const T v = static_cast<const T*>(t_.raw_data())[offset];
      if constexpr (sizeof(T) == 2)
        return static_cast<float>(v);
      else
        return static_cast<double>(v);
    });
  }
  std::string whole_text(std::int64_t offset) const {
    return dispatch_dtype(t_.dtype(), [&](auto tag) -> std::string {
      using T = typename decltype(tag)::type;
      const T v = static_cast<const T*>(t_.raw_data())[offset];
      if constexpr (std::is_same_v<T, bool>)
        return v ? "True" : "False";
      else if constexpr (std::is_integral_v<T>)
        return std::to_string(static_cast<std::int64_t>(v));
      else
        return "";
    });
  }
  std::string element(std::int64_t offset) const {
    return is_floating(t_.dtype()) ? format_(number(offset)) : pad_left(whole_text(offset), width_);
  }

  /// Calls f for the index of every item of dimension d that is shown, -1 for the gap.
  template <class F>
  void items(int d, F&& f) const {
    const std::int64_t n = t_.shape()[d];
    const bool gap = summarise_ && n > 2 * kEdgeItems;
    for (std::int64_t i = 0; i < n; ++i) {
      if (gap && i == kEdgeItems) {
        f(std::int64_t{-1});
        i = n - kEdgeItems;
      }
      f(i);
    }
  }
  template <class F>
  void visit(int d, std::int64_t offset, F&& f) const {
    if (d == t_.dim()) return f(offset);
    items(d, [&](std::int64_t i) {
      if (i >= 0) visit(d + 1, offset + i * t_.strides()[d], f);
    });
  }
  template <class F>
  void for_each_shown(F&& f) const {
    visit(0, 0, f);
  }

  void write(int d, std::int64_t offset) {
    out_ += '[';
    const bool innermost = d + 1 == t_.dim();
    std::size_t column = static_cast<std::size_t>(d) + 1;
    bool first = true;
    items(d, [&](std::int64_t i) {
      if (innermost) {
        const std::string item = i < 0 ? "..." : element(offset + i * t_.strides()[d]);
        if (!first && column + 1 + item.size() + static_cast<std::size_t>(t_.dim()) > kLineWidth) {
          new_line(static_cast<std::size_t>(d) + 1);
          column = static_cast<std::size_t>(d) + 1;
        } else if (!first) {
          out_ += ' ';
          ++column;
        }
        out_ += item;
        column += item.size();
      } else {
        if (!first) {
          out_.append(static_cast<std::size_t>(t_.dim() - d - 2), '\n');
          new_line(static_cast<std::size_t>(d) + 1);
        }
        if (i < 0)
          out_ += "...";
        else
          write(d + 1, offset + i * t_.strides()[d]);
      }
      first = false;
    });
    out_ += ']';
  }
  void new_line(std::size_t indent) {
    out_ += '\n';
    out_.append(indent, ' ');
  }

  const Tensor& t_;
  bool summarise_;
  Formatter format_;
  std::size_t width_ = 0;
  std::string out_;
};

}  // namespace

std::string Tensor::to_string() const {
  if (!defined()) return "undefined tensor";
  const Tensor host = detach().cpu();
  std::string text = Printer(host).text();
  if (dtype() != Dtype::f32 || !device().is_cpu()) {
    std::ostringstream suffix;
    suffix << " (" << dtype();
    if (!device().is_cpu()) suffix << " on " << device();
    suffix << ")";
    text += suffix.str();
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const Tensor& t) { return out << t.to_string(); }

}  // namespace mixtape
