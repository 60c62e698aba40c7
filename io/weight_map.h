// Between a model's own names and layouts and those of somebody else's files: parameters that are
// called otherwise, stored transposed, or kept in several pieces where the model packs them.
//
//   const io::WeightMap map =
//       io::WeightMap()
//           .rename("ln_f.*", "transformer.ln_f.*")
//           .transpose("h.*.mlp.c_fc.weight", "transformer.h.*.mlp.c_fc.weight")
//           .split("h.*.qkv.weight", {{"h.*.q.weight", 512}, {"h.*.k.weight", 128}, ..});
//   io::load_weights("model.safetensors", net, map);
//   io::save_weights("trained.safetensors", net, map);
//
// In a pattern, '*' is one part of the dotted path, such as a layer's number; both sides have the
// same number of them, and they stand for the same parts in the same order. The first rule that
// matches a name counts; a name that none matches is the same on both sides.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "io/sharded_safetensors.h"
#include "nn/module.h"

namespace mixtape::io {

/// A tensor of a file, as a part of one of the model's.
struct WeightPart {
  std::string name;              // there
  std::int64_t first_row, rows;  // here, along dimension 0
  bool transposed = false;       // (in, out) there
};

class WeightMap {
 public:
  /// A piece of a split tensor: its pattern, and how many of the rows it has.
  struct Piece {
    std::string theirs;
    std::int64_t rows;
  };

  /// The same values by another name.
  WeightMap& rename(const std::string& own, const std::string& theirs);
  /// A matrix (out, in) here that is (in, out) there.
  WeightMap& transpose(const std::string& own, const std::string& theirs);
  /// Here one tensor, there several: its rows one piece after the other.
  WeightMap& split(const std::string& own, const std::vector<Piece>& pieces);
  /// A file may hold `theirs` as well, with the values of the file's `as`, the one that counts; it
  /// is not written.
  WeightMap& tied(const std::string& theirs, const std::string& as);
  /// A file may hold `theirs`; it is not read and not written.
  WeightMap& ignore(const std::string& theirs);
  /// Files in which no name starts with `prefix` have the same names without it.
  WeightMap& optional_prefix(const std::string& prefix);

  /// Where the values of the model's tensor `own` are in a file. Throws if a split's rows do not
  /// add up to the tensor's, and if a tensor to transpose is no matrix.
  std::vector<WeightPart> parts(const std::string& own, const Shape& shape) const;

 private:
  friend class WeightLoader;
  struct Rule {
    std::string own;
    std::vector<Piece> pieces;
    bool transposed;
  };
  WeightMap& add(Rule rule);
  std::vector<Rule> rules_;
  std::vector<std::pair<std::string, std::string>> tied_;
  std::vector<std::string> ignored_;
  std::string prefix_;
};

/// Copies the values of all parameters and buffers from `path` (see ShardedSafetensors), converting
/// device and floating dtype, tensor by tensor. Throws, before anything is changed, with a list of
/// what is missing, unexpected, or of another shape.
void load_weights(const std::filesystem::path& path, nn::ModuleBase& model,
                  const WeightMap& map = {});

/// The model's parameters and buffers as a file has them: views of the model's memory.
std::vector<nn::NamedTensor> mapped_weights(const nn::ModuleBase& model, const WeightMap& map);
/// write_safetensors() of mapped_weights(). "format": "pt" is what PyTorch's readers ask for.
void save_weights(const std::filesystem::path& path, const nn::ModuleBase& model,
                  const WeightMap& map = {}, const StringMap& metadata = {{"format", "pt"}});

}  // namespace mixtape::io
