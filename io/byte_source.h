// Reads a regular file, plain or gzip, as a stream of bytes. gzip is inflated here rather than by
// zlib's gzread because that ignores what follows the compressed data, and a file with bytes too
// many is as suspect as one with too few.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace mixtape::io {

class ByteSource {
 public:
  /// Opens for reading; `op` and the path head every message.
  ByteSource(const char* op, const std::filesystem::path& path);
  ~ByteSource();
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  /// Whether the file starts with gzip's two magic bytes.
  bool looks_gzipped() const { return looks_gzipped_; }
  /// From here on read() inflates. Call before the first read.
  void inflate_from_here();

  /// Reads up to n bytes; fewer only at the end. Throws on a read error, on corrupt or truncated
  /// gzip data, and on bytes after the compressed data that are not another gzip member.
  std::size_t read(void* destination, std::size_t n);
  /// Bytes delivered so far.
  std::uint64_t position() const { return position_; }
  /// The most bytes the whole file can deliver: its size, or what deflate's best ratio (1032 to 1)
  /// makes of it.
  std::uint64_t capacity() const;
  std::uint64_t file_size() const { return file_size_; }
  bool gzipped() const { return inflater_ != nullptr; }
  const std::string& path() const { return path_; }

 private:
  std::size_t read_raw(void* destination, std::size_t n);
  bool refill();
  bool next_member();
  std::size_t read_inflated(void* destination, std::size_t n);

  struct CloseFile {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  const char* op_;
  std::string path_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  std::uint64_t file_size_ = 0, position_ = 0;
  bool looks_gzipped_ = false, member_done_ = false;
  std::unique_ptr<z_stream> inflater_;
  std::vector<unsigned char> input_;
};

}  // namespace mixtape::io
