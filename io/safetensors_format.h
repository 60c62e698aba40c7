// What reading and writing safetensors files share. Internal to io/safetensors*.cpp.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/check.h"
#include "engine/dtype.h"

namespace mixtape::io {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

inline constexpr const char* kMetadata = "__metadata__";
inline constexpr const char* kTied = "mixtape.tied";
inline constexpr const char* kChecksum = "mixtape.crc32";
inline constexpr std::string_view kNoChecksum = "00000000";  // in its place while it is computed
inline constexpr std::uint64_t kMaxHeader = 100'000'000;     // as the reference implementation
inline constexpr std::array<const char*, kDtypeCount> kDtypeNames = {"F32", "F16", "BF16", "F64",
                                                                     "I64", "I32", "U8",   "BOOL"};

inline const char* format_name(Dtype t) { return kDtypeNames[static_cast<std::size_t>(t)]; }

/// Where the checksum's digits stand in the bytes of a header that has one. Quotes within names and
/// values are escaped, so nothing else reads like this.
inline std::size_t checksum_position(std::string_view header, std::string_view digits) {
  const std::string entry = detail::concat('"', kChecksum, "\":\"", digits, '"');
  const std::size_t at = header.find(entry);
  MT_CHECK(at != header.npos, "expected ", entry, " in the header, got none");
  return at + entry.size() - 1 - digits.size();
}

}  // namespace mixtape::io
