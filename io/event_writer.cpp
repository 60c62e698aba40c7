#include "io/event_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>

#include "engine/check.h"
#include "io/text.h"

namespace mixtape::io {
namespace detail {
namespace {
constexpr std::array<std::uint32_t, 256> crc32c_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
    table[i] = c;
  }
  return table;
}
constexpr auto kCrcTable = crc32c_table();
}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t c = ~0u;
  for (const char b : bytes) c = kCrcTable[(c ^ static_cast<unsigned char>(b)) & 0xFF] ^ c >> 8;
  return ~c;
}
}  // namespace detail

namespace {

void put_fixed(std::string& out, std::uint64_t v, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(v >> 8 * i);
}

void put_varint(std::string& out, std::uint64_t v) {
  for (; v >= 0x80; v >>= 7) out += static_cast<char>(v | 0x80);
  out += static_cast<char>(v);
}

// Protocol buffer wire types: 0 varint, 1 fixed64, 2 length-delimited, 5 fixed32.
void put_key(std::string& out, int field, int wire_type) {
  put_varint(out, static_cast<std::uint64_t>(field << 3 | wire_type));
}

void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_key(out, field, 2);
  put_varint(out, bytes.size());
  out += bytes;
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
std::string event_head(std::int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string event;
  put_key(event, 1, 1);
  put_fixed(event, std::bit_cast<std::uint64_t>(now.count()), 8);
  if (step != 0) {
    put_key(event, 2, 0);
    put_varint(event, static_cast<std::uint64_t>(step));
  }
  return event;
}

std::string record_of(std::string_view event) {
  // A CRC stored beside data that is itself checked would be ineffective unmasked.
  const auto masked = [](std::uint32_t crc) { return (crc >> 15 | crc << 17) + 0xA282EAD8u; };
  std::string record;
  put_fixed(record, event.size(), 8);
  put_fixed(record, masked(detail::crc32c(record)), 4);
  record += event;
  put_fixed(record, masked(detail::crc32c(event)), 4);
  return record;
}

std::string file_name() {
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) != 0 || host[0] == '\0') host[0] = '-';
  for (char& c : host)
    if (c == '/') c = '_';
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(
      std::chrono::system_clock::now().time_since_epoch());
  char time[24];
  std::snprintf(time, sizeof time, "%010lld", static_cast<long long>(seconds.count()));
  return mixtape::detail::concat("events.out.tfevents.", time, ".", host, ".", ::getpid());
}

}  // namespace

EventWriter::EventWriter(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  MT_CHECK(!error, "EventWriter: cannot create ", directory.string(), ": ", error.message());
  const std::string base = (directory / file_name()).string();
  for (int n = 0; fd_ < 0; ++n) {
    path_ = n == 0 ? base : mixtape::detail::concat(base, ".", n);
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    MT_CHECK(fd_ >= 0 || errno == EEXIST, "EventWriter: cannot create ", path_.string(), ": ",
             errno_text(errno));
  }
  std::string event = event_head(0);
  put_bytes(event, 3, "brain.Event:2");
  try {
    append(event);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

EventWriter::~EventWriter() { ::close(fd_); }

void EventWriter::scalar(std::string_view tag, double value, std::int64_t step) {
  scalars({{tag, value}}, step);
}

// Summary { repeated Value value = 1; }, Value { string tag = 1; float simple_value = 2; }
void EventWriter::scalars(std::span<const Scalar> values, std::int64_t step) {
  std::string summary;
  for (const auto& [tag, value] : values) {
    std::string entry;
    put_bytes(entry, 1, valid_utf8(tag));
    put_key(entry, 2, 5);
    put_fixed(entry, std::bit_cast<std::uint32_t>(static_cast<float>(value)), 4);
    put_bytes(summary, 1, entry);
  }
  std::string event = event_head(step);
  put_bytes(event, 5, summary);
  append(event);
}

void EventWriter::append(std::string_view event) {
  const std::string record = record_of(event);
  const std::lock_guard lock(mutex_);
  ssize_t n;
  do n = ::write(fd_, record.data(), record.size());
  while (n < 0 && errno == EINTR);
  if (n == static_cast<ssize_t>(record.size())) {
    size_ += n;
    return;
  }
  const int error = n < 0 ? errno : ENOSPC;
  // A part of a record in the middle would hide all that follows it.
  const bool cut = n <= 0 || ::ftruncate(fd_, size_) == 0;
  MT_THROW("EventWriter: cannot append ", record.size(), " bytes to ", path_.string(), ": ",
           errno_text(error), cut ? "" : " (and the file's tail could not be cut off)");
}

void EventWriter::flush() {
  MT_CHECK(::fsync(fd_) == 0, "EventWriter: ", path_.string(), ": ", errno_text(errno));
}

}  // namespace mixtape::io
