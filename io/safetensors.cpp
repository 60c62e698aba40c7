#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>

#include "engine/check.h"
#include "engine/grad_mode.h"
#include "engine/op.h"
#include "engine/transfer.h"
#include "io/checksum.h"
#include "io/json.h"
#include "io/mapped_file.h"
#include "io/safetensors_format.h"
#include "io/tied_tensors.h"
#include "ops/ops.h"

namespace mixtape::io {
namespace {

using nlohmann::json;

constexpr const char* kRead = "SafetensorsFile";
constexpr std::int64_t kMaxElements = std::int64_t{1} << 60;
constexpr std::uint64_t kMaxInteger = std::numeric_limits<std::int64_t>::max();

/// The fields of one JSON object; `where`, the file and the tensor, starts every message.
class Fields {
 public:
  Fields(std::string where, const json& object, std::initializer_list<std::string_view> keys)
      : where_(std::move(where)), object_(object) {
    MT_CHECK(object.is_object(), where_, "expected an object, got ", object.type_name());
    for (const std::string_view key : keys)
      MT_CHECK(object.contains(key), where_, "expected an entry '", key, "', got none");
    for (const auto& [key, value] : object.items())
      MT_CHECK(std::find(keys.begin(), keys.end(), key) != keys.end(), where_, "unexpected entry '",
               key, "'");
  }

  std::string text(const char* key) const {
    MT_CHECK(object_[key].is_string(), where_, "expected ", key, " to be text, got ",
             object_[key].type_name());
    return object_[key].get<std::string>();
  }
  Dtype dtype(const char* key) const {
    const std::string name = text(key);
    const auto found = std::find(kDtypeNames.begin(), kDtypeNames.end(), name);
    MT_CHECK(found != kDtypeNames.end(), where_,
             "expected dtype F64, F32, F16, BF16, I64, I32, U8 or BOOL, got ", name);
    return static_cast<Dtype>(found - kDtypeNames.begin());
  }
  std::int64_t integer(const char* key) const { return integer(key, object_[key]); }
  std::vector<std::int64_t> integers(const char* key) const {
    const json& list = object_[key];
    MT_CHECK(list.is_array() && list.size() <= kMaxDims, where_, "expected ", key,
             " to be at most ", kMaxDims, " integers, got ", list.dump().substr(0, 100));
    std::vector<std::int64_t> values;
    for (const json& v : list) values.push_back(integer(key, v));
    return values;
  }
  /// Sizes whose product is below 2^60, so that no count of bytes overflows.
  Shape shape(const char* key) const {
    const Shape shape(integers(key));
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return shape;
    std::int64_t n = 1;
    for (const std::int64_t d : shape) {
      MT_CHECK(n <= kMaxElements / d, where_, "expected fewer than 2^60 elements, got shape ",
               shape);
      n *= d;
    }
    return shape;
  }
  const std::string& where() const { return where_; }

 private:
  std::int64_t integer(const char* key, const json& v) const {
    // The parser makes every integer from 0 on unsigned, and what passes 2^64 a float.
    MT_CHECK(v.is_number_unsigned() && v.get<std::uint64_t>() <= kMaxInteger, where_, "expected ",
             key, " of integers from 0 to 2^63 - 1, got ", v.dump());
    return v.get<std::int64_t>();
  }

  std::string where_;
  const json& object_;
};

std::uint64_t little_endian(const std::byte* bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

/// The header's JSON text and the bytes after it.
std::pair<std::string_view, std::span<const std::byte>> split_file(
    const std::string& path, std::span<const std::byte> file) {
  MT_CHECK(file.size() >= 8, kRead, ": ", path, ": expected at least 8 bytes, got ", file.size());
  const std::uint64_t length = little_endian(file.data());
  MT_CHECK(length <= file.size() - 8, kRead, ": ", path, ": expected a header of at most ",
           file.size() - 8, " bytes, which is the rest of the file, got a length of ", length);
  MT_CHECK(length <= kMaxHeader, kRead, ": ", path, ": expected a header of at most ", kMaxHeader,
           " bytes, got ", length);
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + 8, length);
  MT_CHECK(!header.empty() && header.front() == '{', kRead, ": ", path,
           ": expected a header that starts with '{', got ",
           header.empty() ? "an empty one" : "another byte; this is no safetensors file");
  return {header, file.subspan(8 + length)};
}

StringMap read_metadata(const std::string& path, const json& object) {
  MT_CHECK(object.is_object(), kRead, ": ", path, ": expected ", kMetadata,
           " to be an object, got ", object.type_name());
  StringMap metadata;
  for (const auto& [key, value] : object.items()) {
    MT_CHECK(value.is_string(), kRead, ": ", path, ": expected text for the metadata key '", key,
             "', got ", value.type_name());
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

SafetensorsEntry read_entry(const std::string& path, const std::string& name, const json& object,
                            std::span<const std::byte> data) {
  const Fields fields(detail::concat(kRead, ": ", path, ": tensor '", name, "': "), object,
                      {"dtype", "shape", "data_offsets"});
  SafetensorsEntry e{.name = name, .dtype = fields.dtype("dtype"), .shape = fields.shape("shape")};
  const std::vector<std::int64_t> range = fields.integers("data_offsets");
  MT_CHECK(range.size() == 2 && range[0] <= range[1], fields.where(),
           "expected data_offsets [begin, end] in order, got ", object["data_offsets"].dump());
  MT_CHECK(static_cast<std::size_t>(range[1]) <= data.size(), fields.where(),
           "expected data_offsets within the ", data.size(), " bytes after the header, got ",
           object["data_offsets"].dump());
  const std::int64_t bytes = e.shape.numel() * static_cast<std::int64_t>(size_of(e.dtype));
  MT_CHECK(range[1] - range[0] == bytes, fields.where(), "expected ", bytes, " bytes for ",
           format_name(e.dtype), " ", e.shape, ", got ", range[1] - range[0],
           " by its data_offsets");
  e.bytes = data.subspan(static_cast<std::size_t>(range[0]), static_cast<std::size_t>(bytes));
  return e;
}

}  // namespace

// ---- reading -----------------------------------------------------------------------------------

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(std::make_unique<MappedFile>(kRead, path)) {
  parse(file_->bytes());
}
SafetensorsFile::~SafetensorsFile() = default;

const std::string& SafetensorsFile::path() const { return file_->path(); }

void SafetensorsFile::parse(std::span<const std::byte> file) {
  const auto [text, data] = split_file(path(), file);
  const json header = parse_json(kRead, path(), text);
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadata)
      metadata_ = read_metadata(path(), value);
    else
      entries_.push_back(read_entry(path(), name, value, data));
  }
  std::stable_sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
  });
  std::size_t end = 0;
  for (const SafetensorsEntry& e : entries_) {
    const auto begin = static_cast<std::size_t>(e.bytes.data() - data.data());
    MT_CHECK(begin == end, kRead, ": ", path(), ": tensor '", e.name, "': expected to begin at ",
             end, ", where the one before ends, got ", begin,
             begin < end ? " (they overlap)" : " (a gap)");
    end += e.bytes.size();
  }
  MT_CHECK(end == data.size(), kRead, ": ", path(), ": expected ", end,
           " bytes of tensors after the header, got ", data.size(), " (trailing bytes)");
  for (std::size_t i = 0; i < entries_.size(); ++i) index_[entries_[i].name] = i;
  if (const auto tied = metadata_.extract(kTied)) read_ties(tied.mapped());
  if (const auto checksum = metadata_.extract(kChecksum)) checksum_ = checksum.mapped();
}

void SafetensorsFile::read_ties(const std::string& text) {
  const json ties = parse_json(kRead, path() + ": " + kTied, text);
  MT_CHECK(ties.is_object(), kRead, ": ", path(), ": expected ", kTied, " to be an object, got ",
           ties.type_name());
  for (const auto& [name, value] : ties.items()) {
    const Fields fields(detail::concat(kRead, ": ", path(), ": tied tensor '", name, "': "), value,
                        {"owner", "offset", "shape", "strides"});
    const SafetensorsEntry* owner = find(fields.text("owner"));
    MT_CHECK(owner && owner->owner < 0, fields.where(),
             "expected an owner with bytes in this file, got '", fields.text("owner"), "'");
    MT_CHECK(!contains(name), fields.where(), "expected no bytes of its own, got some");
    SafetensorsEntry e{.name = name,
                       .dtype = owner->dtype,
                       .shape = fields.shape("shape"),
                       .owner = static_cast<int>(owner - entries_.data()),
                       .offset = fields.integer("offset"),
                       .strides = Shape(fields.integers("strides"))};
    const std::int64_t room = owner->shape.numel();
    bool inside = e.strides.size() == e.shape.size() && e.shape.numel() > 0 && e.offset < room;
    std::int64_t last = e.offset;
    for (int d = 0; inside && d < e.shape.size(); ++d) {
      if (e.shape[d] == 1) continue;
      inside = e.strides[d] <= (room - 1 - last) / (e.shape[d] - 1);
      last += inside ? e.strides[d] * (e.shape[d] - 1) : 0;
    }
    MT_CHECK(inside, fields.where(), "expected a view within the ", room, " elements of '",
             owner->name, "', got offset ", e.offset, ", shape ", e.shape, ", strides ", e.strides);
    if (e.strides == contiguous_strides(e.shape)) {
      const std::size_t item = size_of(e.dtype);
      e.bytes = owner->bytes.subspan(static_cast<std::size_t>(e.offset) * item,
                                     static_cast<std::size_t>(e.shape.numel()) * item);
    }
    index_[name] = entries_.size();
    entries_.push_back(std::move(e));
  }
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsFile::at(const std::string& name) const {
  const SafetensorsEntry* e = find(name);
  MT_CHECK(e, kRead, ": ", path(), ": expected a tensor '", name, "' among ", entries_.size(),
           ", got none");
  return *e;
}

void SafetensorsFile::check_view(const SafetensorsEntry& e, Dtype dtype,
                                 std::size_t alignment) const {
  MT_CHECK(e.dtype == dtype, kRead, ": ", path(), ": view of tensor '", e.name, "': expected ",
           e.dtype, ", its dtype, got ", dtype);
  MT_CHECK(e.owner < 0 || !e.bytes.empty(), kRead, ": ", path(), ": view of tensor '", e.name,
           "': expected adjacent elements, got a strided view of '",
           entries_[static_cast<std::size_t>(e.owner)].name, "'; use tensor()");
  MT_CHECK(reinterpret_cast<std::uintptr_t>(e.bytes.data()) % alignment == 0, kRead, ": ", path(),
           ": view of tensor '", e.name, "': expected it aligned to ", alignment,
           " bytes in the file, got it unaligned; use tensor()");
}

Tensor SafetensorsFile::load(const SafetensorsEntry& e, Device device) const {
  if (e.dtype == Dtype::b8)
    for (const std::byte b : e.bytes)
      MT_CHECK(b <= std::byte{1}, kRead, ": ", path(), ": tensor '", e.name,
               "': expected bytes 0 and 1 for BOOL, got ", static_cast<int>(b));
  Tensor t = Tensor::empty(e.shape, e.dtype, device);
  if (!e.bytes.empty())
    copy_bytes(t.raw_data(), device, e.bytes.data(), Device::cpu(), e.bytes.size(),
               Stream::current(device));
  return t;
}

Tensor SafetensorsFile::tensor(const std::string& name, Device device) const {
  const SafetensorsEntry& e = at(name);
  if (e.owner < 0 || !e.bytes.empty()) return load(e, device);
  const NoGrad no_grad;
  const Tensor owner = load(entries_[static_cast<std::size_t>(e.owner)], device);
  return make_view(owner, e.shape, e.strides, e.offset).contiguous();
}

std::vector<nn::NamedTensor> SafetensorsFile::tensors(Device device) const {
  std::vector<nn::NamedTensor> all;
  for (const SafetensorsEntry& e : entries_) {
    if (e.owner < 0) {
      all.push_back({e.name, load(e, device)});
      continue;
    }
    const Tensor owner = all[static_cast<std::size_t>(e.owner)].tensor;
    const bool whole = e.shape == owner.shape() && e.strides == owner.strides();
    all.push_back({e.name, whole ? owner : make_view(owner, e.shape, e.strides, e.offset)});
  }
  return all;
}

bool SafetensorsFile::verify_checksum() const {
  if (checksum_.empty()) return false;
  const std::span<const std::byte> all = file_->bytes();
  const std::string_view text(reinterpret_cast<const char*>(all.data()), all.size());
  std::uint64_t length = 0;
  std::memcpy(&length, text.data(), sizeof length);
  const std::size_t at = checksum_position(text.substr(0, sizeof length + length), checksum_);
  Crc32 crc;
  crc.add(text.substr(0, at));
  crc.add(kNoChecksum);
  crc.add(text.substr(at + checksum_.size()));
  MT_CHECK(crc.hex() == checksum_, kRead, ": ", path(), ": expected bytes with CRC-32 ", checksum_,
           ", got ", crc.hex(), ": the file is damaged");
  return true;
}

}  // namespace mixtape::io
