#include <algorithm>
#include <array>
#include <charconv>

#include "engine/check.h"
#include "io/json.h"
#include "io/mapped_file.h"
#include "io/text.h"
#include "io/tokenizer.h"

namespace mixtape::io {
namespace {

constexpr const char* kGpt2Op = "BpeTokenizer::gpt2";
constexpr const char* kTiktokenOp = "BpeTokenizer::tiktoken";

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

/// Calls f(line, number from 1) for each line, without its end.
template <class F>
void for_each_line(std::string_view text, F&& f) {
  for (std::int64_t number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    f(line, number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// ---- GPT-2's alphabet --------------------------------------------------------------------------

// vocab.json holds text, so each byte is written as a printable character: the printable ones of
// Latin-1 as themselves, the others, in order, as the characters from U+0100 on.
constexpr int kAlphabet = 256 + 68;

std::array<int, kAlphabet> byte_of_character() {
  std::array<int, kAlphabet> bytes;
  bytes.fill(-1);
  std::size_t next = 256;
  for (std::size_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
    bytes[printable ? b : next++] = static_cast<int>(b);
  }
  return bytes;
}

/// The bytes that a token of vocab.json or merges.txt stands for; `where` starts the message.
std::string bytes_of_text(const std::string& where, std::string_view text) {
  static const std::array<int, kAlphabet> bytes = byte_of_character();
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const int n = utf8_sequence(text, i);
    const auto at = [&](std::size_t k) { return static_cast<unsigned char>(text[i + k]); };
    const unsigned c = n == 1 ? at(0) : n == 2 ? (at(0) & 0x1Fu) << 6 | (at(1) & 0x3Fu) : kAlphabet;
    MT_CHECK(c < kAlphabet && bytes[c] >= 0, where,
             ": expected characters that stand for bytes (U+0021 to U+0143 without the unprintable "
             "ones), got '",
             valid_utf8(text), "'");
    out += static_cast<char>(bytes[c]);
    i += static_cast<std::size_t>(n);
  }
  return out;
}

// ---- base64 (RFC 4648) -------------------------------------------------------------------------

std::string base64_bytes(const std::string& where, std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string_view digits = text;
  for (int k = 0; k < 2 && digits.ends_with('='); ++k) digits.remove_suffix(1);
  std::string out;
  unsigned bits = 0;
  int held = 0;
  bool valid = text.size() % 4 == 0;
  for (const char c : digits) {
    const std::size_t value = kDigits.find(c);
    valid = valid && value != kDigits.npos;
    bits = bits << 6 | static_cast<unsigned>(value & 63);
    held += 6;
    if (held < 8) continue;
    held -= 8;
    out += static_cast<char>(bits >> held & 0xFF);
  }
  MT_CHECK(valid, where, ": expected base64, got '", valid_utf8(text), "'");
  return out;
}

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

// ---- merging -----------------------------------------------------------------------------------

struct BpeTokenizer::Symbol {
  std::int32_t id;  // -1 once it is part of another
  std::size_t previous, next;
};

struct BpeTokenizer::Candidate {
  std::int32_t rank, id;
  std::size_t left;
  std::uint64_t pair;  // tells whether the symbols are still those
  bool operator<(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : left > other.left;
  }
};

/// Memory that the pieces of one text share.
struct BpeTokenizer::Scratch {
  static constexpr auto kNone = static_cast<std::size_t>(-1);
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

std::vector<std::int32_t> BpeTokenizer::encode(std::string_view text) const {
  std::vector<std::string_view> pieces;
  pieces_.split(text, pieces);
  std::vector<std::int32_t> ids;
  Scratch scratch;
  for (const std::string_view piece : pieces) {
    if (const auto whole = whole_.find(piece); whole != whole_.end())
      ids.push_back(whole->second);
    else
      merge_piece(piece, scratch, ids);
  }
  return ids;
}

// A list of symbols and a heap of the merges possible in it, so that a long piece costs n log n.
void BpeTokenizer::merge_piece(std::string_view piece, Scratch& scratch,
                               std::vector<std::int32_t>& ids) const {
  constexpr std::size_t kNone = Scratch::kNone;
  std::vector<Symbol>& symbols = scratch.symbols;
  std::vector<Candidate>& heap = scratch.heap;
  const auto propose = [&](std::size_t left) {
    if (left == kNone || symbols[left].next == kNone) return;
    const std::uint64_t pair = pair_key(symbols[left].id, symbols[symbols[left].next].id);
    const auto merge = merges_.find(pair);
    if (merge == merges_.end()) return;
    heap.push_back({merge->second.rank, merge->second.id, left, pair});
    std::push_heap(heap.begin(), heap.end());
  };
  symbols.clear();
  for (std::size_t i = 0; i < piece.size(); ++i)
    symbols.push_back({id_of_byte_[static_cast<unsigned char>(piece[i])], i - 1,
                       i + 1 < piece.size() ? i + 1 : kNone});
  for (std::size_t i = 0; i < piece.size(); ++i) propose(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Candidate c = heap.back();
    heap.pop_back();
    Symbol& left = symbols[c.left];
    if (left.id < 0 || left.next == kNone || pair_key(left.id, symbols[left.next].id) != c.pair)
      continue;  // one of the two has been merged with another since
    Symbol& right = symbols[left.next];
    left.id = c.id;
    right.id = -1;
    left.next = right.next;
    if (left.next != kNone) symbols[left.next].previous = c.left;
    propose(left.previous);
    propose(c.left);
  }
  for (std::size_t i = piece.empty() ? kNone : 0; i != kNone; i = symbols[i].next)
    ids.push_back(symbols[i].id);
}

bool BpeTokenizer::add_merge(std::int32_t left, std::int32_t right, Merge merge) {
  return merges_.emplace(pair_key(left, right), merge).second;
}

void BpeTokenizer::add_bytes(const char* op, const std::string& path, const IdOf& ids) {
  for (int b = 0; b < 256; ++b) {
    const auto found = ids.find(std::string(1, static_cast<char>(b)));
    MT_CHECK(found != ids.end(), op, ": ", path, ": expected a token for every byte, got none for ",
             b);
    id_of_byte_[b] = found->second;
  }
}

// ---- GPT-2's files -----------------------------------------------------------------------------

BpeTokenizer BpeTokenizer::gpt2(const std::filesystem::path& vocab_json,
                                const std::filesystem::path& merges_txt,
                                const std::vector<std::string>& special,
                                const std::string& pattern) {
  BpeTokenizer t(pattern);
  const MappedFile file(kGpt2Op, vocab_json);
  const nlohmann::json vocab = parse_json(kGpt2Op, file.path(), text_of(file));
  MT_CHECK(vocab.is_object(), kGpt2Op, ": ", file.path(), ": expected an object of tokens, got ",
           vocab.type_name());
  const std::string where = detail::concat(kGpt2Op, ": ", file.path());
  for (const std::string& text : special)
    MT_CHECK(vocab.contains(text), where, ": expected the special token '", text, "', got none");
  IdOf ids;
  for (const auto& [text, value] : vocab.items()) {
    MT_CHECK(value.is_number_integer(), where, ": expected an integer for '", text, "', got ",
             value.dump());
    const auto id = value.get<std::int64_t>();
    MT_CHECK(id >= 0 && id <= INT32_MAX, where, ": expected an id for '", text, "', got ", id);
    if (std::find(special.begin(), special.end(), text) != special.end()) {
      t.add_special(where.c_str(), static_cast<std::int32_t>(id), text);
      continue;
    }
    const std::string bytes = bytes_of_text(where, text);
    t.add_token(where.c_str(), static_cast<std::int32_t>(id), bytes);
    ids.emplace(bytes, static_cast<std::int32_t>(id));
  }
  t.add_bytes(kGpt2Op, file.path(), ids);
  t.read_merges(merges_txt, ids);
  // Tokens that their own bytes merge to: most words of a text, found without merging.
  Scratch scratch;
  for (const auto& [bytes, id] : ids) {
    std::vector<std::int32_t> merged;
    t.merge_piece(bytes, scratch, merged);
    if (merged.size() == 1 && merged[0] == id) t.whole_.emplace(bytes, id);
  }
  return t;
}

void BpeTokenizer::read_merges(const std::filesystem::path& path, const IdOf& ids) {
  const MappedFile file(kGpt2Op, path);
  std::int32_t rank = 0;
  for_each_line(text_of(file), [&](std::string_view line, std::int64_t number) {
    if (line.empty() || (number == 1 && line.starts_with("#version"))) return;
    const std::string where = detail::concat(kGpt2Op, ": ", file.path(), ":", number);
    const std::size_t space = line.find(' ');
    MT_CHECK(space != line.npos && line.find(' ', space + 1) == line.npos, where,
             ": expected two tokens and a space between them, got '", valid_utf8(line), "'");
    const std::string left = bytes_of_text(where, line.substr(0, space));
    const std::string right = bytes_of_text(where, line.substr(space + 1));
    const auto id = [&](const std::string& bytes) {
      const auto found = ids.find(bytes);
      MT_CHECK(found != ids.end(), where, ": expected '", valid_utf8(bytes),
               "' in the vocabulary, got none");
      return found->second;
    };
    MT_CHECK(add_merge(id(left), id(right), {rank++, id(left + right)}), where,
             ": expected each pair once, got '", line, "' again");
  });
}

// ---- tiktoken's file ---------------------------------------------------------------------------

BpeTokenizer BpeTokenizer::tiktoken(const std::filesystem::path& ranks,
                                    const std::map<std::string, std::int32_t>& special,
                                    const std::string& pattern) {
  BpeTokenizer t(pattern);
  const MappedFile file(kTiktokenOp, ranks);
  for_each_line(text_of(file), [&](std::string_view line, std::int64_t number) {
    if (line.empty()) return;
    const std::string where = detail::concat(kTiktokenOp, ": ", file.path(), ":", number);
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string bytes = base64_bytes(where, line.substr(0, space));
    std::int32_t id = -1;
    const char* end = line.data() + line.size();
    const auto [stop, fault] =
        std::from_chars(line.data() + std::min(space + 1, line.size()), end, id);
    MT_CHECK(fault == std::errc() && stop == end && id >= 0, where,
             ": expected base64, a space and an id, got '", valid_utf8(line), "'");
    t.add_token(where.c_str(), id, bytes);
    MT_CHECK(t.whole_.emplace(bytes, id).second, where, ": expected each token once, got '",
             valid_utf8(bytes), "' again");
  });
  t.add_bytes(kTiktokenOp, file.path(), t.whole_);
  for (const auto& [bytes, id] : t.whole_) {
    for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
      const auto left = t.whole_.find(std::string_view(bytes).substr(0, cut));
      const auto right = t.whole_.find(std::string_view(bytes).substr(cut));
      if (left != t.whole_.end() && right != t.whole_.end())
        t.add_merge(left->second, right->second, {id, id});
    }
  }
  for (const auto& [text, id] : special) t.add_special(kTiktokenOp, id, text);
  return t;
}

}  // namespace mixtape::io
