#include "io/text.h"

#include <system_error>

namespace mixtape::io {

int utf8_sequence(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t k) {
    return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u;
  };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const int length = lead >= 0xC2 && lead <= 0xDF   ? 2
                     : lead >= 0xE0 && lead <= 0xEF ? 3
                     : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                    : 0;
  if (length == 0) return -1;
  // The second byte's range excludes overlong forms, surrogates and code points past U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int k = 1; k < length; ++k) {
    const unsigned b = byte(static_cast<std::size_t>(k));
    if (b < (k == 1 ? low : 0x80u) || b > (k == 1 ? high : 0xBFu)) return -k;
  }
  return length;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const int n = utf8_sequence(text, i);
    if (n > 0) {
      out.append(text, i, static_cast<std::size_t>(n));
      i += static_cast<std::size_t>(n);
    } else {
      out += "\xEF\xBF\xBD";
      i += static_cast<std::size_t>(-n);
    }
  }
  return out;
}

std::string join(std::initializer_list<std::string_view> parts) {
  std::size_t length = 0;
  for (const std::string_view part : parts) length += part.size();
  std::string out;
  out.reserve(length);
  for (const std::string_view part : parts) out.append(part);
  return out;
}

}  // namespace mixtape::io
