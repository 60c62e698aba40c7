// Token files and their windows: formats, faults, order, splitting and resuming. CASES 102, 107.
#include "io/token_dataset.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <set>

#include "io/checkpoint.h"
#include "io/data_loader.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::slurp;
using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

std::vector<std::int32_t> range(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

void write_tokens(const std::filesystem::path& path, const std::vector<std::int32_t>& tokens,
                  TokenWidth width = TokenWidth::u16) {
  TokenWriter writer(path, width);
  writer.append(tokens);
  writer.commit();
}

/// A file as llm.c writes it, byte by byte.
template <class Stored>
std::string token_bytes(std::int32_t magic, std::int32_t version, std::int32_t count,
                        const std::vector<Stored>& tokens) {
  std::array<std::int32_t, 256> header{magic, version, count};
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Stored));
  return bytes;
}

std::vector<std::int32_t> ints(const Tensor& t) {
  const auto span = t.data<std::int32_t>();
  return {span.begin(), span.end()};
}

/// The first token of each window, in a loader's order.
std::vector<std::int32_t> starts(DataLoader& loader) {
  std::vector<std::int32_t> all;
  for (auto& [x, y] : loader)
    for (std::int64_t b = 0; b < x.size(0); ++b) all.push_back(ints(x[b])[0]);
  return all;
}

TEST(TokenDataset, ReadsBothFormatsOfLlmC) {
  const TempDir dir;
  spew(dir / "a.bin", token_bytes<std::uint16_t>(20240520, 1, 7, {1, 2, 3, 4, 65535, 6, 7}));
  spew(dir / "b.bin", token_bytes<std::uint32_t>(20240801, 7, 4, {100000, 8, 9, 10}));
  const TokenDataset data({dir / "a.bin", dir / "b.bin"}, {.window = 3});
  EXPECT_EQ(data.size(), 3);
  EXPECT_EQ(data.token_count(), 11);
  SampleRandom random{{}};
  const Example first = data.get(0, random), second = data.get(1, random);
  EXPECT_EQ(ints(first.x), (std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(ints(first.y), (std::vector<std::int32_t>{2, 3, 4}));
  EXPECT_EQ(ints(second.x), (std::vector<std::int32_t>{4, 65535, 6}));
  EXPECT_EQ(ints(second.y), (std::vector<std::int32_t>{65535, 6, 7}));
  DataLoader loader(data, {.batch_size = 3});
  for (auto& [x, y] : loader) {
    EXPECT_EQ(x.describe(), "int32(3, 3)");
    EXPECT_EQ(ints(y), (std::vector<std::int32_t>{2, 3, 4, 65535, 6, 7, 8, 9, 10}));
  }
  EXPECT_TRUE(throws_error([&] { (void)data.get(3, random); }, {"[0, 3)", "got 3"}));
}

TEST(TokenDataset, TheWriterWritesThoseFormats) {
  const TempDir dir;
  write_tokens(dir / "a", {5, 65535});
  EXPECT_EQ(slurp(dir / "a"), (token_bytes<std::uint16_t>(20240520, 1, 2, {5, 65535})));
  write_tokens(dir / "b", {5, 65536}, TokenWidth::u32);
  EXPECT_EQ(slurp(dir / "b"), (token_bytes<std::uint32_t>(20240801, 7, 2, {5, 65536})));
  // Many appends, more than one buffer.
  const std::vector<std::int32_t> part = range(0, 60000);
  TokenWriter writer(dir / "c");
  for (int i = 0; i < 20; ++i) writer.append(part);
  EXPECT_FALSE(std::filesystem::exists(dir / "c"));
  EXPECT_EQ(writer.count(), 1200000);
  writer.commit();
  const TokenDataset data({dir / "c"}, {.window = 59999});
  SampleRandom random{{}};
  EXPECT_EQ(ints(data.get(19, random).y).back(), 59980);
  TokenWriter bad(dir / "d");
  const std::vector<std::int32_t> large{1, 65536}, negative{-1};
  EXPECT_TRUE(throws_error([&] { bad.append(large); }, {"[0, 65535]", "65536 at 1"}));
  EXPECT_TRUE(throws_error([&] { bad.append(negative); }, {"got -1"}));
}

TEST(TokenDataset, FilesThatAreNotTokens) {
  const TempDir dir;
  const auto fails = [&](const std::string& bytes,
                         std::initializer_list<std::string_view> fragments) {
    spew(dir / "f", bytes);
    return throws_error([&] { TokenDataset data({dir / "f"}, {.window = 2}); }, fragments);
  };
  const std::vector<std::uint16_t> tokens{1, 2, 3, 4};
  const std::string good = token_bytes(20240520, 1, 4, tokens);
  EXPECT_TRUE(fails("", {"TokenDataset", "1024 bytes", "a file of 0"}));
  EXPECT_TRUE(fails(good.substr(0, 1023), {"a file of 1023"}));
  EXPECT_TRUE(fails(std::string(2048, '\1'), {"20240520", "20240801", "16843009", "bare tokens"}));
  EXPECT_TRUE(fails(token_bytes(-1999096831, 1, 4, tokens), {"big-endian"}));
  EXPECT_TRUE(fails(token_bytes(20240520, 2, 4, tokens), {"version 1", "got 2"}));
  EXPECT_TRUE(fails(token_bytes(20240801, 1, 4, tokens), {"version 7", "got 1"}));
  EXPECT_TRUE(fails(good.substr(0, good.size() - 1), {"4 tokens", "got 7 bytes", "cut short"}));
  EXPECT_TRUE(fails(good + "x", {"4 tokens", "got 9 bytes"}));
  EXPECT_TRUE(fails(token_bytes(20240520, 1, -4, tokens), {"-4 tokens"}));
  EXPECT_TRUE(fails(token_bytes(20240520, 1, 2147483647, tokens), {"2147483647", "cut short"}));
  EXPECT_TRUE(fails(token_bytes<std::uint16_t>(20240520, 1, 2, {1, 2}), {"2 + 1 tokens", "got 2"}));
  EXPECT_TRUE(fails(token_bytes<std::uint16_t>(20240520, 1, 0, {}), {"got 0"}));
  EXPECT_TRUE(throws_error([&] { TokenDataset d({dir / "none"}); }, {"No such file"}));
  EXPECT_TRUE(throws_error([&] { TokenDataset d(std::vector<std::filesystem::path>{}); },
                           {"at least one file"}));
  spew(dir / "f", good);
  EXPECT_TRUE(throws_error([&] { TokenDataset d({dir / "f"}, {.window = 0}); }, {"got 0"}));
  EXPECT_TRUE(throws_error([&] { TokenDataset d({dir / "f"}, {.vocab_size = -1}); }, {"got -1"}));
}

TEST(TokenDataset, TokensOutsideOfTheVocabulary) {
  const TempDir dir;
  write_tokens(dir / "f", {1, 2, 3, 4, 5, 6, 7});
  spew(dir / "g", token_bytes<std::uint32_t>(20240801, 7, 3, {1, 0x80000000u, 2}));
  SampleRandom random{{}};
  const TokenDataset data({dir / "f"}, {.window = 3, .vocab_size = 7});
  EXPECT_EQ(ints(data.get(0, random).x)[0], 1);
  EXPECT_TRUE(
      throws_error([&] { (void)data.get(1, random); }, {"/f", "[0, 7)", "got 7", "tokens 3 to 6"}));
  const TokenDataset wide({dir / "g"}, {.window = 1});
  EXPECT_TRUE(throws_error([&] { (void)wide.get(0, random); }, {"/g", "got 2147483648"}));
}

TEST(TokenDataset, FilesOfADirectoryByName) {
  const TempDir dir;
  for (const char* name : {"train_2.bin", "train_10.bin", "val_0.bin", "train_3.txt"})
    write_tokens(dir / name, {1, 2});
  EXPECT_EQ(token_files(dir.path(), "train_"),
            (std::vector{dir / "train_10.bin", dir / "train_2.bin"}));
  EXPECT_EQ(token_files(dir.path()).size(), 3u);
  EXPECT_TRUE(
      throws_error([&] { (void)token_files(dir.path(), "test"); }, {"test*.bin", "got none"}));
  EXPECT_TRUE(throws_error([&] { (void)token_files(dir / "none"); }, {"No such file"}));
}

TEST(TokenDataset, SplitsAcrossFiles) {
  const TempDir dir;
  write_tokens(dir / "a", range(0, 41));     // 10 windows of 4
  write_tokens(dir / "b", range(1000, 44));  // 10 more; 3 tokens are left over
  const TokenDataset all({dir / "a", dir / "b"}, {.window = 4});
  ASSERT_EQ(all.size(), 20);
  const auto [train, val] = all.split(0.6);
  EXPECT_EQ(train.size(), 8);
  EXPECT_EQ(val.size(), 12);
  DataLoader t(train), v(val);
  std::vector<std::int32_t> together = starts(t), rest = starts(v);
  EXPECT_EQ(rest.front(), 32);
  EXPECT_EQ(rest[2], 1000);
  together.insert(together.end(), rest.begin(), rest.end());
  DataLoader a(all);
  EXPECT_EQ(together, starts(a));
  EXPECT_EQ(all.split(0.001).second.size(), 1);
  EXPECT_EQ(all.split(0.999).first.size(), 1);
  EXPECT_TRUE(throws_error([&] { (void)all.split(0); }, {"(0, 1)", "got 0"}));
  EXPECT_TRUE(throws_error([&] { (void)all.split(1); }, {"got 1"}));
  SampleRandom random{{}};
  EXPECT_TRUE(throws_error([&] { (void)train.get(8, random); }, {"[0, 8)"}));
}

// The order follows from (seed, epoch); a resumed pass repeats no window and skips none.
TEST(TokenDataset, Case107OrderAndResuming) {
  const TempDir dir;
  write_tokens(dir / "a", range(0, 401));
  write_tokens(dir / "b", range(5000, 201), TokenWidth::u32);
  const TokenDataset data({dir / "a", dir / "b"}, {.window = 4});
  const DataLoaderOptions options{.batch_size = 8, .shuffle = true, .seed = 3, .workers = 2};
  DataLoader first(data, options), same(data, options);
  const std::vector<std::int32_t> epoch0 = starts(first), epoch1 = starts(first);
  EXPECT_EQ(epoch0, starts(same));
  EXPECT_NE(epoch0, epoch1);
  EXPECT_FALSE(std::is_sorted(epoch0.begin(), epoch0.end()));
  EXPECT_EQ(std::set<std::int32_t>(epoch0.begin(), epoch0.end()).size(), 150u);

  std::vector<std::int32_t> seen;
  {
    DataLoader loader(data, options);
    for (auto& [x, y] : loader) {
      for (std::int64_t b = 0; b < x.size(0); ++b) seen.push_back(ints(x[b])[0]);
      if (seen.size() < 40) continue;
      save_checkpoint(dir / "c", {.loader = &loader});
      break;
    }
  }
  DataLoader resumed(data, options);
  Checkpoint into{.loader = &resumed};
  load_checkpoint(dir / "c", into);
  for (const std::int32_t start : starts(resumed)) seen.push_back(start);
  EXPECT_EQ(seen, epoch0);
}

}  // namespace
}  // namespace mixtape::io
