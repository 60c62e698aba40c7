// A whole file as read-only memory. Pages are read when they are touched and shared between
// processes, so that a large file costs neither start-up time nor memory of its own.
//
// The file must not be shortened while it is mapped (the system then kills a reader of the lost
// pages with SIGBUS); files replaced by rename, as this library writes them, are safe.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace mixtape::io {

class MappedFile {
 public:
  /// Throws "op: ..." with the path unless it is a regular file that can be read and mapped.
  MappedFile(const char* op, const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

}  // namespace mixtape::io
