// Writes scalars as a TensorBoard event file, so that `tensorboard --logdir DIR` shows the run.
// Records are framed as TFRecords (length, masked CRC-32C of the length, data, masked CRC-32C of
// the data) around an Event protocol buffer. Each record leaves in one write() to a file that only
// this writer has open: a killed process leaves at most a truncated last record, which readers
// skip, and several writers in one directory do not meet. Formats:
// tensorflow/core/util/event.proto, framework/summary.proto and lib/io/record_writer.h of
// TensorFlow.
//
//   io::EventWriter log("runs/fashion");
//   log.scalar("train/loss", loss, step);
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace mixtape::io {

class EventWriter {
 public:
  using Scalar = std::pair<std::string_view, double>;

  /// Creates `directory` (and its parents) and in it a new file
  /// events.out.tfevents.<unix seconds>.<host>.<pid>[.<n>]; n tells apart the writers that one
  /// process opens in one second. Throws mixtape::Error with the path and the system's text.
  explicit EventWriter(const std::filesystem::path& directory);
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  /// Appends one value (stored as float32; NaN and infinities are legal). `tag` is any text, "/"
  /// groups charts; invalid UTF-8 is replaced by U+FFFD. May be called from several threads.
  /// Throws if the disk is full; the file then still ends with the last whole record.
  void scalar(std::string_view tag, double value, std::int64_t step);
  /// The same for several values of one step, in one record.
  void scalars(std::span<const Scalar> values, std::int64_t step);
  void scalars(std::initializer_list<Scalar> values, std::int64_t step) {
    scalars(std::span(values.begin(), values.size()), step);
  }

  /// Forces what was written to the disk (fsync). A killed process loses nothing without it; a
  /// machine that loses power does.
  void flush();
  const std::filesystem::path& path() const { return path_; }

 private:
  void append(std::string_view event);

  std::filesystem::path path_;
  std::mutex mutex_;
  int fd_ = -1;
  std::int64_t size_ = 0;  // bytes of whole records
};

namespace detail {
/// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78) of `bytes`.
std::uint32_t crc32c(std::string_view bytes);
}  // namespace detail

}  // namespace mixtape::io
