// Where GPT-2's tokens come from: token files, or a text that is tokenised once.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "io/token_dataset.h"
#include "io/tokenizer.h"

namespace gpt2 {

namespace io = mixtape::io;

struct DataOptions {
  std::string text, tokens, bpe;  // a file; a folder of .bin files; a folder of a BPE vocabulary
};

class Data {
 public:
  /// Windows of `context` tokens; the last twentieth is for validation. A text's tokens are kept in
  /// `scratch`.
  Data(const DataOptions& o, std::int64_t context, const std::filesystem::path& scratch)
      : tokenizer_(make_tokenizer(o)),
        all_(o.tokens.empty() ? std::vector{tokenize(o.text, scratch)} : io::token_files(o.tokens),
             {.window = context, .vocab_size = padded_vocabulary()}),
        parts_(all_.split(0.05)),
        train(parts_.first),
        validation(parts_.second) {}

  /// Rounded up to whole tiles of the head's product.
  std::int64_t padded_vocabulary() const { return (tokenizer_->vocab_size() + 127) / 128 * 128; }
  std::int64_t tokens() const { return all_.token_count(); }
  const io::Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  static std::unique_ptr<io::Tokenizer> make_tokenizer(const DataOptions& o) {
    if (o.bpe.empty()) return std::make_unique<io::ByteTokenizer>();
    const std::filesystem::path folder = o.bpe;
    return std::make_unique<io::BpeTokenizer>(
        io::BpeTokenizer::gpt2(folder / "vocab.json", folder / "merges.txt"));
  }
  std::filesystem::path tokenize(const std::string& text,
                                 const std::filesystem::path& scratch) const {
    std::ifstream in(text, std::ios::binary);
    const std::string all(std::istreambuf_iterator<char>(in), {});
    std::filesystem::create_directories(scratch);
    const std::filesystem::path path = scratch / "tokens.bin";
    io::TokenWriter writer(path);
    MT_CHECK(!all.empty(), "--text: expected a text to learn, got an empty file ", text);
    writer.append(tokenizer_->encode(all));
    writer.commit();
    return path;
  }

  std::unique_ptr<io::Tokenizer> tokenizer_;
  io::TokenDataset all_;
  std::pair<io::TokenDataset, io::TokenDataset> parts_;

 public:
  const io::TokenDataset &train, &validation;
};

}  // namespace gpt2
