#include "io/checksum.h"

#include <zlib.h>

#include <cstdio>

namespace mixtape::io {

void Crc32::add(std::string_view bytes) {
  value_ = static_cast<std::uint32_t>(
      ::crc32_z(value_, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

std::string Crc32::hex() const {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", value_);
  return text;
}

}  // namespace mixtape::io
