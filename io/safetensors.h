// Safetensors, the tensor file of Hugging Face: eight bytes of header length, a JSON header, then
// the tensors' bytes, little-endian and row-major. Names are the caller's.
// Format: https://github.com/huggingface/safetensors
//
//   io::write_safetensors("model.safetensors", net.state_dict(), {{"format", "pt"}});
//   const io::SafetensorsFile file("model.safetensors");
//   net.load_state_dict(file.tensors());
//
// Reading maps the file and checks the whole header before anything is believed: a file never makes
// the reader allocate more than it holds, or look past its end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/module.h"

namespace mixtape::io {

class MappedFile;
using StringMap = std::map<std::string, std::string>;

/// One tensor of a file.
struct SafetensorsEntry {
  std::string name;
  Dtype dtype = Dtype::f32;
  Shape shape;
  std::span<const std::byte> bytes = {};  // row-major, in the mapped file

  /// Of a name tied to another: the owner's position among entries(), and where in the owner's
  /// elements this view lies. Its bytes are within the owner's, or empty if they are not adjacent.
  int owner = -1;  // none
  std::int64_t offset = 0;
  Shape strides = {};
};

class SafetensorsFile {
 public:
  /// Throws mixtape::Error with the path, the tensor, what was expected and what was found if the
  /// header's length, its JSON, a name, dtype, shape or offset is wrong, if tensors overlap or
  /// leave bytes unused, or if a tensor is of a dtype that Mixtape has not. dtypes: F64, F32, F16,
  /// BF16, I64, I32, U8, BOOL.
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  /// In the order of their bytes; tied names last.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  bool contains(const std::string& name) const { return find(name) != nullptr; }
  /// Null if there is no such tensor.
  const SafetensorsEntry* find(const std::string& name) const;
  /// Throws if there is no such tensor.
  const SafetensorsEntry& at(const std::string& name) const;
  /// The header's text map, without the library's own key.
  const StringMap& metadata() const { return metadata_; }
  const std::string& path() const;
  /// Reads the whole file and throws if a byte of it differs from what was written. False if it was
  /// written without a checksum.
  bool verify_checksum() const;

  /// The values where they lie in the file, good as long as this object. Throws if T is not the
  /// tensor's dtype, if the file has it unaligned (older writers did not pad), and for a tied name
  /// whose elements are not adjacent.
  template <class T>
  std::span<const T> view(const std::string& name) const {
    const SafetensorsEntry& e = at(name);
    check_view(e, dtype_of<T>, alignof(T));
    return {reinterpret_cast<const T*>(e.bytes.data()), e.bytes.size() / sizeof(T)};
  }
  /// A copy. A tied name is copied on its own here.
  Tensor tensor(const std::string& name, Device device = {}) const;
  /// Copies of all; tied names share memory as they did when written.
  std::vector<nn::NamedTensor> tensors(Device device = {}) const;

 private:
  void parse(std::span<const std::byte> file);
  void read_ties(const std::string& text);
  void check_view(const SafetensorsEntry& e, Dtype dtype, std::size_t alignment) const;
  Tensor load(const SafetensorsEntry& e, Device device) const;

  std::unique_ptr<MappedFile> file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t> index_;
  StringMap metadata_;
  std::string checksum_;  // empty: none
};

struct SafetensorsOptions {
  bool checksum = false;  // CRC-32 of the whole file, in the metadata key "mixtape.crc32"
};

/// Replaces the file at `path` as a whole (io/file.h). Values are written in logical order, from
/// any device, large dtypes first so that all are aligned. A tensor that is another's alias, or a
/// view within a contiguous one, is written once, and the tie recorded in the metadata key
/// "mixtape.tied". Throws on empty, reserved or repeated names, on undefined tensors, and on
/// tensors that share memory in a way that cannot be recorded (both names are given; clone one).
void write_safetensors(const std::filesystem::path& path,
                       const std::vector<nn::NamedTensor>& tensors, const StringMap& metadata = {},
                       SafetensorsOptions options = {});

}  // namespace mixtape::io
