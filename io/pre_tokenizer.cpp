#include "io/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::io {
namespace {

// Unicode's White_Space property, for use inside of a class.
#define MT_SPACE \
  R"(\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})"

std::string error_text(int code) {
  PCRE2_UCHAR text[256];
  return pcre2_get_error_message(code, text, sizeof text) < 0
             ? detail::concat("PCRE2 error ", code)
             : std::string(reinterpret_cast<const char*>(text));
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

struct FreeMatchData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

}  // namespace

const char* const PreTokenizer::kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^)" MT_SPACE R"(\p{L}\p{N}]+|[)" MT_SPACE
    R"(]+(?![^)" MT_SPACE R"(])|[)" MT_SPACE R"(]+)";

struct PreTokenizer::Code {
  pcre2_code* code;
  explicit Code(pcre2_code* c) : code(c) {}
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
};

PreTokenizer::PreTokenizer(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* code =
      pcre2_compile(units(pattern), pattern.size(), PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr);
  MT_CHECK(code, "PreTokenizer: expected a valid pattern, got a fault at ", at, " of '", pattern,
           "': ", error_text(error));
  code_ = std::make_unique<Code>(code);
  // Where machine code cannot be made, matching interprets: slower, with the same result.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
}
PreTokenizer::~PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;

void PreTokenizer::split(std::string_view text, std::vector<std::string_view>& pieces) const {
  std::size_t begin = 0, at = 0;  // text[begin, at) is valid and not yet split
  while (at < text.size()) {
    const int n = utf8_sequence(text, at);
    if (n > 0) {
      at += static_cast<std::size_t>(n);
      continue;
    }
    split_valid(text.substr(begin, at - begin), pieces);
    pieces.push_back(text.substr(at, static_cast<std::size_t>(-n)));
    begin = at += static_cast<std::size_t>(-n);
  }
  split_valid(text.substr(begin), pieces);
}

void PreTokenizer::split_valid(std::string_view text, std::vector<std::string_view>& pieces) const {
  const std::unique_ptr<pcre2_match_data, FreeMatchData> match(pcre2_match_data_create(1, nullptr));
  MT_CHECK(match, "PreTokenizer: PCRE2 could not allocate its match data");
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(match.get());
  std::size_t at = 0;
  while (at < text.size()) {
    const int rc = pcre2_match(code_->code, units(text), text.size(), at,
                               PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match.get(), nullptr);
    MT_CHECK(rc >= 0 || rc == PCRE2_ERROR_NOMATCH, "PreTokenizer: PCRE2 failed at byte ", at,
             " of ", text.size(), ": ", error_text(rc));
    const std::size_t begin = rc < 0 ? text.size() : bounds[0];
    if (begin > at) pieces.push_back(text.substr(at, begin - at));
    if (rc < 0) return;
    pieces.push_back(text.substr(begin, bounds[1] - begin));
    at = bounds[1];
  }
}

}  // namespace mixtape::io
