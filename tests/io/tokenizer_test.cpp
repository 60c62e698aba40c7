// Tokenizers: GPT-2's pieces, merges checked by hand and against the plain algorithm, both file
// formats and their faults, and any bytes there and back.
#include "io/tokenizer.h"

#include <algorithm>
#include <random>

#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;
using Ids = std::vector<std::int32_t>;
using Pieces = std::vector<std::string>;

Pieces split(const std::string& text, const std::string& pattern = PreTokenizer::kGpt2) {
  std::vector<std::string_view> pieces;
  PreTokenizer(pattern).split(text, pieces);
  return {pieces.begin(), pieces.end()};
}

// ---- GPT-2's pieces ----------------------------------------------------------------------------

TEST(PreTokenizer, WordsNumbersSignsAndSpaces) {
  EXPECT_EQ(split(""), Pieces{});
  EXPECT_EQ(
      split("Hello world's  foo\n\n bar 123abc!? x"),
      (Pieces{"Hello", " world", "'s", " ", " foo", "\n\n", " bar", " 123", "abc", "!?", " x"}));
  EXPECT_EQ(
      split("we've I'm you'll he'd they're can't"),
      (Pieces{"we", "'ve", " I", "'m", " you", "'ll", " he", "'d", " they", "'re", " can", "'t"}));
  EXPECT_EQ(split("IT'S"), (Pieces{"IT", "'", "S"}));
  EXPECT_EQ(split("a  \t b   "), (Pieces{"a", "  \t", " b", "   "}));
  EXPECT_EQ(split(" \n"), Pieces{" \n"});
}

TEST(PreTokenizer, UnicodeCategories) {
  // Letters of several scripts; a combining mark is none; Roman numerals and superscripts are
  // numbers.
  EXPECT_EQ(split("na\u00EFve \u4E2D\u6587 \u0416\u0443\u043A"),
            (Pieces{"na\u00EFve", " \u4E2D\u6587", " \u0416\u0443\u043A"}));
  EXPECT_EQ(split("n\u0301x"), (Pieces{"n", "\u0301", "x"}));
  EXPECT_EQ(split("x\u2167\u00B27"), (Pieces{"x", "\u2167\u00B27"}));
  EXPECT_EQ(split("hi \U0001F600\U0001F600ok"), (Pieces{"hi", " \U0001F600\U0001F600", "ok"}));
  // White space is Unicode's property: NEL, no-break and ideographic space, not U+180E or U+200B.
  EXPECT_EQ(split("a\u0085\u00A0\u3000b"), (Pieces{"a", "\u0085\u00A0", "\u3000", "b"}));
  EXPECT_EQ(split("a\u180E\u200Bb"), (Pieces{"a", "\u180E\u200B", "b"}));
  EXPECT_EQ(split("a\x1C"
                  "b"),
            (Pieces{"a", "\x1C", "b"}));
}

TEST(PreTokenizer, BytesThatAreNotUtf8) {
  EXPECT_EQ(split("ab\xFF\xFE cd"), (Pieces{"ab", "\xFF", "\xFE", " cd"}));
  EXPECT_EQ(split("\xE4\xB8"), (Pieces{"\xE4\xB8"}));            // cut short
  EXPECT_EQ(split("\xC0\x80x"), (Pieces{"\xC0", "\x80", "x"}));  // overlong
  EXPECT_EQ(split(std::string("a\0b", 3)), (Pieces{"a", std::string(1, '\0'), "b"}));
}

TEST(PreTokenizer, OtherPatterns) {
  EXPECT_EQ(split("one1two", "[a-z]+"), (Pieces{"one", "1", "two"}));
  EXPECT_EQ(split("1a2", "x*|[a-z]"), (Pieces{"1", "a", "2"}));
  EXPECT_EQ(split("12345", R"(\p{N}{1,3})"), (Pieces{"123", "45"}));
  EXPECT_TRUE(throws_error([] { PreTokenizer p("(a"); }, {"PreTokenizer", "at 2 of '(a'"}));
  EXPECT_EQ(split(std::string(1 << 20, 'a')), Pieces{std::string(1 << 20, 'a')});
}

// ---- a small vocabulary ------------------------------------------------------------------------

std::string utf8(unsigned c) {
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  return {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
}

/// GPT-2's bytes in the order of their ids, and how its files write them.
struct Alphabet {
  std::vector<int> byte_of_id;
  std::string text_of_byte[256];
  Alphabet() {
    const auto add = [&](int first, int last, int shift) {
      for (int b = first; b <= last; ++b) {
        text_of_byte[b] = utf8(static_cast<unsigned>(b + shift));
        byte_of_id.push_back(b);
      }
    };
    add(0x21, 0x7E, 0);
    add(0xA1, 0xAC, 0);
    add(0xAE, 0xFF, 0);
    add(0x00, 0x20, 0x100);
    add(0x7F, 0xA0, 0x100 + 33 - 0x7F);
    add(0xAD, 0xAD, 0x100 + 67 - 0xAD);
  }
  std::string text(const std::string& bytes) const {
    std::string out;
    for (const char b : bytes) out += text_of_byte[static_cast<unsigned char>(b)];
    return out;
  }
};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text)
    out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return out + "\"";
}

std::string base64(const std::string& bytes) {
  constexpr const char* kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const auto at = [&](std::size_t k) {
      return i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0u;
    };
    const unsigned v = at(0) << 16 | at(1) << 8 | at(2);
    for (unsigned k = 0; k < 4; ++k)
      out += i + k > bytes.size() ? '=' : kDigits[v >> (18 - 6 * k) & 63];
  }
  return out;
}

using Merges = std::vector<std::pair<std::string, std::string>>;

/// Files of the 256 bytes and `merges`, whose tokens have the ids from 256 on.
struct Vocabulary {
  const Alphabet alphabet;
  Merges merges;
  TempDir dir;
  explicit Vocabulary(Merges m) : merges(std::move(m)) {
    std::string vocab = "{", lines = "#version: 0.2\n", ranks;
    int id = 0;
    const auto add = [&](const std::string& bytes) {
      vocab += quoted(alphabet.text(bytes)) + ": " + std::to_string(id) + ", ";
      ranks += base64(bytes) + " " + std::to_string(id++) + "\n";
    };
    for (const int b : alphabet.byte_of_id) add(std::string(1, static_cast<char>(b)));
    for (const auto& [left, right] : merges) {
      add(left + right);
      lines += alphabet.text(left) + " " + alphabet.text(right) + "\n";
    }
    spew(dir / "vocab.json", vocab + "\"<|endoftext|>\": " + std::to_string(id) + "}");
    spew(dir / "merges.txt", lines);
    spew(dir / "ranks", ranks);
  }
  BpeTokenizer gpt2() const { return BpeTokenizer::gpt2(dir / "vocab.json", dir / "merges.txt"); }
  BpeTokenizer tiktoken() const {
    const auto end = static_cast<std::int32_t>(256 + merges.size());
    return BpeTokenizer::tiktoken(dir / "ranks", {{"<|endoftext|>", end}, {"<|pad|>", end + 5}});
  }
};

/// The first merges of GPT-2 itself, so that the ids below are its own.
const Merges kGpt2Merges = {{" ", "t"}, {" ", "a"}, {"h", "e"},  {"i", "n"},
                            {"r", "e"}, {"o", "n"}, {" t", "he"}};

TEST(BpeTokenizer, EncodingsCheckedByHand) {
  const Vocabulary vocabulary(kGpt2Merges);
  for (const BpeTokenizer& t : {vocabulary.gpt2(), vocabulary.tiktoken()}) {
    EXPECT_EQ(t.encode(""), Ids{});
    EXPECT_EQ(t.encode("!"), Ids{0});
    EXPECT_EQ(t.encode(" "), Ids{220});
    EXPECT_EQ(t.encode("\n"), Ids{198});
    // "the" has no leading space: t, he. " the" is one token. "then": " t" he, then " the" n.
    EXPECT_EQ(t.encode("the the then"), (Ids{83, 258, 262, 262, 77}));
    // " a" before "in"; "rein" = re in; "heron": h e r -> he r, then on.
    EXPECT_EQ(t.encode(" ain rein heron"), (Ids{257, 259, 220, 260, 259, 220, 258, 81, 261}));
    // U+00E9 is the bytes C3 A9, whose ids are 106 + 0xC3 - 0xAE and 94 + 0xA9 - 0xA1.
    EXPECT_EQ(t.encode("\u00E9"), (Ids{127, 102}));
    EXPECT_EQ(t.encode("\xFF"), Ids{187});
    EXPECT_EQ(t.decode(Ids{83, 258, 262, 127}), "the the\xC3");
    EXPECT_EQ(t.special("<|endoftext|>"), 263);
  }
  EXPECT_EQ(vocabulary.gpt2().vocab_size(), 264);
  EXPECT_EQ(vocabulary.tiktoken().vocab_size(), 269);
}

TEST(BpeTokenizer, TheLeftmostOfEqualPairsGoesFirst) {
  const Vocabulary vocabulary({{"a", "a"}, {"aa", "aa"}, {"aa", "a"}});
  const BpeTokenizer t = vocabulary.gpt2();
  EXPECT_EQ(t.encode("aaa"), Ids{258});             // aa a
  EXPECT_EQ(t.encode("aaaa"), Ids{257});            // aa aa
  EXPECT_EQ(t.encode("aaaaaaa"), (Ids{257, 258}));  // aa aa aa a -> aaaa aa a
}

// tiktoken does not cut a piece that is a token, though no merges lead to it; GPT-2's files do.
TEST(BpeTokenizer, ATokenThatNoMergeMakes) {
  const Vocabulary vocabulary(Merges{{"x", "yz"}});  // "yz" is no token
  EXPECT_EQ(vocabulary.tiktoken().encode("xyz xyz"), (Ids{256, 220, 87, 88, 89}));
  EXPECT_TRUE(throws_error([&] { (void)vocabulary.gpt2(); }, {"merges.txt:2", "'yz'", "got none"}));
}

TEST(BpeTokenizer, SpecialTokensAreOnlyWhatTheProgramAsksFor) {
  const Vocabulary vocabulary(kGpt2Merges);
  const BpeTokenizer t = vocabulary.tiktoken();
  const Ids plain = t.encode("<|endoftext|>");
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 263), 0);
  EXPECT_EQ(t.decode(plain), "<|endoftext|>");
  EXPECT_EQ(t.encode_with_special("the<|pad|><|endoftext|> the<|"),
            (Ids{83, 258, 268, 263, 262, 27, 91}));
  EXPECT_EQ(t.encode_with_special("<|pad|>"), Ids{268});
  EXPECT_EQ(t.encode_with_special("the"), (Ids{83, 258}));
  EXPECT_TRUE(throws_error([&] { (void)t.decode(Ids{0, 265}); }, {"decode", "got 265 at 1"}));
  EXPECT_TRUE(throws_error([&] { (void)t.decode(Ids{-1}); }, {"got -1 at 0"}));
  EXPECT_TRUE(throws_error([&] { (void)t.special("<|x|>"); }, {"'<|x|>'"}));
}

// ---- against the plain algorithm ---------------------------------------------------------------

Pieces merge_all(Pieces symbols, const std::pair<std::string, std::string>& pair) {
  Pieces out;
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    const bool merge =
        i + 1 < symbols.size() && symbols[i] == pair.first && symbols[i + 1] == pair.second;
    out.push_back(merge ? pair.first + pair.second : symbols[i]);
    i += merge;
  }
  return out;
}

Pieces bytes_of(const std::string& text) {
  Pieces symbols;
  for (const char c : text) symbols.emplace_back(1, c);
  return symbols;
}

/// Byte-pair training on one text: the most frequent pair, again and again.
Merges train(const std::string& text, int count) {
  Merges merges;
  Pieces symbols = bytes_of(text);
  while (static_cast<int>(merges.size()) < count) {
    std::map<std::pair<std::string, std::string>, int> pairs;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) ++pairs[{symbols[i], symbols[i + 1]}];
    const auto best =
        std::max_element(pairs.begin(), pairs.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    merges.push_back(best->first);
    symbols = merge_all(symbols, best->first);
  }
  return merges;
}

TEST(BpeTokenizer, EqualsMergingOneRankAfterTheOther) {
  std::mt19937 random(4);
  const auto letters = [&](std::size_t n) {
    std::string s;
    while (s.size() < n) s += "abc"[random() % 3];
    return s;
  };
  const Vocabulary vocabulary(train(letters(3000), 60));
  const BpeTokenizer gpt2 = vocabulary.gpt2(), tiktoken = vocabulary.tiktoken();
  for (int i = 0; i < 300; ++i) {
    const std::string text = letters(random() % 60);
    Pieces expected = bytes_of(text);
    for (const auto& pair : vocabulary.merges) expected = merge_all(expected, pair);
    Pieces got;
    for (const std::int32_t id : gpt2.encode(text)) got.push_back(gpt2.decode(Ids{id}));
    EXPECT_EQ(got, expected) << text;
    EXPECT_EQ(tiktoken.decode(tiktoken.encode(text)), text);
  }
  // One piece of a megabyte: quadratic merging would not end within the test's time.
  const std::string large = letters(1 << 20);
  EXPECT_EQ(gpt2.decode(gpt2.encode(large)), large);
}

TEST(Tokenizer, AnyBytesComeBack) {
  const Vocabulary vocabulary(kGpt2Merges);
  const BpeTokenizer bpe = vocabulary.gpt2();
  const ByteTokenizer bytes({"<s>", "</s>"});
  EXPECT_EQ(bytes.encode("a\xFF"), (Ids{97, 255}));
  EXPECT_EQ(bytes.encode_with_special("<s>a</s>"), (Ids{256, 97, 257}));
  EXPECT_EQ(bytes.vocab_size(), 258);
  EXPECT_TRUE(throws_error([] { ByteTokenizer t({"a", "a"}); }, {"'a' twice"}));
  EXPECT_TRUE(throws_error([] { ByteTokenizer t({""}); }, {"not empty"}));
  std::mt19937 random(5);
  for (int i = 0; i < 500; ++i) {
    std::string text;
    for (std::size_t n = random() % 80; n > 0; --n) {
      // Half any byte, half the start of valid sequences and spaces.
      const unsigned b = random() % 512;
      text += b < 256 ? static_cast<char>(b) : " the'\xC3\xA9\xE4\xB8\xAD\n"[b % 12];
    }
    for (const Tokenizer* t :
         {static_cast<const Tokenizer*>(&bpe), static_cast<const Tokenizer*>(&bytes)}) {
      EXPECT_EQ(t->decode(t->encode(text)), text);
      EXPECT_EQ(t->decode(t->encode_with_special(text)), text);
    }
  }
}

// ---- files with faults -------------------------------------------------------------------------

TEST(BpeTokenizer, FaultsInVocabularyFiles) {
  const Vocabulary v(kGpt2Merges);
  const auto vocab_fails = [&](const std::string& text,
                               std::initializer_list<std::string_view> fragments) {
    spew(v.dir / "bad.json", text);
    return throws_error(
        [&] { (void)BpeTokenizer::gpt2(v.dir / "bad.json", v.dir / "merges.txt", {}); }, fragments);
  };
  EXPECT_TRUE(vocab_fails("{", {"bad.json", "valid JSON"}));
  EXPECT_TRUE(vocab_fails("[]", {"an object", "array"}));
  EXPECT_TRUE(vocab_fails(R"({"a": 1, "a": 2})", {"'a' twice"}));
  EXPECT_TRUE(vocab_fails(R"({"a": 1, "b": 1})", {"one token with id 1", "'a' and 'b'"}));
  EXPECT_TRUE(vocab_fails(R"({"a": -1})", {"'a'", "got -1"}));
  EXPECT_TRUE(vocab_fails(R"({"a": "x"})", {"an integer for 'a'"}));
  EXPECT_TRUE(vocab_fails(R"({"a": 2147483647})", {"got 2147483647"}));
  EXPECT_TRUE(vocab_fails(R"({"a b": 1})", {"stand for bytes", "'a b'"}));
  EXPECT_TRUE(vocab_fails(R"({"\u4e2d": 1})", {"stand for bytes"}));
  EXPECT_TRUE(vocab_fails(R"({"a": 0})", {"every byte", "got none for 0"}));
  EXPECT_TRUE(throws_error(
      [&] { (void)BpeTokenizer::gpt2(v.dir / "vocab.json", v.dir / "merges.txt", {"<|x|>"}); },
      {"vocab.json", "'<|x|>'"}));
  const auto merges_fail = [&](const std::string& text,
                               std::initializer_list<std::string_view> fragments) {
    spew(v.dir / "bad.txt", text);
    return throws_error([&] { (void)BpeTokenizer::gpt2(v.dir / "vocab.json", v.dir / "bad.txt"); },
                        fragments);
  };
  EXPECT_TRUE(merges_fail("#version: 0.2\nh e\nhe", {"bad.txt:3", "two tokens", "'he'"}));
  EXPECT_TRUE(merges_fail("h e x\n", {"bad.txt:1", "'h e x'"}));
  EXPECT_TRUE(merges_fail("h e\nz z\n", {"bad.txt:2", "'zz'", "got none"}));
  EXPECT_TRUE(merges_fail("h e\nh e\n", {"bad.txt:2", "'h e' again"}));
  spew(v.dir / "crlf.txt", "#version: 0.2\r\nh e\r\n\r\n");
  EXPECT_EQ(BpeTokenizer::gpt2(v.dir / "vocab.json", v.dir / "crlf.txt").encode("he"), Ids{258});
}

TEST(BpeTokenizer, FaultsInRankFiles) {
  const Vocabulary v(kGpt2Merges);
  const auto fails = [&](const std::string& text,
                         std::initializer_list<std::string_view> fragments) {
    spew(v.dir / "bad", text);
    return throws_error([&] { (void)BpeTokenizer::tiktoken(v.dir / "bad", {}); }, fragments);
  };
  EXPECT_TRUE(fails("IQ== 0\nIg== x\n", {"bad:2", "an id"}));
  EXPECT_TRUE(fails("IQ==\n", {"bad:1", "an id"}));
  EXPECT_TRUE(fails("IQ= 0\n", {"bad:1", "base64", "'IQ='"}));
  EXPECT_TRUE(fails("I*== 0\n", {"base64"}));
  EXPECT_TRUE(fails(" 0\n", {"not empty"}));
  EXPECT_TRUE(fails("IQ== 0\nIQ== 1\n", {"bad:2", "'!' again"}));
  EXPECT_TRUE(fails("IQ== 0\nIg== 0\n", {"bad:2", "one token with id 0"}));
  EXPECT_TRUE(fails("IQ== 0\n", {"every byte"}));
  EXPECT_TRUE(throws_error(
      [&] {
        (void)BpeTokenizer::tiktoken(v.dir / "ranks", {{"<s>", 5}});
      },
      {"one token with id 5"}));
}

}  // namespace
}  // namespace mixtape::io
