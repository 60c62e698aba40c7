// Builds IDX files, plain and gzipped, for tests.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mixtape::testing {

inline std::string be32(std::uint32_t v) {
  return {static_cast<char>(v >> 24), static_cast<char>(v >> 16), static_cast<char>(v >> 8),
          static_cast<char>(v)};
}

inline std::string idx_header(std::uint8_t type, const std::vector<std::uint32_t>& sizes) {
  std::string bytes = be32(std::uint32_t{type} << 8 | static_cast<std::uint32_t>(sizes.size()));
  for (const std::uint32_t s : sizes) bytes += be32(s);
  return bytes;
}

/// uint8 values 0, 1, 2, ... modulo `modulo`.
inline std::string idx_u8(const std::vector<std::uint32_t>& sizes, unsigned modulo = 251) {
  std::string bytes = idx_header(0x08, sizes);
  std::uint64_t n = 1;
  for (const std::uint32_t s : sizes) n *= s;
  for (std::uint64_t i = 0; i < n; ++i) bytes += static_cast<char>(i % modulo);
  return bytes;
}

/// gzip with a file name in its header, as the command line tool writes it.
inline std::string gzip(std::string_view bytes) {
  z_stream s{};
  if (deflateInit2(&s, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    throw std::runtime_error("deflateInit2");
  gz_header header{};
  std::string name = "data-idx3-ubyte";
  header.name = reinterpret_cast<Bytef*>(name.data());
  header.os = 3;
  deflateSetHeader(&s, &header);
  std::string out(deflateBound(&s, bytes.size()) + 64, '\0');
  s.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  s.avail_in = static_cast<uInt>(bytes.size());
  s.next_out = reinterpret_cast<Bytef*>(out.data());
  s.avail_out = static_cast<uInt>(out.size());
  const int rc = deflate(&s, Z_FINISH);
  out.resize(s.total_out);
  deflateEnd(&s);
  if (rc != Z_STREAM_END) throw std::runtime_error("deflate");
  return out;
}

}  // namespace mixtape::testing
