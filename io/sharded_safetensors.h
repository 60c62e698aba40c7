// The tensors of a model in one safetensors file or in several: large models are published as
// shards beside an index, model.safetensors.index.json, which says which file holds which name.
//
//   const io::ShardedSafetensors weights("Llama-2-7b/");
//   Tensor w = weights.tensor("model.embed_tokens.weight");
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace mixtape::io {

class ShardedSafetensors {
 public:
  /// `path`: a .safetensors file, an index (.json), or a folder with model.safetensors.index.json
  /// or model.safetensors. Files are mapped, not read. Throws mixtape::Error as SafetensorsFile
  /// does, and if the index is not what it should be, names a file that is not beside it, or does
  /// not list exactly the tensors that its files hold.
  explicit ShardedSafetensors(const std::filesystem::path& path);

  /// All names, sorted.
  std::vector<std::string> names() const;
  /// Null if there is no such tensor.
  const SafetensorsEntry* find(const std::string& name) const;
  /// A copy. Throws if there is no such tensor.
  Tensor tensor(const std::string& name, Device device = {}) const;
  /// The file or the index that was opened.
  const std::string& path() const { return path_; }
  std::size_t file_count() const { return files_.size(); }

 private:
  void open_index();
  void open_shard(const std::string& file, const std::map<std::string, std::string>& listed);

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*> file_of_;
};

}  // namespace mixtape::io
