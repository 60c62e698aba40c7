// What ranks print, line by line with the rank in front, so that lines of several do not mix.
#pragma once

#include <string>
#include <string_view>

namespace mixtape::tools {

/// A pipe whose reader passes on whole lines as "[RANK] line". A line without an end is passed on
/// when the pipe closes, or in parts when it is very long.
class RankOutput {
 public:
  /// `to`: a descriptor of this process.
  RankOutput(int rank, int to);
  ~RankOutput();
  RankOutput(RankOutput&& other) noexcept;
  RankOutput& operator=(RankOutput&&) = delete;

  /// The end that the rank writes to, until close_writer().
  int writer() const { return writer_; }
  void close_writer();
  /// The end to poll; -1 once all writers have closed theirs.
  int reader() const { return reader_; }
  /// Passes on what has come, without waiting for more. True if there may be more already.
  bool pump();

 private:
  void pass_on(std::string_view line);
  int to_, reader_ = -1, writer_ = -1;
  std::string prefix_, partial_;
};

}  // namespace mixtape::tools
