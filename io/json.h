// JSON for the .cpp files of this folder: one strict parser. The library's own takes the last of
// two equal keys; here they are an error, since two readers could disagree about such a file.
// Compiling this costs seconds, so no public header includes it.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/check.h"

namespace mixtape::io {

/// Throws "op: where: ..." on invalid JSON or UTF-8 and on repeated keys.
inline nlohmann::json parse_json(const char* op, const std::string& where, std::string_view text) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key)
      MT_CHECK(keys.back().insert(value.get<std::string>()).second, op, ": ", where,
               ": expected each key once, got '", value.get<std::string>(), "' twice");
    return true;
  };
  try {
    return nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& e) {
    MT_THROW(op, ": ", where, ": expected valid JSON: ", e.what());
  }
}

}  // namespace mixtape::io
