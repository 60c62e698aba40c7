// Tokenizers: text to token ids and back. Any bytes survive the round trip, valid UTF-8 or not.
//
//   const auto bpe = io::BpeTokenizer::gpt2("vocab.json", "merges.txt");
//   std::vector<std::int32_t> ids = bpe.encode("Hello world");      // {15496, 995}
//   ids.push_back(bpe.special("<|endoftext|>"));
//   bpe.decode(ids);                                                // "Hello world<|endoftext|>"
//
// Text of a special token inside of encode()'s input is ordinary text, so that a document cannot
// end itself; encode_with_special() is for prompts that the program wrote.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/pre_tokenizer.h"

namespace mixtape::io {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Safe from several threads at once.
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  /// As encode(), but special tokens' texts become those tokens (of two at one place, the longer).
  std::vector<std::int32_t> encode_with_special(std::string_view text) const;
  /// Throws on an id that is no token. A part of a text need not be valid UTF-8.
  std::string decode(std::span<const std::int32_t> ids) const;
  /// One more than the largest id.
  std::int64_t vocab_size() const { return static_cast<std::int64_t>(bytes_.size()); }
  /// The id of a special token; throws if there is none of that text.
  std::int32_t special(std::string_view text) const;

 protected:
  Tokenizer() = default;
  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;
  /// Throws if the text is empty, or the id or the text is taken.
  void add_token(const char* op, std::int32_t id, std::string bytes);
  void add_special(const char* op, std::int32_t id, const std::string& text);
  const std::vector<std::string>& token_bytes() const { return bytes_; }

 private:
  std::vector<std::string> bytes_;  // by id; empty where an id is not used
  std::map<std::string, std::int32_t, std::less<>> special_;
};

/// Ids 0 to 255 are bytes; special tokens follow.
class ByteTokenizer : public Tokenizer {
 public:
  explicit ByteTokenizer(const std::vector<std::string>& special = {});
  std::vector<std::int32_t> encode(std::string_view text) const override;
};

/// Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019): text is cut by a
/// pattern, and within a piece the pair of lowest rank, of several the leftmost, is merged until
/// none is left.
class BpeTokenizer : public Tokenizer {
 public:
  /// GPT-2's two files: vocab.json, from token (bytes written as printable characters) to id, and
  /// merges.txt, one pair a line in the order of rank. `special` are tokens of vocab.json that no
  /// text becomes. Throws with file, line and token on anything inconsistent.
  static BpeTokenizer gpt2(const std::filesystem::path& vocab_json,
                           const std::filesystem::path& merges_txt,
                           const std::vector<std::string>& special = {"<|endoftext|>"},
                           const std::string& pattern = PreTokenizer::kGpt2);
  /// tiktoken's file: base64 of a token's bytes and its id, which is its rank, a line. As there, a
  /// piece that is a token is never cut.
  static BpeTokenizer tiktoken(const std::filesystem::path& ranks,
                               const std::map<std::string, std::int32_t>& special,
                               const std::string& pattern = PreTokenizer::kGpt2);
  std::vector<std::int32_t> encode(std::string_view text) const override;

 private:
  struct Merge {
    std::int32_t rank, id;
  };
  struct Symbol;
  struct Candidate;
  struct Scratch;
  struct HashText {
    using is_transparent = void;
    std::size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };
  using IdOf = std::unordered_map<std::string, std::int32_t, HashText, std::equal_to<>>;

  explicit BpeTokenizer(const std::string& pattern) : pieces_(pattern) {}
  void add_bytes(const char* op, const std::string& path, const IdOf& ids);
  bool add_merge(std::int32_t left, std::int32_t right, Merge merge);
  void read_merges(const std::filesystem::path& path, const IdOf& ids);
  void merge_piece(std::string_view piece, Scratch& scratch, std::vector<std::int32_t>& ids) const;

  PreTokenizer pieces_;
  std::int32_t id_of_byte_[256] = {};
  std::unordered_map<std::uint64_t, Merge> merges_;  // by left id << 32 | right id
  IdOf whole_;                                       // pieces known to become one token
};

}  // namespace mixtape::io
