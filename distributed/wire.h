// Messages between processes: a 4-byte length, then fields. Little-endian on every machine that
// Mixtape runs on. A reader never trusts a length: it throws on fields that do not fit. Internal.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "engine/check.h"

namespace mixtape::distributed {

inline constexpr std::uint32_t kMaxMessageBytes = 16u << 20;

class MessageWriter {
 public:
  MessageWriter& u8(std::uint8_t value) {
    bytes_ += static_cast<char>(value);
    return *this;
  }
  MessageWriter& i64(std::int64_t value) {
    char raw[sizeof value];
    std::memcpy(raw, &value, sizeof value);
    bytes_.append(raw, sizeof value);
    return *this;
  }
  MessageWriter& text(std::string_view value) {
    i64(static_cast<std::int64_t>(value.size()));
    bytes_ += value;
    return *this;
  }
  const std::string& body() const { return bytes_; }
  /// The length and the fields.
  std::string framed() const {
    MT_CHECK(bytes_.size() <= kMaxMessageBytes, "store: expected a message of at most ",
             kMaxMessageBytes, " bytes, got ", bytes_.size());
    const auto size = static_cast<std::uint32_t>(bytes_.size());
    char raw[sizeof size];
    std::memcpy(raw, &size, sizeof size);
    return std::string(raw, sizeof size) + bytes_;
  }

 private:
  std::string bytes_;
};

class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : rest_(bytes) {}
  std::uint8_t u8() { return static_cast<std::uint8_t>(take(1)[0]); }
  std::int64_t i64() {
    std::int64_t value = 0;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() {
    const std::int64_t size = i64();
    MT_CHECK(size >= 0 && static_cast<std::uint64_t>(size) <= rest_.size(),
             "store: malformed message: a text of ", size, " bytes in ", rest_.size());
    return std::string(take(static_cast<std::size_t>(size)));
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view take(std::size_t n) {
    MT_CHECK(n <= rest_.size(), "store: malformed message: it ends early");
    const std::string_view taken = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return taken;
  }
  std::string_view rest_;
};

}  // namespace mixtape::distributed
