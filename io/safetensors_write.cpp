// Writing safetensors files: names and ties are checked, then everything goes into one new file.
#include <algorithm>
#include <cstring>
#include <set>

#include "engine/check.h"
#include "engine/grad_mode.h"
#include "engine/op.h"
#include "io/checksum.h"
#include "io/file.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "io/safetensors_format.h"
#include "io/tied_tensors.h"
#include "ops/ops.h"

namespace mixtape::io {
namespace {

using nlohmann::json;
constexpr const char* kWrite = "write_safetensors";

void check_names(const std::vector<nn::NamedTensor>& tensors, const StringMap& metadata) {
  std::set<std::string> names;
  for (const nn::NamedTensor& n : tensors) {
    MT_CHECK(!n.name.empty() && n.name != kMetadata, kWrite,
             ": expected a name that is not empty or ", kMetadata, ", got '", n.name, "'");
    MT_CHECK(n.tensor.defined(), kWrite, ": expected a tensor for '", n.name,
             "', got an undefined one");
    MT_CHECK(names.insert(n.name).second, kWrite, ": expected each name once, got '", n.name,
             "' twice");
  }
  for (const char* key : {kTied, kChecksum})
    MT_CHECK(!metadata.contains(key), kWrite, ": expected metadata without the key '", key,
             "', which is reserved");
}

json list_of(const Shape& s) { return std::vector<std::int64_t>(s.begin(), s.end()); }

std::uint64_t bytes_of(const Tensor& t) {
  return static_cast<std::uint64_t>(t.numel()) * size_of(t.dtype());
}

/// Eight bytes of length and the JSON, padded with spaces so that the tensors start aligned.
std::string header_of(const std::vector<nn::NamedTensor>& tensors,
                      const std::vector<std::size_t>& order, const std::vector<Tie>& ties,
                      const StringMap& metadata, bool checksum) {
  json header = json::object(), tied = json::object();
  std::uint64_t at = 0;
  for (const std::size_t i : order) {
    const Tensor& t = tensors[i].tensor;
    header[tensors[i].name] = {{"dtype", format_name(t.dtype())},
                               {"shape", list_of(t.shape())},
                               {"data_offsets", {at, at + bytes_of(t)}}};
    at += bytes_of(t);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (ties[i].owner < 0) continue;
    tied[tensors[i].name] = {{"owner", tensors[static_cast<std::size_t>(ties[i].owner)].name},
                             {"offset", ties[i].offset},
                             {"shape", list_of(tensors[i].tensor.shape())},
                             {"strides", list_of(ties[i].strides)}};
  }
  for (const auto& [key, value] : metadata) header[kMetadata][key] = value;
  if (!tied.empty()) header[kMetadata][kTied] = tied.dump();
  if (checksum) header[kMetadata][kChecksum] = kNoChecksum;
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& e) {
    MT_THROW(kWrite, ": expected names and metadata in UTF-8: ", e.what());
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  MT_CHECK(text.size() <= kMaxHeader, kWrite, ": expected a header of at most ", kMaxHeader,
           " bytes, got ", text.size());
  const auto length = static_cast<std::uint64_t>(text.size());
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + text;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path,
                       const std::vector<nn::NamedTensor>& tensors, const StringMap& metadata,
                       SafetensorsOptions options) {
  const NoGrad no_grad;
  check_names(tensors, metadata);
  const std::vector<Tie> ties = find_ties(kWrite, tensors);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (ties[i].owner < 0) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(tensors[a].tensor.dtype()) > size_of(tensors[b].tensor.dtype());
  });
  const std::string header = header_of(tensors, order, ties, metadata, options.checksum);
  AtomicFile file(kWrite, path);
  Crc32 crc;
  const auto write = [&](std::string_view bytes) {
    file.write(bytes);
    if (options.checksum) crc.add(bytes);
  };
  write(header);
  for (const std::size_t i : order) {
    const Tensor dense = tensors[i].tensor.detach().cpu().contiguous();
    if (dense.numel() > 0) write({static_cast<const char*>(dense.raw_data()), bytes_of(dense)});
  }
  if (options.checksum) file.overwrite(checksum_position(header, kNoChecksum), crc.hex());
  file.commit();
}

}  // namespace mixtape::io
