// Cuts text into the pieces within which byte pairs are merged, by a regular expression.
//
// PCRE2 with Unicode properties and its compiler to machine code does the matching: std::regex
// knows no \p{L} and recurses for every character.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace mixtape::io {

class PreTokenizer {
 public:
  /// GPT-2's pattern (openai/gpt-2, src/encoder.py): English contractions, then words, numbers and
  /// signs, each with the space before it, then runs of white space, which leave their last
  /// character to what follows. White space is spelt out because PCRE2's \s has one character more
  /// than Unicode's property.
  static const char* const kGpt2;

  /// `pattern` in PCRE2's syntax. Throws with the place of a fault in it.
  explicit PreTokenizer(const std::string& pattern);
  ~PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;

  /// Appends the pieces of `text`; together they are the text. What no match covers, and each
  /// sequence that is not UTF-8, is a piece of its own. Safe from several threads at once.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  void split_valid(std::string_view text, std::vector<std::string_view>& pieces) const;
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace mixtape::io
