// Where an axis gets its ticks and how they are labelled; see detail:: in line_plot.h.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "io/line_plot.h"
#include "io/text.h"

namespace mixtape::io::detail {
namespace {

std::string chars(double v, std::chars_format format, int precision) {
  char text[400];
  const auto end = std::to_chars(text, text + sizeof text, v, format, precision);
  return {text, end.ptr};
}

int exponent_of(double v) { return static_cast<int>(std::floor(std::log10(v) + 1e-9)); }

std::string scientific(double v, double step) {
  if (v == 0.0) return "0";
  const int digits = std::max(0, exponent_of(std::abs(v)) - exponent_of(step));
  std::string text = chars(v, std::chars_format::scientific, digits);
  const std::size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  std::string mantissa = text.substr(0, e);
  if (mantissa.find('.') != mantissa.npos) {
    mantissa.erase(mantissa.find_last_not_of('0') + 1);
    if (mantissa.back() == '.') mantissa.pop_back();
  }
  return join({mantissa, "e", std::to_string(exponent)});  // 1.0e-05 -> 1e-5
}

// One form for the whole axis, with as many decimals as the step needs.
std::string label_of(double v, double step, double largest) {
  if (largest >= 1e15 || largest < 1e-4) return scientific(v, step);
  const auto decimals = [&](double unit) { return std::max(0, -exponent_of(step / unit)); };
  constexpr struct {
    double unit;
    const char* suffix;
  } kUnits[] = {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  for (const auto& [unit, suffix] : kUnits)
    if (largest >= 10 * unit || (largest >= unit && unit > 1e3))
      if (decimals(unit) <= 2)
        return v == 0.0 ? "0" : chars(v / unit, std::chars_format::fixed, decimals(unit)) + suffix;
  return chars(v, std::chars_format::fixed, decimals(1.0));
}

// mantissa (1, 2 or 5) times 10^exponent; exponents past double's range are legal.
std::string decade_label(int mantissa, int exponent) {
  if (exponent < -4 || exponent > 5)
    return join({std::to_string(mantissa), "e", std::to_string(exponent)});
  const double decade = std::pow(10.0, exponent);
  return label_of(mantissa * decade, decade, std::max(mantissa * decade, 1e-4));
}

}  // namespace

std::vector<Tick> linear_ticks(double low, double high, int most) {
  const double largest = std::max(std::abs(low), std::abs(high));
  double power = std::pow(10.0, std::floor(std::log10((high - low) / (most + 1))));
  if (!std::isnormal(power)) return {};  // a range at the ends of what double can hold
  double step = 0, first = 0, last = 0;
  for (bool fits = false; !fits; power *= 10)
    for (const double m : {1.0, 2.0, 5.0}) {
      step = m * power;
      first = std::ceil(low / step - 1e-9), last = std::floor(high / step + 1e-9);
      fits = last - first + 1 <= most;
      if (fits) break;
    }
  std::vector<Tick> ticks;
  for (double i = first; i <= last; ++i) {
    const double v = i * step + 0.0;  // -0 becomes 0
    ticks.push_back({v, label_of(v, step, largest)});
  }
  return ticks;
}

std::vector<Tick> log_ticks(double low, double high, int most) {
  std::vector<Tick> ticks;
  const auto add = [&](int mantissa, int exponent) {
    const double at = exponent + std::log10(mantissa);
    if (at >= low - 1e-9 && at <= high + 1e-9)
      ticks.push_back({at, decade_label(mantissa, exponent)});
  };
  const int first = static_cast<int>(std::floor(low)), last = static_cast<int>(std::ceil(high));
  for (int e = first; e <= last; ++e)
    for (const int mantissa : {1, 2, 5}) add(mantissa, e);
  if (ticks.size() >= 3 && static_cast<int>(ticks.size()) <= most) return ticks;
  ticks.clear();
  const int every = (last - first + most) / std::max(1, most);
  for (int e = first; e <= last; ++e)
    if (e % every == 0) add(1, e);
  if (ticks.size() >= 2) return ticks;
  // Less than a factor of about 2: linear steps of the value itself.
  ticks = linear_ticks(std::pow(10.0, low), std::pow(10.0, high), most);
  std::erase_if(ticks, [](const Tick& t) { return !(t.value > 0); });
  for (Tick& t : ticks) t.value = std::log10(t.value);
  return ticks;
}

}  // namespace mixtape::io::detail
