#include "io/token_dataset.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/check.h"
#include "io/mapped_file.h"
#include "ops/ops.h"

namespace mixtape::io {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr const char* kRead = "TokenDataset";
constexpr const char* kWrite = "TokenWriter";
constexpr std::size_t kHeaderInts = 256, kHeaderBytes = kHeaderInts * 4;
constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

struct Format {
  std::int32_t magic, version;
  TokenWidth width;
};
constexpr std::array<Format, 2> kFormats = {
    {{20240520, 1, TokenWidth::u16}, {20240801, 7, TokenWidth::u32}}};

using Header = std::array<std::int32_t, kHeaderInts>;

const Format& format_of(TokenWidth width) { return kFormats[width == TokenWidth::u32]; }

std::int64_t bytes_of(TokenWidth width) { return static_cast<std::int64_t>(width); }

std::string header_bytes(TokenWidth width, std::int64_t count) {
  Header header{};
  header[0] = format_of(width).magic;
  header[1] = format_of(width).version;
  header[2] = static_cast<std::int32_t>(count);
  return {reinterpret_cast<const char*>(header.data()), kHeaderBytes};
}

}  // namespace

// ---- writing -----------------------------------------------------------------------------------

TokenWriter::TokenWriter(const std::filesystem::path& path, TokenWidth width)
    : file_(kWrite, path), path_(path.string()), width_(width) {
  file_.write(header_bytes(width, 0));
}

void TokenWriter::append(std::span<const std::int32_t> tokens) {
  const std::int64_t limit =
      width_ == TokenWidth::u16 ? 65535 : std::numeric_limits<std::int32_t>::max();
  MT_CHECK(static_cast<std::int64_t>(tokens.size()) <= kMaxCount - count_, kWrite, ": ", path_,
           ": expected at most ", kMaxCount, " tokens in a file, got more; start another one");
  for (const std::int32_t token : tokens) {
    MT_CHECK(token >= 0 && token <= limit, kWrite, ": ", path_, ": expected tokens in [0, ", limit,
             "], got ", token, " at ", count_);
    const auto n = static_cast<std::size_t>(width_);
    buffer_.append(reinterpret_cast<const char*>(&token), n);  // the low bytes come first
    ++count_;
    if (buffer_.size() >= kBufferBytes) flush();
  }
}

void TokenWriter::flush() {
  file_.write(buffer_);
  buffer_.clear();
}

void TokenWriter::commit() {
  flush();
  file_.overwrite(0, header_bytes(width_, count_));
  file_.commit();
}

// ---- reading -----------------------------------------------------------------------------------

struct TokenDataset::File {
  MappedFile mapped;
  TokenWidth width = TokenWidth::u16;
  std::int64_t count = 0;

  explicit File(const std::filesystem::path& path) : mapped(kRead, path) {
    const std::span<const std::byte> bytes = mapped.bytes();
    MT_CHECK(bytes.size() >= kHeaderBytes, kRead, ": ", mapped.path(), ": expected a header of ",
             kHeaderBytes, " bytes, got a file of ", bytes.size());
    Header header;
    std::memcpy(header.data(), bytes.data(), kHeaderBytes);
    const auto* format = std::ranges::find(kFormats, header[0], &Format::magic);
    MT_CHECK(format != kFormats.end(), kRead, ": ", mapped.path(), ": expected the magic number ",
             kFormats[0].magic, " (uint16 tokens) or ", kFormats[1].magic, " (uint32), got ",
             header[0],
             is_swapped(header[0]) ? "; the header is big-endian"
                                   : "; a file of bare tokens has no header, which "
                                     "says how wide they are: write it with TokenWriter");
    MT_CHECK(header[1] == format->version, kRead, ": ", mapped.path(), ": expected version ",
             format->version, " for magic number ", format->magic, ", got ", header[1]);
    width = format->width;
    count = header[2];
    const auto held = static_cast<std::int64_t>(bytes.size() - kHeaderBytes);
    MT_CHECK(count >= 0 && count * bytes_of(width) == held, kRead, ": ", mapped.path(),
             ": expected ", count, " tokens of ", bytes_of(width), " bytes, as the header says, ",
             "got ", held, " bytes", count * bytes_of(width) > held ? " (cut short)" : "");
  }

  static bool is_swapped(std::int32_t magic) {
    const auto m = static_cast<std::uint32_t>(magic);
    const std::uint32_t swapped = m << 24 | (m & 0xFF00) << 8 | (m >> 8 & 0xFF00) | m >> 24;
    return std::ranges::find(kFormats, static_cast<std::int32_t>(swapped), &Format::magic) !=
           kFormats.end();
  }

  /// Converts tokens [first, first + n) and returns the largest, as unsigned.
  template <class Stored>
  std::uint32_t copy(std::int64_t first, std::int64_t n, std::int32_t* to) const {
    const auto* from =
        reinterpret_cast<const Stored*>(mapped.bytes().data() + kHeaderBytes) + first;
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      largest = std::max(largest, std::uint32_t{from[i]});
      to[i] = static_cast<std::int32_t>(from[i]);
    }
    return largest;
  }
};

std::vector<std::filesystem::path> token_files(const std::filesystem::path& directory,
                                               const std::string& prefix) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  std::filesystem::directory_iterator at(directory, error);
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with(prefix) && name.ends_with(".bin")) files.push_back(at->path());
  }
  MT_CHECK(!error, "token_files: cannot read ", directory.string(), ": ", error.message());
  MT_CHECK(!files.empty(), "token_files: expected files ", prefix, "*.bin in ", directory.string(),
           ", got none");
  std::sort(files.begin(), files.end());
  return files;
}

TokenDataset::TokenDataset(const std::vector<std::filesystem::path>& files,
                           TokenDatasetOptions options)
    : first_window_{0}, options_(options) {
  MT_CHECK(!files.empty(), kRead, ": expected at least one file, got none");
  MT_CHECK(options.window >= 1, kRead, ": expected a window of at least 1 token, got ",
           options.window);
  MT_CHECK(options.vocab_size >= 0, kRead, ": expected a vocab_size of at least 0, got ",
           options.vocab_size);
  for (const std::filesystem::path& path : files) {
    files_.push_back(std::make_shared<const File>(path));
    const std::int64_t windows =
        std::max<std::int64_t>(files_.back()->count - 1, 0) / options.window;
    first_window_.push_back(first_window_.back() + windows);
  }
  last_ = first_window_.back();
  MT_CHECK(last_ > 0, kRead, ": expected a file of at least ", options.window, " + 1 tokens, got ",
           token_count(), " in ", files.size(),
           files.size() == 1 ? " file, " : " files, the first ", files[0].string());
}

std::int64_t TokenDataset::token_count() const {
  std::int64_t n = 0;
  for (const auto& file : files_) n += file->count;
  return n;
}

void TokenDataset::read_window(std::int64_t index, std::int32_t* x, std::int32_t* y) const {
  MT_CHECK(index >= 0 && index < size(), kRead, ": expected a sample index in [0, ", size(),
           "), got ", index);
  const std::int64_t w = first_ + index;
  const auto next = std::upper_bound(first_window_.begin(), first_window_.end(), w);
  const auto f = static_cast<std::size_t>(next - first_window_.begin()) - 1;
  const File& file = *files_[f];
  const std::int64_t first = (w - first_window_[f]) * options_.window;
  const bool narrow = file.width == TokenWidth::u16;
  const auto copy = [&](std::int64_t from, std::int32_t* to) {
    return narrow ? file.copy<std::uint16_t>(from, options_.window, to)
                  : file.copy<std::uint32_t>(from, options_.window, to);
  };
  const std::uint32_t largest = std::max(copy(first, x), copy(first + 1, y));
  const std::int64_t bound = options_.vocab_size > 0 ? options_.vocab_size : kMaxCount + 1;
  MT_CHECK(largest < bound, kRead, ": ", file.mapped.path(), ": expected tokens in [0, ", bound,
           "), got ", largest, " among tokens ", first, " to ", first + options_.window);
}

Example TokenDataset::get(std::int64_t index, SampleRandom&) const {
  const Example e{empty({options_.window}, {.dtype = Dtype::i32}),
                  empty({options_.window}, {.dtype = Dtype::i32})};
  read_window(index, e.x.data<std::int32_t>().data(), e.y.data<std::int32_t>().data());
  return e;
}

Batch TokenDataset::collate(std::span<const std::int64_t> indices,
                            const CollateContext& context) const {
  const Shape sizes{static_cast<std::int64_t>(indices.size()), options_.window};
  Batch batch{context.empty(sizes, Dtype::i32), context.empty(sizes, Dtype::i32)};
  std::int32_t* x = batch.x.data<std::int32_t>().data();
  std::int32_t* y = batch.y.data<std::int32_t>().data();
  for (const std::int64_t index : indices) {
    read_window(index, x, y);
    x += options_.window;
    y += options_.window;
  }
  return batch;
}

std::pair<TokenDataset, TokenDataset> TokenDataset::split(double val_fraction) const {
  MT_CHECK(val_fraction > 0 && val_fraction < 1, kRead,
           ": split: expected a val_fraction in (0, 1), got ", val_fraction);
  MT_CHECK(size() >= 2, kRead, ": split: expected at least 2 windows, got ", size());
  const auto wanted = std::llround(val_fraction * static_cast<double>(size()));
  const std::int64_t val_size = std::clamp<std::int64_t>(wanted, 1, size() - 1);
  std::pair<TokenDataset, TokenDataset> parts{*this, *this};
  parts.first.last_ -= val_size;
  parts.second.first_ = parts.first.last_;
  return parts;
}

}  // namespace mixtape::io
