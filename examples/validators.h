// What the examples' numeric options accept, with messages that say what was expected.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <exception>
#include <string>

namespace examples {

/// A whole number of at least `least`.
inline CLI::Validator whole_number(std::int64_t least) {
  const std::string expected = "a whole number of at least " + std::to_string(least);
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        std::size_t used = 0;
        try {
          if (std::stoll(text, &used) >= least && used == text.size()) return {};
        } catch (const std::exception&) {  // not a number, or none that fits
        }
        return "expected " + expected + ", got " + text;
      },
      "");
}

/// A finite number above 0.
inline CLI::Validator above_zero() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        std::size_t used = 0;
        try {
          const double value = std::stod(text, &used);
          if (value > 0 && std::isfinite(value) && used == text.size()) return {};
        } catch (const std::exception&) {
        }
        return "expected a number above 0, got " + text;
      },
      "");
}

}  // namespace examples
