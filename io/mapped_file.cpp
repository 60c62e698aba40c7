#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::io {

MappedFile::MappedFile(const char* op, const std::filesystem::path& path) : path_(path.string()) {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  MT_CHECK(fd >= 0, op, ": cannot open ", path_, ": ", errno_text(errno));
  struct stat info {};
  int error = ::fstat(fd, &info) == 0 ? 0 : errno;
  const bool regular = error == 0 && S_ISREG(info.st_mode);
  const auto size = static_cast<std::size_t>(info.st_size);
  void* data = nullptr;
  if (regular && size > 0) {
    data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) error = errno;
  }
  ::close(fd);
  MT_CHECK(error == 0, op, ": cannot map ", path_, ": ", errno_text(error));
  MT_CHECK(regular, op, ": ", path_, ": expected a regular file, got ",
           S_ISDIR(info.st_mode) ? "a directory" : "something else");
  bytes_ = {static_cast<const std::byte*>(data), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace mixtape::io
