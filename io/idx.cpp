#include "io/idx.h"

#include <algorithm>
#include <array>
#include <bit>
#include <iomanip>
#include <limits>
#include <optional>
#include <sstream>

#include "io/byte_source.h"

namespace mixtape::io {
namespace {

constexpr const char* kOp = "read_idx";

bool known_type(unsigned code) {
  return code == 0x08 || code == 0x09 || (code >= 0x0B && code <= 0x0E);
}

std::uint32_t big_endian(const unsigned char* b) {
  return std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 | b[3];
}

std::string hex(std::uint32_t v) {
  std::ostringstream out;
  out << "0x" << std::hex << std::uppercase << std::setw(8) << std::setfill('0') << v;
  return out.str();
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::ostringstream out;
  out << '(';
  for (std::size_t i = 0; i < shape.size(); ++i) out << (i ? ", " : "") << shape[i];
  out << (shape.size() == 1 ? ",)" : ")");
  return out.str();
}

/// Bytes of an array, or nothing if they pass 2^63 - 1.
std::optional<std::uint64_t> payload_bytes(IdxType type, const std::vector<std::int64_t>& shape) {
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t n = size_of(type);
  for (const std::int64_t d : shape) {
    if (n > kMax / static_cast<std::uint64_t>(d)) return std::nullopt;
    n *= static_cast<std::uint64_t>(d);
  }
  return n;
}

void check_magic(const ByteSource& in, const unsigned char (&b)[4]) {
  const std::uint32_t magic = big_endian(b);
  const bool swapped = b[2] == 0 && b[3] == 0 && known_type(b[1]) && b[0] > 0;
  const char* hint = in.looks_gzipped() && !in.gzipped() ? "; this looks like gzip"
                     : in.gzipped() && b[0] == 0x1F && b[1] == 0x8B
                         ? "; this looks like gzip inside gzip"
                     : swapped ? "; the header looks byte-swapped (little-endian)"
                               : "; this is no IDX file";
  MT_CHECK(b[0] == 0 && b[1] == 0, kOp, ": ", in.path(),
           ": expected the magic number 0x0000TTDD (type, dimensions), got ", magic, " = ",
           hex(magic), hint);
  MT_CHECK(known_type(b[2]), kOp, ": ", in.path(),
           ": expected a type code 0x08, 0x09 or 0x0B to 0x0E in the magic number, got ",
           hex(magic));
  MT_CHECK(b[3] > 0, kOp, ": ", in.path(), ": expected at least one dimension, got ", hex(magic));
}

void read_header_bytes(ByteSource& in, unsigned char* to, std::size_t n, const char* what) {
  const std::uint64_t start = in.position();
  const std::size_t got = in.read(to, n);
  MT_CHECK(got == n, kOp, ": ", in.path(), ": cut short in the header: expected ", start + n,
           " bytes for ", what, ", got ", start + got);
}

// Sizes written little-endian would explain what big-endian sizes do not.
const char* swap_hint(const ByteSource& in, std::uint64_t header, const IdxArray& array) {
  std::vector<std::int64_t> swapped;
  for (const std::int64_t d : array.shape) {
    const auto v = static_cast<std::uint32_t>(d);
    swapped.push_back(std::int64_t{v >> 24 | (v >> 8 & 0xFF00) | (v << 8 & 0xFF0000) | v << 24});
  }
  const auto bytes = payload_bytes(array.type, swapped);
  return bytes && !in.gzipped() && swapped != array.shape && *bytes == in.file_size() - header
             ? "; the sizes look byte-swapped (little-endian)"
             : "";
}

void to_host_order(std::vector<std::byte>& bytes, std::size_t element) {
  if (std::endian::native == std::endian::big || element == 1) return;
  for (std::size_t i = 0; i + element <= bytes.size(); i += element)
    std::reverse(bytes.begin() + static_cast<std::ptrdiff_t>(i),
                 bytes.begin() + static_cast<std::ptrdiff_t>(i + element));
}

void check_dims(const IdxArray& a, const IdxArray& other, std::size_t dims, std::size_t other_dims,
                const char* what) {
  const bool swapped = a.shape.size() == other_dims && other.shape.size() == dims;
  MT_CHECK(a.type == IdxType::u8 && a.shape.size() == dims, "read_idx_pair: ", a.path,
           ": expected ", what, ", got ", name_of(a.type), " ", shape_text(a.shape),
           swapped ? "; the image and label files look swapped" : "");
}

}  // namespace

std::string_view name_of(IdxType type) {
  switch (type) {
    case IdxType::u8: return "uint8";
    case IdxType::i8: return "int8";
    case IdxType::i16: return "int16";
    case IdxType::i32: return "int32";
    case IdxType::f32: return "float32";
    case IdxType::f64: return "float64";
  }
  MT_THROW("IdxType: invalid code ", static_cast<int>(type));
}

std::size_t size_of(IdxType type) {
  switch (type) {
    case IdxType::u8:
    case IdxType::i8: return 1;
    case IdxType::i16: return 2;
    case IdxType::i32:
    case IdxType::f32: return 4;
    case IdxType::f64: return 8;
  }
  MT_THROW("IdxType: invalid code ", static_cast<int>(type));
}

std::int64_t IdxArray::numel() const {
  return static_cast<std::int64_t>(bytes.size() / size_of(type));
}

IdxArray read_idx(const std::filesystem::path& path, IdxEncoding encoding) {
  ByteSource in(kOp, path);
  if (encoding == IdxEncoding::gzip)
    MT_CHECK(in.looks_gzipped(), kOp, ": ", in.path(),
             ": expected gzip (first bytes 1F 8B), got a file of ", in.file_size(),
             " bytes that is not");
  if (encoding == IdxEncoding::gzip || (encoding == IdxEncoding::detect && in.looks_gzipped()))
    in.inflate_from_here();

  unsigned char magic[4];
  read_header_bytes(in, magic, sizeof magic, "the magic number");
  check_magic(in, magic);
  IdxArray array;
  array.path = in.path();
  array.type = static_cast<IdxType>(magic[2]);
  std::vector<unsigned char> sizes(std::size_t{4} * magic[3]);
  read_header_bytes(in, sizes.data(), sizes.size(), "the sizes");
  for (std::size_t i = 0; i < sizes.size(); i += 4) array.shape.push_back(big_endian(&sizes[i]));

  const std::uint64_t header = in.position();
  const auto payload = payload_bytes(array.type, array.shape);
  MT_CHECK(payload, kOp, ": ", in.path(), ": expected fewer than 2^63 bytes, got sizes ",
           shape_text(array.shape), " of ", name_of(array.type), swap_hint(in, header, array));
  const auto mismatch = [&](const auto&... got) {
    MT_THROW(kOp, ": ", in.path(), ": expected ", *payload, " bytes of values for ",
             name_of(array.type), " ", shape_text(array.shape), ", got ", got...,
             swap_hint(in, header, array));
  };
  if (*payload > in.capacity() - header)
    mismatch(in.gzipped() ? "at most " : "", in.capacity() - header, " (the file is cut short)");
  array.bytes.resize(*payload);
  const std::size_t got = in.read(array.bytes.data(), array.bytes.size());
  if (got < array.bytes.size()) mismatch(got, " (the file is cut short)");
  std::byte extra;
  if (in.read(&extra, 1) != 0) {
    if (in.gzipped()) mismatch("trailing bytes after them");
    mismatch(in.file_size() - header, " (trailing bytes)");
  }
  to_host_order(array.bytes, size_of(array.type));
  return array;
}

IdxPair read_idx_pair(const std::filesystem::path& images, const std::filesystem::path& labels,
                      IdxEncoding encoding) {
  IdxPair pair{read_idx(images, encoding), read_idx(labels, encoding)};
  check_dims(pair.images, pair.labels, 3, 1, "images, uint8 (N, H, W)");
  check_dims(pair.labels, pair.images, 1, 3, "labels, uint8 (N)");
  MT_CHECK(pair.images.shape[0] == pair.labels.shape[0], "read_idx_pair: expected one label for ",
           "each image, got ", pair.images.shape[0], " images in ", pair.images.path, " and ",
           pair.labels.shape[0], " labels in ", pair.labels.path);
  return pair;
}

}  // namespace mixtape::io
