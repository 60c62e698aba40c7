// A write that a reader never sees half done: temporary file, fsync, rename, fsync of the
// directory.
//
// The writer holds a lock on its temporary file. A temporary that nobody has locked belongs to a
// process that was killed; the next write to the same path removes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace mixtape::io {

/// A file in the making. Nothing is at `path` before commit(), everything after it; without
/// commit() the destructor removes what was written. Errors are mixtape::Error with `op`, the path
/// and the system's text. The directory must exist.
class AtomicFile {
 public:
  AtomicFile(const char* op, const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);
  void write(const void* bytes, std::size_t n) { write({static_cast<const char*>(bytes), n}); }
  /// Writes over bytes already written; for headers that hold a count.
  void overwrite(std::uint64_t offset, std::string_view bytes);
  /// Replaces the file at `path`. Once it returns, the bytes survive a power failure.
  void commit();
  std::uint64_t bytes_written() const { return written_; }

 private:
  [[noreturn]] void fail(const char* what, int error) const;
  void close() noexcept;

  const char* op_;
  std::string path_, temporary_;
  int fd_ = -1;
  std::uint64_t written_ = 0;
};

/// Replaces the file at `path` as a whole: after a crash or a full disk it holds either the old or
/// the new bytes, and no temporary file is left by a failed write.
void write_file(const std::filesystem::path& path, std::string_view bytes);

/// Removes temporary files of names that start with `prefix` and whose writer no longer exists.
/// Writing does this for its own path.
void remove_stale_temporaries(const std::filesystem::path& directory, std::string_view prefix);

}  // namespace mixtape::io
