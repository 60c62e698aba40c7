// Reader of IDX files, the format of MNIST and Fashion-MNIST: two zero bytes, a type code, the
// number of dimensions, big-endian 32-bit sizes, then the values, big-endian and row-major.
// Downloads come gzipped, cut short or mixed up often enough that every such fault is told apart
// and named; a file is never read past what its header promises, nor memory allocated for more
// than the file can hold. Format: http://yann.lecun.com/exdb/mnist (section "file format").
//
//   IdxArray images = read_idx("train-images-idx3-ubyte.gz");      // u8, shape {60000, 28, 28}
//   std::span<const std::uint8_t> pixels = images.values<std::uint8_t>();
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/check.h"

namespace mixtape::io {

/// Type codes as stored in the file's third byte.
enum class IdxType : std::uint8_t {
  u8 = 0x08,
  i8 = 0x09,
  i16 = 0x0B,
  i32 = 0x0C,
  f32 = 0x0D,
  f64 = 0x0E
};

/// "uint8", "int8", "int16", "int32", "float32" or "float64".
std::string_view name_of(IdxType type);
std::size_t size_of(IdxType type);

template <class T>
constexpr IdxType idx_type_of() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return IdxType::u8;
  if constexpr (std::is_same_v<T, std::int8_t>) return IdxType::i8;
  if constexpr (std::is_same_v<T, std::int16_t>) return IdxType::i16;
  if constexpr (std::is_same_v<T, std::int32_t>) return IdxType::i32;
  if constexpr (std::is_same_v<T, float>) return IdxType::f32;
  if constexpr (std::is_same_v<T, double>) return IdxType::f64;
}

/// One array, values in host byte order.
struct IdxArray {
  IdxType type = IdxType::u8;
  std::vector<std::int64_t> shape;  // at least one dimension; sizes may be 0
  std::vector<std::byte> bytes;     // numel() * size_of(type)
  std::string path;                 // where it was read from, for messages

  std::int64_t numel() const;
  /// The values as T; throws if T is not the file's type.
  template <class T>
  std::span<const T> values() const {
    MT_CHECK(type == idx_type_of<T>(), "IdxArray::values: ", path, ": expected ", name_of(type),
             " (the file's type), got ", name_of(idx_type_of<T>()));
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
};

enum class IdxEncoding : std::uint8_t { detect, plain, gzip };

/// Reads the whole file. `detect` tells gzip by its first two bytes, not by the name. Throws
/// mixtape::Error with the path, what was expected and what was found when the file is missing or
/// unreadable, compressed although `plain` was asked for, cut short anywhere, longer than its
/// header says, byte-swapped, of an unknown type, or corrupt inside its compression.
IdxArray read_idx(const std::filesystem::path& path, IdxEncoding encoding = IdxEncoding::detect);

struct IdxPair {
  IdxArray images;  // u8 (N, H, W)
  IdxArray labels;  // u8 (N)
};

/// Reads an image file and its label file. Throws if the two look swapped, have other types or
/// dimensions, or hold different counts.
IdxPair read_idx_pair(const std::filesystem::path& images, const std::filesystem::path& labels,
                      IdxEncoding encoding = IdxEncoding::detect);

}  // namespace mixtape::io
