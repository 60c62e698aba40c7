#include "io/tokenizer.h"

#include <algorithm>

#include "engine/check.h"

namespace mixtape::io {
namespace {

constexpr std::int32_t kMaxId = 1 << 24;  // a bound on what a damaged file makes us allocate

/// Where the special tokens of a text are, in order; each search goes through the text once.
class SpecialFinder {
 public:
  SpecialFinder(std::string_view text, const std::map<std::string, std::int32_t, std::less<>>& all)
      : text_(text) {
    for (const auto& [name, id] : all) tokens_.push_back({name, id, text.find(name)});
  }
  struct Found {
    std::string_view name;
    std::int32_t id = 0;
    std::size_t at = std::string_view::npos;
  };
  /// The first at or after `from`; at is npos after the last.
  Found next(std::size_t from) {
    Found first;
    for (Found& t : tokens_) {
      if (t.at != text_.npos && t.at < from) t.at = text_.find(t.name, from);
      const bool longer = t.at == first.at && t.name.size() > first.name.size();
      if (t.at != text_.npos && (t.at < first.at || longer)) first = t;
    }
    return first;
  }

 private:
  std::string_view text_;
  std::vector<Found> tokens_;
};

}  // namespace

std::vector<std::int32_t> Tokenizer::encode_with_special(std::string_view text) const {
  std::vector<std::int32_t> ids;
  SpecialFinder finder(text, special_);
  for (std::size_t at = 0; at < text.size();) {
    const SpecialFinder::Found found = finder.next(at);
    const std::vector<std::int32_t> before =
        encode(text.substr(at, std::min(found.at, text.size()) - at));
    ids.insert(ids.end(), before.begin(), before.end());
    if (found.at == text.npos) break;
    ids.push_back(found.id);
    at = found.at + found.name.size();
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int32_t id = ids[i];
    const bool known =
        id >= 0 && id < vocab_size() && !bytes_[static_cast<std::size_t>(id)].empty();
    MT_CHECK(known, "decode: expected ids of tokens below ", vocab_size(), ", got ", id, " at ", i);
    text += bytes_[static_cast<std::size_t>(id)];
  }
  return text;
}

std::int32_t Tokenizer::special(std::string_view text) const {
  const auto found = special_.find(text);
  MT_CHECK(found != special_.end(), "Tokenizer: expected a special token, got '", text, "'");
  return found->second;
}

void Tokenizer::add_token(const char* op, std::int32_t id, std::string bytes) {
  MT_CHECK(id >= 0 && id < kMaxId, op, ": expected ids in [0, ", kMaxId, "), got ", id);
  MT_CHECK(!bytes.empty(), op, ": expected tokens that are not empty, got one with id ", id);
  if (id >= vocab_size()) bytes_.resize(static_cast<std::size_t>(id) + 1);
  std::string& slot = bytes_[static_cast<std::size_t>(id)];
  MT_CHECK(slot.empty(), op, ": expected one token with id ", id, ", got '", slot, "' and '", bytes,
           "'");
  slot = std::move(bytes);
}

void Tokenizer::add_special(const char* op, std::int32_t id, const std::string& text) {
  add_token(op, id, text);
  MT_CHECK(special_.emplace(text, id).second, op, ": expected special tokens once, got '", text,
           "' twice");
}

ByteTokenizer::ByteTokenizer(const std::vector<std::string>& special) {
  for (std::int32_t b = 0; b < 256; ++b)
    add_token("ByteTokenizer", b, std::string(1, static_cast<char>(b)));
  std::int32_t id = 256;
  for (const std::string& text : special) add_special("ByteTokenizer", id++, text);
}

std::vector<std::int32_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids(text.size());
  std::transform(text.begin(), text.end(), ids.begin(),
                 [](char c) { return static_cast<std::int32_t>(static_cast<unsigned char>(c)); });
  return ids;
}

}  // namespace mixtape::io
