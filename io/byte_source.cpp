#include "io/byte_source.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::io {
namespace {
constexpr std::size_t kInputBytes = 1 << 16;
constexpr std::uint64_t kDeflateMaxRatio = 1032;
}  // namespace

ByteSource::ByteSource(const char* op, const std::filesystem::path& path)
    : op_(op), path_(path.string()) {
  file_.reset(std::fopen(path_.c_str(), "rbe"));
  MT_CHECK(file_, op_, ": cannot open ", path_, ": ", errno_text(errno));
  struct stat info {};
  MT_CHECK(::fstat(::fileno(file_.get()), &info) == 0, op_, ": ", path_, ": ", errno_text(errno));
  MT_CHECK(S_ISREG(info.st_mode), op_, ": ", path_, ": expected a regular file, got ",
           S_ISDIR(info.st_mode) ? "a directory" : "something else");
  file_size_ = static_cast<std::uint64_t>(info.st_size);
  unsigned char magic[2] = {};
  looks_gzipped_ = read_raw(magic, 2) == 2 && magic[0] == 0x1F && magic[1] == 0x8B;
  std::rewind(file_.get());
}

ByteSource::~ByteSource() {
  if (inflater_) ::inflateEnd(inflater_.get());
}

void ByteSource::inflate_from_here() {
  auto stream = std::make_unique<z_stream>();
  *stream = {};
  const int rc = ::inflateInit2(stream.get(), 15 + 16);  // largest window, gzip wrapping
  MT_CHECK(rc == Z_OK, op_, ": zlib's inflateInit2 failed: ", ::zError(rc));
  inflater_ = std::move(stream);
  input_.resize(kInputBytes);
}

std::uint64_t ByteSource::capacity() const {
  if (!inflater_) return file_size_;
  return file_size_ > std::numeric_limits<std::uint64_t>::max() / kDeflateMaxRatio
             ? std::numeric_limits<std::uint64_t>::max()
             : file_size_ * kDeflateMaxRatio;
}

std::size_t ByteSource::read(void* destination, std::size_t n) {
  const std::size_t got = inflater_ ? read_inflated(destination, n) : read_raw(destination, n);
  position_ += got;
  return got;
}

std::size_t ByteSource::read_raw(void* destination, std::size_t n) {
  errno = 0;
  const std::size_t got = std::fread(destination, 1, n, file_.get());
  MT_CHECK(got == n || !std::ferror(file_.get()), op_, ": cannot read ", path_, ": ",
           errno_text(errno));
  return got;
}

bool ByteSource::refill() {
  if (inflater_->avail_in > 0) return true;
  inflater_->next_in = input_.data();
  inflater_->avail_in = static_cast<uInt>(read_raw(input_.data(), input_.size()));
  return inflater_->avail_in > 0;
}

// gzip files may be concatenated; anything else after a member's end is a fault.
bool ByteSource::next_member() {
  if (!refill()) return false;
  MT_CHECK(*inflater_->next_in == 0x1F, op_, ": ", path_,
           ": expected the end of the file after the gzip data, got further bytes");
  MT_CHECK(::inflateReset(inflater_.get()) == Z_OK, op_, ": ", path_, ": zlib's inflateReset");
  member_done_ = false;
  return true;
}

std::size_t ByteSource::read_inflated(void* destination, std::size_t n) {
  z_stream& s = *inflater_;
  auto* out = static_cast<Bytef*>(destination);
  std::size_t got = 0;
  while (got < n) {
    if (member_done_ && !next_member()) break;
    MT_CHECK(refill(), op_, ": ", path_, ": the gzip data is cut short: expected more after ",
             file_size_, " compressed bytes (", position_ + got, " bytes decompressed)");
    const std::size_t room = std::min<std::size_t>(n - got, 1u << 30);
    s.next_out = out + got;
    s.avail_out = static_cast<uInt>(room);
    const int rc = ::inflate(&s, Z_NO_FLUSH);
    got += room - s.avail_out;
    if (rc == Z_STREAM_END) member_done_ = true;
    MT_CHECK(rc == Z_OK || rc == Z_STREAM_END || rc == Z_BUF_ERROR, op_, ": ", path_,
             ": corrupt gzip data after ", position_ + got,
             " decompressed bytes: ", s.msg ? s.msg : ::zError(rc));
  }
  return got;
}

}  // namespace mixtape::io
