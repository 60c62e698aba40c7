// Plots: well-formed XML whatever the data and names, finite coordinates inside the picture, ticks
// on round numbers, and a size that does not grow with the data.
#include "io/line_plot.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::slurp;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Elements nest and close, attributes are quoted, text has no bare special or control characters.
::testing::AssertionResult well_formed(std::string_view xml) {
  const auto fail = [](std::string_view what) {
    return ::testing::AssertionFailure() << "malformed: " << what.substr(0, 200);
  };
  std::vector<std::string_view> open;
  while (!xml.empty()) {
    if (xml[0] == '&') {
      bool known = false;
      for (const std::string_view e : {"&amp;", "&lt;", "&gt;", "&quot;", "&apos;"})
        if (xml.substr(0, e.size()) == e) known = true;
      if (!known) return fail(xml);
    } else if (xml[0] == '<') {
      const std::size_t end = xml.find('>');
      if (end == xml.npos) return fail(xml);
      std::string_view tag = xml.substr(1, end - 1);
      xml.remove_prefix(end + 1);
      const bool closes = tag[0] == '/', empty = tag.back() == '/';
      if (closes) tag.remove_prefix(1);
      if (empty) tag.remove_suffix(1);
      const std::string_view name = tag.substr(0, tag.find(' '));
      if (std::count(tag.begin(), tag.end(), '\'') % 2 || tag.find('<') != tag.npos)
        return fail(tag);
      if (closes && (open.empty() || open.back() != name)) return fail(tag);
      if (closes)
        open.pop_back();
      else if (!empty)
        open.push_back(name);
      continue;
    } else if (xml[0] == '>' || (static_cast<unsigned char>(xml[0]) < 32 && xml[0] != '\n')) {
      return fail(xml);
    }
    xml.remove_prefix(1);
  }
  return open.empty() ? ::testing::AssertionSuccess() : fail(open.back());
}

// The values of one attribute of all elements whose other text contains `with`.
std::vector<std::string> attributes(const std::string& svg, const std::string& name,
                                    const std::string& with = "") {
  std::vector<std::string> values;
  for (std::size_t at = 0; (at = svg.find('<', at)) != svg.npos; ++at) {
    const std::string element = svg.substr(at, svg.find('>', at) - at);
    const std::size_t value = element.find(" " + name + "='");
    if (value == element.npos || element.find(with) == element.npos) continue;
    const std::size_t from = value + name.size() + 3;
    values.push_back(element.substr(from, element.find('\'', from) - from));
  }
  return values;
}

// The points of a path's absolute M and L commands.
std::vector<std::pair<double, double>> points(const std::string& d) {
  std::vector<std::pair<double, double>> found;
  for (std::size_t at = 0; (at = d.find_first_of("ML", at)) != d.npos;) {
    std::size_t used = 0;
    const double x = std::stod(d.substr(at + 1, 40), &used);
    at += 1 + used;
    found.emplace_back(x, std::stod(d.substr(at, 40)));
  }
  return found;
}

// Every absolute coordinate of every path lies in the picture.
::testing::AssertionResult inside(const std::string& svg, int width, int height) {
  bool any = false;
  for (const std::string& d : attributes(svg, "d"))
    for (const auto& [x, y] : points(d)) {
      any = true;
      if (!(x >= 0 && x <= width && y >= 0 && y <= height))
        return ::testing::AssertionFailure() << x << ' ' << y << " in " << d;
    }
  return any ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << "no paths";
}

const char* const kFirstLine = "fill='none' stroke='#0072B2'";

std::string checked(const std::vector<PlotSeries>& series, const LinePlotOptions& options) {
  const std::string svg = line_plot_svg(series, options);
  EXPECT_TRUE(well_formed(svg)) << svg.substr(0, 2000);
  EXPECT_TRUE(inside(svg, options.width, options.height));
  return svg;
}

TEST(LinePlot, HoldsTitleLabelsLegendAndBothAxes) {
  const std::string svg =
      checked({{"train", {0, 100, 200}, {2, 1, 0.5}}, {"test", {100, 200}, {1.5, 1}}},
              {.title = "Loss", .x_label = "step", .y_label = "nats"});
  for (const char* text : {">Loss<", ">step<", ">nats<", ">train<", ">test<", ">0<", ">200<",
                           ">2.0<", ">0.5<", "fill='#ffffff'"})
    EXPECT_NE(svg.find(text), svg.npos) << text;
}

TEST(LinePlot, OddDataIsDrawn) {
  constexpr double kMax = std::numeric_limits<double>::max();
  const std::vector<std::vector<double>> data = {{},
                                                 {1},
                                                 {0, 0, 0},
                                                 {-5, -5},
                                                 {kNan},
                                                 {kNan, kInf},
                                                 {1, kNan, 2, kInf},
                                                 {-kMax, kMax, 0},
                                                 {5e-324, 1e-323},
                                                 {1e9, 1e9 + 1},
                                                 {1e16, 1e16 + 2},
                                                 {1e-300, 1e300},
                                                 {-1, 0, 1},
                                                 {3, 3 + 1e-15}};
  for (const bool log_y : {false, true})
    for (const double smoothing : {0.0, 0.9})
      for (const auto& y : data)
        checked({{"y", {}, y}, {"again", {}, y, true}}, {.log_y = log_y, .smoothing = smoothing});
  for (const auto& x : data)
    checked({{"x", x, std::vector<double>(x.size(), 1.0)}}, {.title = "odd x"});
  EXPECT_NE(checked({}, {}).find("no finite values"), std::string::npos);
}

TEST(LinePlot, NonFiniteValuesBreakTheLineAndAreMarked) {
  const std::string svg = checked({{"loss", {}, {3, 2, kNan, kNan, 1, 1}}}, {});
  EXPECT_NE(svg.find("<title>loss: nan at 2</title>"), svg.npos);
  const auto paths = attributes(svg, "d", kFirstLine);
  ASSERT_FALSE(paths.empty());
  const std::string& d = paths[0];
  EXPECT_EQ(std::count(d.begin(), d.end(), 'M'), 2);
}

TEST(LinePlot, NamesAreEscaped) {
  const std::string svg = checked({{"a<b&\"c'\x01\xFF\xEF\xBF\xBF", {}, {1, 2}}},
                                  {.title = "</svg><script>", .x_label = "&amp;"});
  EXPECT_NE(svg.find("a&lt;b&amp;&quot;c&apos;\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD<"), svg.npos);
  EXPECT_EQ(svg.find("<script"), svg.npos);
}

TEST(LinePlot, SizeDoesNotGrowWithTheDataAndExtremesStay) {
  std::vector<double> y(2'000'000);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = std::sin(static_cast<double>(i) * 0.37);
  y[1'234'567] = 10;  // one spike
  const std::string svg = checked({{"long", {}, y}}, {});
  EXPECT_LT(svg.size(), 120'000u);
  // The spike is the plot's highest point: 5 % below the upper edge of the plot area.
  const std::string flat = checked({{"spike", {0, 1234567, 1999999}, {-1, 10, -1}}}, {});
  const auto highest = [](const std::string& s) {
    double top = kInf;
    for (const auto& [x, y] : points(attributes(s, "d", kFirstLine).at(0))) top = std::min(top, y);
    return top;
  };
  EXPECT_NEAR(highest(svg), highest(flat), 0.1);
}

TEST(LinePlot, BadArgumentsAreNamed) {
  EXPECT_TRUE(throws_error(
      [] {
        line_plot_svg({{"loss", {1, 2, 3}, {1, 2}}}, {});
      },
      {"loss", "(2)", "got 3"}));
  EXPECT_TRUE(throws_error([] { line_plot_svg({}, {.smoothing = 1.0}); }, {"smoothing", "got 1"}));
  EXPECT_TRUE(throws_error([] { line_plot_svg({}, {.width = 10}); }, {"got 10 x 480"}));
  EXPECT_TRUE(throws_error([] { write_line_plot("/nonexistent/p.svg", {}, {}); },
                           {"/nonexistent/p.svg", "No such file"}));
}

TEST(LinePlot, WritesTheFile) {
  const TempDir dir;
  write_line_plot(dir / "p.svg", {{"y", {}, {1, 2}}}, {});
  EXPECT_EQ(slurp(dir / "p.svg"), line_plot_svg({{"y", {}, {1, 2}}}, {}));
}

std::string labels(const std::vector<detail::Tick>& ticks) {
  std::string text;
  for (const auto& t : ticks) text += (text.empty() ? "" : " ") + t.label;
  return text;
}

TEST(LinePlot, TicksAreRound) {
  EXPECT_EQ(labels(detail::linear_ticks(0, 1, 6)), "0.0 0.2 0.4 0.6 0.8 1.0");
  EXPECT_EQ(labels(detail::linear_ticks(-1.1, 1.1, 5)), "-1.0 -0.5 0.0 0.5 1.0");
  EXPECT_EQ(labels(detail::linear_ticks(0, 60000, 7)), "0 10k 20k 30k 40k 50k 60k");
  EXPECT_EQ(labels(detail::linear_ticks(0, 2.5e6, 6)), "0 0.5M 1.0M 1.5M 2.0M 2.5M");
  EXPECT_EQ(labels(detail::linear_ticks(0, 3e-5, 4)), "0 1e-5 2e-5 3e-5");
  EXPECT_EQ(labels(detail::linear_ticks(0.0, 0.05, 6)), "0.00 0.01 0.02 0.03 0.04 0.05");
  EXPECT_EQ(labels(detail::log_ticks(-3, 1, 9)), "0.001 0.01 0.1 1 10");
  EXPECT_EQ(labels(detail::log_ticks(-1, 0.5, 9)), "0.1 0.2 0.5 1 2");
  EXPECT_EQ(labels(detail::log_ticks(-12, 6, 4)), "1e-10 1e-5 1 100k");
  EXPECT_EQ(labels(detail::log_ticks(std::log10(2.1), std::log10(2.9), 5)), "2.2 2.4 2.6 2.8");
}

TEST(LinePlot, TicksStayInRangeAndUnderTheirLimit) {
  for (double low : {-1e300, -7.3, 0.0, 1e-8, 123456.0})
    for (double span : {1e-3, 0.77, 1.0, 9.99, 1e5, 1e300})
      for (int most = 2; most <= 10; ++most) {
        const double high = low + span;
        if (!(high - low > std::abs(low) * 1e-12)) continue;
        const auto ticks = detail::linear_ticks(low, high, most);
        ASSERT_LE(ticks.size(), static_cast<std::size_t>(most)) << low << ' ' << high;
        const double slack = (high - low) * 1e-6;
        for (const auto& t : ticks) ASSERT_TRUE(t.value >= low - slack && t.value <= high + slack);
        ASSERT_GE(ticks.size(), most >= 5 ? 2u : 0u) << low << ' ' << high << ' ' << most;
      }
}

}  // namespace
}  // namespace mixtape::io
