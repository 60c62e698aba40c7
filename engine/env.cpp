#include "engine/env.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "engine/check.h"

namespace mixtape::detail {
namespace {
std::string_view env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view(value);
}
}  // namespace

bool env_flag(const char* name) {
  const std::string_view text = env(name);
  MT_CHECK(text.empty() || text == "0" || text == "1", name, ": expected 0 or 1, got \"", text,
           '"');
  return text == "1";
}

int env_positive(const char* name, int fallback) {
  const std::string_view text = env(name);
  if (text.empty()) return fallback;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  MT_CHECK(error == std::errc{} && end == text.data() + text.size() && value > 0, name,
           ": expected a positive integer, got \"", text, '"');
  return value;
}

}  // namespace mixtape::detail
