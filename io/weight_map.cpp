#include "io/weight_map.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <sstream>

#include "engine/check.h"
#include "engine/grad_mode.h"
#include "ops/ops.h"

namespace mixtape::io {
namespace {

constexpr const char* kLoad = "load_weights";
constexpr int kMaxFaults = 20;

std::vector<std::string> path_of(const std::string& name) {
  std::vector<std::string> path;
  std::istringstream in(name);
  for (std::string part; std::getline(in, part, '.');) path.push_back(part);
  return path;
}

std::int64_t stars_in(const std::string& pattern) {
  const std::vector<std::string> path = path_of(pattern);
  return std::count(path.begin(), path.end(), "*");
}

/// What the pattern's stars stand for in `name`, if it matches.
std::optional<std::vector<std::string>> match(const std::string& pattern, const std::string& name) {
  const std::vector<std::string> want = path_of(pattern), got = path_of(name);
  if (want.size() != got.size()) return std::nullopt;
  std::vector<std::string> stars;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (want[i] == "*")
      stars.push_back(got[i]);
    else if (want[i] != got[i])
      return std::nullopt;
  }
  return stars;
}

std::string filled(const std::string& pattern, const std::vector<std::string>& stars) {
  std::string name;
  std::size_t next = 0;
  for (const std::string& part : path_of(pattern)) {
    if (!name.empty()) name += '.';
    name += part == "*" ? stars[next++] : part;
  }
  return name;
}

/// The part's rows of the model's tensor, as the file has them.
Tensor view_of(const Tensor& own, const WeightPart& part) {
  const Tensor rows = own.dim() == 0
                          ? own.detach()
                          : own.detach().slice(0, part.first_row, part.first_row + part.rows);
  return part.transposed ? rows.t() : rows;
}

}  // namespace

// ---- rules -------------------------------------------------------------------------------------

WeightMap& WeightMap::add(Rule rule) {
  for (const Piece& piece : rule.pieces)
    MT_CHECK(stars_in(piece.theirs) == stars_in(rule.own), "WeightMap: expected as many '*' in '",
             piece.theirs, "' as in '", rule.own, "'");
  rules_.push_back(std::move(rule));
  return *this;
}
WeightMap& WeightMap::rename(const std::string& own, const std::string& theirs) {
  return add({own, {{theirs, 0}}, false});
}
WeightMap& WeightMap::transpose(const std::string& own, const std::string& theirs) {
  return add({own, {{theirs, 0}}, true});
}
WeightMap& WeightMap::split(const std::string& own, const std::vector<Piece>& pieces) {
  MT_CHECK(!pieces.empty(), "WeightMap: expected at least one piece of '", own, "', got none");
  for (const Piece& piece : pieces)
    MT_CHECK(piece.rows > 0, "WeightMap: expected at least one row in the piece '", piece.theirs,
             "', got ", piece.rows);
  return add({own, pieces, false});
}
WeightMap& WeightMap::tied(const std::string& theirs, const std::string& as) {
  tied_.emplace_back(theirs, as);
  return *this;
}
WeightMap& WeightMap::ignore(const std::string& theirs) {
  ignored_.push_back(theirs);
  return *this;
}
WeightMap& WeightMap::optional_prefix(const std::string& prefix) {
  prefix_ = prefix;
  return *this;
}

std::vector<WeightPart> WeightMap::parts(const std::string& own, const Shape& shape) const {
  const std::int64_t rows = shape.size() == 0 ? 1 : shape[0];
  for (const Rule& rule : rules_) {
    const auto stars = match(rule.own, own);
    if (!stars) continue;
    MT_CHECK(!rule.transposed || shape.size() == 2,
             "WeightMap: expected a matrix to transpose for '", own, "', got ", shape);
    std::vector<WeightPart> parts;
    std::int64_t first = 0;
    for (const Piece& piece : rule.pieces) {
      const std::int64_t n = piece.rows == 0 ? rows : piece.rows;
      parts.push_back({filled(piece.theirs, *stars), first, n, rule.transposed});
      first += n;
    }
    MT_CHECK(first == rows, "WeightMap: expected pieces of ", rows, " rows together for '", own,
             "', got ", first);
    return parts;
  }
  return {{own, 0, rows, false}};
}

// ---- reading -----------------------------------------------------------------------------------

/// One load_weights: looks everything up, and copies once nothing is wrong.
class WeightLoader {
 public:
  WeightLoader(const std::filesystem::path& path, const WeightMap& map)
      : file_(path), map_(map), names_(file_.names()) {
    has_prefix_ = std::any_of(names_.begin(), names_.end(),
                              [&](const std::string& n) { return n.starts_with(map.prefix_); });
  }

  void look_up(const nn::NamedTensor& own) {
    for (const WeightPart& part : map_.parts(own.name, own.tensor.shape())) {
      const std::string name = in_file(part.name);
      used_.insert(name);
      const Tensor to = view_of(own.tensor, part);
      const SafetensorsEntry* e = file_.find(name);
      if (e == nullptr)
        fault("missing: ", name, " ", to.dtype(), to.shape());
      else if (!(e->shape == to.shape()) || !is_floating(e->dtype) != !is_floating(to.dtype()))
        fault(name, ": expected ", to.dtype(), to.shape(), ", got ", e->dtype, e->shape);
      else
        copies_.push_back({to, name});
    }
  }
  void look_for_others() {
    for (const std::string& name : names_) {
      if (used_.contains(name) || ignored(name)) continue;
      if (const std::string owner = owner_of(name); owner.empty())
        fault("unexpected: ", name, " ", file_.find(name)->dtype, file_.find(name)->shape);
      else if (!same_bytes(name, owner))
        fault(name, ": expected the values of ", owner, ", to which it is tied, got others");
    }
  }
  void finish() const {
    MT_CHECK(fault_count_ == 0, kLoad, ": ", file_.path(), ":", faults_.str(),
             fault_count_ > kMaxFaults
                 ? detail::concat("\n  and ", fault_count_ - kMaxFaults, " more")
                 : "");
    for (const auto& [to, name] : copies_) Tensor(to).copy_(file_.tensor(name));
  }

 private:
  template <class... Parts>
  void fault(const Parts&... parts) {
    if (++fault_count_ <= kMaxFaults) ((faults_ << "\n  ") << ... << parts);
  }
  std::string in_file(const std::string& name) const {
    return has_prefix_ || !name.starts_with(map_.prefix_) ? name : name.substr(map_.prefix_.size());
  }
  bool ignored(const std::string& name) const {
    return std::any_of(map_.ignored_.begin(), map_.ignored_.end(), [&](const std::string& pattern) {
      return match(in_file(pattern), name).has_value();
    });
  }
  /// The file's tensor that `name` is tied to; empty if it is not.
  std::string owner_of(const std::string& name) const {
    for (const auto& [theirs, as] : map_.tied_)
      if (in_file(theirs) == name) return in_file(as);
    return {};
  }
  bool same_bytes(const std::string& a, const std::string& b) const {
    const SafetensorsEntry *x = file_.find(a), *y = file_.find(b);
    return y != nullptr && x->dtype == y->dtype && x->shape == y->shape &&
           x->bytes.size() == y->bytes.size() &&
           (x->bytes.empty() ||
            std::memcmp(x->bytes.data(), y->bytes.data(), x->bytes.size()) == 0);
  }

  const ShardedSafetensors file_;
  const WeightMap& map_;
  const std::vector<std::string> names_;
  bool has_prefix_ = true;
  std::set<std::string> used_;
  std::vector<std::pair<Tensor, std::string>> copies_;
  std::ostringstream faults_;
  int fault_count_ = 0;
};

void load_weights(const std::filesystem::path& path, nn::ModuleBase& model, const WeightMap& map) {
  const NoGrad no_grad;
  WeightLoader loader(path, map);
  for (const nn::NamedTensor& own : model.state_dict()) loader.look_up(own);
  loader.look_for_others();
  loader.finish();
}

// ---- writing -----------------------------------------------------------------------------------

std::vector<nn::NamedTensor> mapped_weights(const nn::ModuleBase& model, const WeightMap& map) {
  const NoGrad no_grad;
  std::vector<nn::NamedTensor> all;
  for (const nn::NamedTensor& own : model.state_dict())
    for (const WeightPart& part : map.parts(own.name, own.tensor.shape()))
      all.push_back({part.name, view_of(own.tensor, part)});
  return all;
}

void save_weights(const std::filesystem::path& path, const nn::ModuleBase& model,
                  const WeightMap& map, const StringMap& metadata) {
  write_safetensors(path, mapped_weights(model, map), metadata);
}

}  // namespace mixtape::io
