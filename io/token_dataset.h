// Token files for language models, and the data set of their windows.
//
// A file is llm.c's: 256 int32 of header (magic 20240520, version 1 for uint16 tokens; magic
// 20240801, version 7 for uint32; then the count), and the tokens, little-endian. Files are mapped,
// so that a corpus larger than memory costs none. https://github.com/karpathy/llm.c, dev/data
//
//   const io::TokenDataset all(io::token_files("data", "train_"), {.window = 1024});
//   const auto [train, val] = all.split(0.01);
//   io::DataLoader loader(train, {.batch_size = 16, .shuffle = true, .seed = 1, .device = device});
//   for (auto& [x, y] : loader) ...      // x, y int32 (B, T); y[b][t] is the token after x[b][t]
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/dataset.h"
#include "io/file.h"

namespace mixtape::io {

enum class TokenWidth : std::uint8_t { u16 = 2, u32 = 4 };  // bytes of a token in the file

/// Writes a token file as a whole (io/file.h): nothing is at `path` before commit().
class TokenWriter {
 public:
  explicit TokenWriter(const std::filesystem::path& path, TokenWidth width = TokenWidth::u16);
  /// Throws on a token that is negative or does not fit the width, and past 2^31 - 1 tokens.
  void append(std::span<const std::int32_t> tokens);
  void commit();
  std::int64_t count() const { return count_; }

 private:
  void flush();

  AtomicFile file_;
  std::string path_, buffer_;
  TokenWidth width_;
  std::int64_t count_ = 0;
};

/// The files named prefix*.bin of a directory, by name; throws if there is none.
std::vector<std::filesystem::path> token_files(const std::filesystem::path& directory,
                                               const std::string& prefix = "");

struct TokenDatasetOptions {
  std::int64_t window = 1024;  // T
  /// Tokens are checked to be below it as they are read; 0 does not check.
  std::int64_t vocab_size = 0;
};

/// Sample i: T tokens x and, shifted by one, T tokens y. The windows of a file lie side by side and
/// share one token with the next; what is left at a file's end is not used.
class TokenDataset : public Dataset {
 public:
  /// Throws unless every file is whole and of one of the two formats, and if there is no window.
  explicit TokenDataset(const std::vector<std::filesystem::path>& files,
                        TokenDatasetOptions options = {});
  std::int64_t size() const override { return last_ - first_; }
  std::int64_t window() const { return options_.window; }
  /// Tokens in all files.
  std::int64_t token_count() const;
  Example get(std::int64_t index, SampleRandom& random) const override;
  Batch collate(std::span<const std::int64_t> indices,
                const CollateContext& context) const override;

  /// The first windows for training, and the last ones, about `val_fraction` of all and at least
  /// one, for validation. Both share the mapped files.
  std::pair<TokenDataset, TokenDataset> split(double val_fraction) const;

 private:
  struct File;
  void read_window(std::int64_t index, std::int32_t* x, std::int32_t* y) const;

  std::vector<std::shared_ptr<const File>> files_;
  std::vector<std::int64_t> first_window_;  // of each file, and the end
  TokenDatasetOptions options_;
  std::int64_t first_ = 0, last_ = 0;  // the windows that are this data set's
};

}  // namespace mixtape::io
