#include "io/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::io {
namespace {

constexpr std::string_view kTemporaryMark = ".tmp.";

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

// A descriptor of a new file that this process has locked, or -1 with errno.
int create_locked(std::string& temporary, const std::string& path) {
  static std::atomic<unsigned> counter{0};
  for (;;) {
    temporary = detail::concat(path, kTemporaryMark, ::getpid(), ".", counter++);
    const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST) continue;  // of a killed process with the same number
    if (fd < 0) return -1;
    ::flock(fd, LOCK_EX);  // a file system without locks has no clean-up; writing still works
    struct stat info {};
    if (::fstat(fd, &info) == 0 && info.st_nlink > 0) return fd;
    ::close(fd);  // removed as stale before the lock was taken
  }
}

// The entry made by a rename is on disk only after this.
bool sync_directory(const std::filesystem::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool ok = ::fsync(fd) == 0 || errno == EINVAL;  // EINVAL: this file system does not need it
  const int error = errno;
  ::close(fd);
  errno = error;
  return ok;
}

void remove_if_stale(const std::filesystem::path& temporary) {
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return;
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) ::unlink(temporary.c_str());
  ::close(fd);
}

}  // namespace

AtomicFile::AtomicFile(const char* op, const std::filesystem::path& path)
    : op_(op), path_(path.string()) {
  remove_stale_temporaries(directory_of(path), path.filename().string());
  fd_ = create_locked(temporary_, path_);
  MT_CHECK(fd_ >= 0, op_, ": cannot create ", temporary_, ": ", errno_text(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::unlink(temporary_.c_str());
  close();
}

void AtomicFile::fail(const char* what, int error) const {
  MT_THROW(op_, ": cannot ", what, " ", path_, " (", written_,
           " bytes written before): ", errno_text(error));
}

void AtomicFile::close() noexcept {
  ::close(fd_);
  fd_ = -1;
}

void AtomicFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("write", errno);
    bytes.remove_prefix(static_cast<std::size_t>(n));
    written_ += static_cast<std::uint64_t>(n);
  }
}

void AtomicFile::overwrite(std::uint64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("write", errno);
    bytes.remove_prefix(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
}

void AtomicFile::commit() {
  MT_CHECK(fd_ >= 0, op_, ": ", path_, ": expected one commit, got a second");
  if (::fsync(fd_) != 0) fail("write", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("replace", errno);
  close();
  if (!sync_directory(directory_of(path_))) fail("write the directory entry of", errno);
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  AtomicFile file("write_file", path);
  file.write(bytes);
  file.commit();
}

void remove_stale_temporaries(const std::filesystem::path& directory, std::string_view prefix) {
  std::error_code error;
  std::filesystem::directory_iterator at(directory, error);
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    const std::size_t mark = name.rfind(kTemporaryMark);
    const std::size_t numbers = mark + kTemporaryMark.size();
    const bool ours = mark != name.npos && name.starts_with(prefix) && numbers < name.size() &&
                      name.find_first_not_of("0123456789.", numbers) == name.npos;
    if (ours) remove_if_stale(at->path());
  }
}

}  // namespace mixtape::io
