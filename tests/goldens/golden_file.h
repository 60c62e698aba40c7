// One op's PyTorch results, as make_goldens.py wrote them (the format is described there).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/dtype.h"
#include "engine/shape.h"

namespace mixtape::testing {

/// An array with its values widened to double, which holds every stored dtype exactly (int64 below
/// 2^53).
struct StoredArray {
  Dtype dtype = Dtype::f32;
  Shape shape;
  std::vector<double> values;
};

struct GoldenCase {
  std::string name;
  std::map<std::string, std::vector<std::string>> attrs;
  std::map<std::string, StoredArray> arrays;

  bool has(const std::string& array) const { return arrays.count(array) != 0; }
  bool has_attr(const std::string& attr) const { return attrs.count(attr) != 0; }
  const StoredArray& array(const std::string& name) const;
  // Attributes: one word, one number, or a list of integers.
  const std::string& word(const std::string& attr) const;
  double number(const std::string& attr) const;
  std::int64_t integer(const std::string& attr) const;
  Shape list(const std::string& attr) const;
};

struct GoldenFile {
  std::string op, torch, device;
  std::size_t bytes = 0;
  std::vector<GoldenCase> cases;
};

/// The folder of the files: MIXTAPE_GOLDENS, else the one beside this source.
std::string goldens_folder();
/// Throws mixtape::Error on a missing or malformed file.
GoldenFile read_golden(const std::string& op);

}  // namespace mixtape::testing
