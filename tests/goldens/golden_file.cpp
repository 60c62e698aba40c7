#include "tests/goldens/golden_file.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

namespace mixtape::testing {
namespace {

Dtype dtype_named(const std::string& name) {
  const std::pair<const char*, Dtype> names[] = {{"f32", Dtype::f32},   {"f16", Dtype::f16},
                                                 {"bf16", Dtype::bf16}, {"f64", Dtype::f64},
                                                 {"i64", Dtype::i64},   {"b8", Dtype::b8}};
  for (const auto& [n, dtype] : names) {
    if (name == n) return dtype;
  }
  MT_THROW("read_golden: expected a dtype, got '", name, "'");
}

/// `array NAME DTYPE RANK SIZE... AT`, after its first word.
std::pair<std::string, StoredArray> read_array(std::istream& line, const std::string& data) {
  std::string name, dtype;
  int rank = 0;
  std::int64_t at = 0;
  StoredArray a;
  line >> name >> dtype >> rank;
  for (int i = 0; i < rank && line; ++i) {
    std::int64_t size = 0;
    line >> size;
    a.shape.push_back(size);
  }
  line >> at;
  MT_CHECK(line, "read_golden: expected 'array NAME DTYPE RANK SIZE... AT', got a line cut short");
  a.dtype = dtype_named(dtype);
  const auto n = static_cast<std::size_t>(a.shape.numel());
  MT_CHECK(at >= 0 && static_cast<std::size_t>(at) + n * size_of(a.dtype) <= data.size(),
           "read_golden: expected ", name, " within ", data.size(), " bytes of data, got offset ",
           at, " and ", n, " elements");
  a.values.resize(n);
  dispatch_dtype(a.dtype, [&]<class T>(TypeTag<T>) {
    for (std::size_t i = 0; i < n; ++i) {
      T value;
      std::memcpy(&value, data.data() + at + static_cast<std::int64_t>(i * sizeof(T)), sizeof(T));
      if constexpr (sizeof(T) == 2)
        a.values[i] = static_cast<double>(static_cast<float>(value));
      else
        a.values[i] = static_cast<double>(value);
    }
  });
  return {name, a};
}

template <class Map>
const auto& find(const Map& map, const std::string& key, const GoldenCase& c) {
  const auto found = map.find(key);
  MT_CHECK(found != map.end(), "golden case ", c.name, ": expected '", key, "', got none");
  return found->second;
}

}  // namespace

const StoredArray& GoldenCase::array(const std::string& key) const {
  return find(arrays, key, *this);
}
const std::string& GoldenCase::word(const std::string& attr) const {
  const std::vector<std::string>& words = find(attrs, attr, *this);
  MT_CHECK_EQ(words.size(), std::size_t{1}, "golden case ", name, ": words of '", attr, "'");
  return words[0];
}
double GoldenCase::number(const std::string& attr) const { return std::stod(word(attr)); }
std::int64_t GoldenCase::integer(const std::string& attr) const { return std::stoll(word(attr)); }
Shape GoldenCase::list(const std::string& attr) const {
  Shape values;
  for (const std::string& w : find(attrs, attr, *this)) values.push_back(std::stoll(w));
  return values;
}

std::string goldens_folder() {
  const char* chosen = std::getenv("MIXTAPE_GOLDENS");
  return chosen == nullptr ? MIXTAPE_GOLDENS_FOLDER : chosen;
}

GoldenFile read_golden(const std::string& op) {
  const std::string path = goldens_folder() + "/" + op + ".golden";
  std::ifstream in(path, std::ios::binary);
  MT_CHECK(in, "read_golden: expected a golden of ", op, " at ", path,
           ", got none; make_goldens.py writes it");
  const std::string content((std::istreambuf_iterator<char>(in)), {});
  const std::string end_of_header = "\ndata\n";
  const std::size_t header = content.find(end_of_header);
  MT_CHECK(header != std::string::npos, "read_golden: expected a line 'data' in ", path,
           ", got none");
  const std::string data = content.substr(header + end_of_header.size());

  GoldenFile file;
  file.bytes = content.size();
  std::istringstream lines(content.substr(0, header));
  std::string text;
  std::getline(lines, text);
  MT_CHECK_EQ(text, "mixtape-golden 1", "read_golden: first line of ", path);
  while (std::getline(lines, text)) {
    std::istringstream line(text);
    std::string kind, name;
    line >> kind;
    const bool in_case = kind == "attr" || kind == "array";
    MT_CHECK(!in_case || !file.cases.empty(), "read_golden: expected a case before '", text, "'");
    if (kind == "op") {
      line >> file.op;
    } else if (kind == "torch") {
      line >> file.torch;
    } else if (kind == "device") {
      std::getline(line >> std::ws, file.device);
    } else if (kind == "case") {
      file.cases.emplace_back();
      line >> file.cases.back().name;
    } else if (kind == "attr") {
      line >> name;
      file.cases.back().attrs[name] = {std::istream_iterator<std::string>(line), {}};
    } else if (kind == "array") {
      file.cases.back().arrays.insert(read_array(line, data));
    } else {
      MT_THROW("read_golden: expected op, torch, device, case, attr or array, got '", text, "'");
    }
  }
  MT_CHECK_EQ(file.op, op, "read_golden: op named in ", path);
  return file;
}

}  // namespace mixtape::testing
