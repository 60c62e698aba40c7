// CRC-32 (zlib's, ISO 3309) of bytes that come in parts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace mixtape::io {

class Crc32 {
 public:
  void add(std::string_view bytes);
  /// Eight lower-case hexadecimal digits.
  std::string hex() const;

 private:
  std::uint32_t value_ = 0;
};

}  // namespace mixtape::io
