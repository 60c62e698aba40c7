#include "io/sharded_safetensors.h"

#include <set>

#include "engine/check.h"
#include "io/json.h"
#include "io/mapped_file.h"

namespace mixtape::io {
namespace {

constexpr const char* kOp = "ShardedSafetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kSingle = "model.safetensors";

std::filesystem::path file_to_open(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return path;
  for (const char* name : {kIndex, kSingle})
    if (std::filesystem::exists(path / name)) return path / name;
  MT_THROW(kOp, ": ", path.string(), ": expected a folder with ", kIndex, " or ", kSingle,
           ", got neither");
}

/// The index's map from names of tensors to names of files.
std::map<std::string, std::string> read_index(const std::string& path) {
  const MappedFile file(kOp, path);
  const std::span<const std::byte> bytes = file.bytes();
  const nlohmann::json index =
      parse_json(kOp, path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  MT_CHECK(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object() &&
               !index["weight_map"].empty(),
           kOp, ": ", path, ": expected an object 'weight_map' of names and files");
  std::map<std::string, std::string> listed;
  for (const auto& [name, value] : index["weight_map"].items()) {
    MT_CHECK(value.is_string(), kOp, ": ", path, ": expected the name of a file for '", name,
             "', got ", value.type_name());
    const auto shard = value.get<std::string>();
    MT_CHECK(!shard.empty() && shard != "." && shard != ".." &&
                 shard.find_first_of("/\\") == std::string::npos,
             kOp, ": ", path, ": expected a file beside the index for '", name, "', got '", shard,
             "'");
    listed[name] = shard;
  }
  return listed;
}

}  // namespace

ShardedSafetensors::ShardedSafetensors(const std::filesystem::path& path)
    : path_(file_to_open(path).string()) {
  if (path_.ends_with(".json")) {
    open_index();
    return;
  }
  const SafetensorsFile& file =
      *files_.emplace_back(std::make_unique<SafetensorsFile>(std::filesystem::path(path_)));
  for (const SafetensorsEntry& e : file.entries()) file_of_[e.name] = &file;
}

void ShardedSafetensors::open_index() {
  const std::map<std::string, std::string> listed = read_index(path_);
  std::set<std::string> shards;
  for (const auto& [name, shard] : listed) shards.insert(shard);
  for (const std::string& shard : shards) open_shard(shard, listed);
  for (const auto& [name, shard] : listed)
    MT_CHECK(file_of_.contains(name), kOp, ": ", path_, ": expected '", name, "' in ", shard,
             ", where the index says it is, got a file without it");
}

void ShardedSafetensors::open_shard(const std::string& shard,
                                    const std::map<std::string, std::string>& listed) {
  const SafetensorsFile& file = *files_.emplace_back(
      std::make_unique<SafetensorsFile>(std::filesystem::path(path_).parent_path() / shard));
  for (const SafetensorsEntry& e : file.entries()) {
    const auto entry = listed.find(e.name);
    MT_CHECK(entry != listed.end() && entry->second == shard, kOp, ": ", path_,
             ": expected the index to list '", e.name, "' in ", shard, ", which holds it, got ",
             entry == listed.end() ? "no entry" : entry->second);
    file_of_[e.name] = &file;
  }
}

std::vector<std::string> ShardedSafetensors::names() const {
  std::vector<std::string> all;
  for (const auto& [name, file] : file_of_) all.push_back(name);
  return all;
}

const SafetensorsEntry* ShardedSafetensors::find(const std::string& name) const {
  const auto found = file_of_.find(name);
  return found == file_of_.end() ? nullptr : found->second->find(name);
}

Tensor ShardedSafetensors::tensor(const std::string& name, Device device) const {
  const auto found = file_of_.find(name);
  MT_CHECK(found != file_of_.end(), kOp, ": ", path_, ": expected a tensor '", name, "', got none");
  return found->second->tensor(name, device);
}

}  // namespace mixtape::io
