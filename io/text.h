// Text for other programs: the system's error text, UTF-8 repair, and joining without locale.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace mixtape::io {

/// The system's text for an errno value, "No such file or directory"; safe in threads.
std::string errno_text(int error);

/// Length of the well-formed UTF-8 sequence that starts at text[i], or minus the length of the
/// maximal ill-formed part.
int utf8_sequence(std::string_view text, std::size_t i);

/// `text` with every invalid UTF-8 sequence (overlong forms and surrogates included) replaced by
/// U+FFFD, one for each maximal ill-formed part as Unicode 15 section 3.9 recommends.
std::string valid_utf8(std::string_view text);

/// The parts one after the other.
std::string join(std::initializer_list<std::string_view> parts);

}  // namespace mixtape::io
