// Draws line plots, loss curves above all, as one self-contained SVG: no plotting library is needed
// at run time and any browser shows it. The background is painted white, so that the plot reads the
// same in light and dark viewers; colours are told apart by colour-blind readers (Okabe and Ito).
//
//   write_line_plot("loss.svg", {{"train", steps, loss}, {"test", epochs, test_loss}},
//                   {.title = "Fashion-MNIST", .x_label = "step", .y_label = "loss"});
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace mixtape::io {

struct PlotSeries {
  std::string name = {};       // legend text; empty: not in the legend
  std::vector<double> x = {};  // empty: 0, 1, 2, ...; else as many as y
  std::vector<double> y = {};  // NaN and infinities break the line and are marked at its upper edge
  bool markers = false;        // a dot at each point, for series of few points
};

struct LinePlotOptions {
  std::string title = {}, x_label = {}, y_label = {};
  bool log_y = false;      // values <= 0 break the line, as NaN does
  double smoothing = 0.0;  // in [0, 1): weight of the past in a running average, drawn over the raw
                           // line, which then turns faint
  int width = 860, height = 480;  // pixels, at least 240 x 160
};

/// The plot as SVG text. Series of any length: where several points share a pixel column only the
/// column's first, lowest, highest and last are drawn. Empty plots, constant series and values near
/// the limits of double are legal. Throws if a series' x and y differ in length or an option is out
/// of range. The text depends on the arguments alone (no locale, no time).
std::string line_plot_svg(const std::vector<PlotSeries>& series, const LinePlotOptions& options);

/// Writes it as a whole file; throws with the path and the system's text.
void write_line_plot(const std::filesystem::path& path, const std::vector<PlotSeries>& series,
                     const LinePlotOptions& options);

namespace detail {
/// Positions and labels of axis ticks in [low, high].
struct Tick {
  double value;
  std::string label;
};
/// Multiples of 1, 2 or 5 times a power of ten, at most `most` of them; low < high, both finite.
/// None when the range itself is subnormal or infinite.
std::vector<Tick> linear_ticks(double low, double high, int most);
/// Ticks of a log axis: low and high are powers of ten as exponents (log10 of the value), and so is
/// Tick::value. 1, 2 and 5 times each decade where those are `most` or fewer, else
/// whole decades, thinned; for ranges less than about a factor of 5, linear_ticks of the value.
std::vector<Tick> log_ticks(double low, double high, int most);
}  // namespace detail

}  // namespace mixtape::io
