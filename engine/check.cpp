#include "engine/check.h"

#include <sstream>

#include "engine/op_scope.h"

namespace mixtape {
namespace {

// Where this repository was compiled: this file's own path without "engine/check.cpp".
std::string_view source_root() {
  constexpr std::string_view kSelf = "engine/check.cpp";
  std::string_view path = std::source_location::current().file_name();
  return path.ends_with(kSelf) ? path.substr(0, path.size() - kSelf.size()) : std::string_view{};
}

// Relative to the repository; for files outside of it the last two components. A build may have
// made all paths relative to the root already.
std::string_view short_path(std::string_view path) {
  const std::string_view root = source_root();
  if (!root.empty() && path.starts_with(root)) return path.substr(root.size());
  if (!path.starts_with('/') && !path.starts_with("../")) return path;
  std::size_t cut = path.rfind('/');
  if (cut != std::string_view::npos && cut > 0) cut = path.rfind('/', cut - 1);
  return cut == std::string_view::npos ? path : path.substr(cut + 1);
}

std::string full_message(const std::string& message, std::source_location where) {
  constexpr std::string_view kModule = " (in module ";
  std::string text = message;
  if (where.line() != 0) {
    text += " [";
    text += short_path(where.file_name());
    text += ':' + std::to_string(where.line()) + ']';
  }
  const std::string& module = ModuleScope::path();
  if (!module.empty() && message.find(kModule) == std::string::npos) {
    text += kModule;
    text += module + ')';
  }
  return text;
}

}  // namespace

Error::Error(const std::string& what, std::source_location where)
    : std::runtime_error(full_message(what, where)), where_(where) {}

detail::Message::Message() : out_(new std::ostringstream) {}
detail::Message::~Message() { delete out_; }
std::ostream& detail::Message::stream() { return *out_; }
std::string detail::Message::text() const { return out_->str(); }
void detail::Message::add_text(std::string_view part) { *out_ << part; }
void detail::Message::add_value(bool part) { *out_ << part; }
void detail::Message::add_value(char part) { *out_ << part; }
void detail::Message::add_value(long long part) { *out_ << part; }
void detail::Message::add_value(unsigned long long part) { *out_ << part; }
void detail::Message::add_value(double part) { *out_ << part; }

void detail::throw_error(const std::string& message, std::source_location where) {
  throw Error(message, where);
}

}  // namespace mixtape
