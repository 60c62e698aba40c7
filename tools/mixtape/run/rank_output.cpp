#include "tools/mixtape/run/rank_output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::tools {
namespace {

constexpr std::size_t kLongest = 1 << 16;  // bytes of a line that are kept back

/// All bytes, or as many as the reader of `to` took before it went away.
void write_all(int to, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(to, bytes.data(), bytes.size());
    if (n > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      pollfd poller{.fd = to, .events = POLLOUT, .revents = 0};
      poll(&poller, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace

RankOutput::RankOutput(int rank, int to) : to_(to), prefix_(detail::concat("[", rank, "] ")) {
  int ends[2];
  MT_CHECK(pipe2(ends, O_CLOEXEC) == 0, "run: pipe: ", io::errno_text(errno));
  reader_ = ends[0];
  writer_ = ends[1];
  MT_CHECK(fcntl(reader_, F_SETFL, O_NONBLOCK) == 0, "run: fcntl: ", io::errno_text(errno));
}

RankOutput::RankOutput(RankOutput&& other) noexcept
    : to_(other.to_),
      reader_(std::exchange(other.reader_, -1)),
      writer_(std::exchange(other.writer_, -1)),
      prefix_(std::move(other.prefix_)),
      partial_(std::move(other.partial_)) {}

RankOutput::~RankOutput() {
  close_writer();
  if (reader_ >= 0) close(reader_);
}

void RankOutput::close_writer() {
  if (writer_ >= 0) close(std::exchange(writer_, -1));
}

void RankOutput::pass_on(std::string_view line) {
  std::string text = prefix_;
  text += line;
  text += '\n';
  write_all(to_, text);
}

bool RankOutput::pump() {
  constexpr int kReads = 16;  // so that a rank that never stops printing does not keep us here
  char bytes[4096];
  for (int i = 0; i < kReads && reader_ >= 0; ++i) {
    const ssize_t n = read(reader_, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return false;
    if (n <= 0) {
      if (!partial_.empty()) pass_on(std::exchange(partial_, {}));
      close(std::exchange(reader_, -1));
      return false;
    }
    partial_.append(bytes, static_cast<std::size_t>(n));
    std::size_t begin = 0;
    for (std::size_t end; (end = partial_.find('\n', begin)) != std::string::npos; begin = end + 1)
      pass_on(std::string_view(partial_).substr(begin, end - begin));
    partial_.erase(0, begin);
    if (partial_.size() >= kLongest) pass_on(std::exchange(partial_, {}));
  }
  return reader_ >= 0;
}

}  // namespace mixtape::tools
