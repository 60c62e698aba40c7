#include "io/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "engine/check.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "engine/op.h"
#include "io/file.h"
#include "io/json.h"

namespace mixtape::io {
namespace {

using nlohmann::json;

constexpr const char* kSave = "save_checkpoint";
constexpr const char* kLoad = "load_checkpoint";
constexpr const char* kKey = "mixtape.checkpoint";
constexpr int kVersion = 2;
constexpr std::string_view kPrefix = "checkpoint-", kSuffix = ".safetensors";
constexpr int kDigits = 12;

/// One part's tensors; names in the file are `prefix` and the part's own.
struct Part {
  std::string prefix;
  std::vector<nn::NamedTensor> tensors;
  std::function<void(const std::vector<nn::NamedTensor>&)> load;
};

void copy_values(const std::vector<nn::NamedTensor>& to, const std::vector<nn::NamedTensor>& from) {
  for (std::size_t i = 0; i < to.size(); ++i) Tensor(to[i].tensor).copy_(from[i].tensor);
}

std::vector<Part> parts_of(const Checkpoint& c) {
  std::vector<Part> parts;
  if (c.model)
    parts.push_back(
        {"model.", c.model->state_dict(), [&](const auto& t) { c.model->load_state_dict(t); }});
  for (std::size_t i = 0; i < c.optimizers.size(); ++i)
    parts.push_back({detail::concat("optimizer.", i, "."), c.optimizers[i]->state_dict(),
                     [&c, i](const auto& t) { c.optimizers[i]->load_state_dict(t); }});
  if (c.scaler)
    parts.push_back(
        {"scaler.", c.scaler->state_dict(), [&](const auto& t) { c.scaler->load_state_dict(t); }});
  if (!c.tensors.empty())
    parts.push_back({"tensor.", c.tensors, [&](const auto& t) { copy_values(c.tensors, t); }});
  return parts;
}

// ---- what is not a tensor ----------------------------------------------------------------------

std::vector<Device> generator_devices() {
  std::vector<Device> devices{Device::cpu()};
  for (int i = 0; i < cuda_device_count(); ++i) devices.push_back(Device::cuda(i));
  return devices;
}

json record_of(const Checkpoint& c) {
  json record = {{"version", kVersion}, {"step", c.step}, {"optimizers", c.optimizers.size()}};
  record["model"] = c.model != nullptr;
  record["scaler"] = c.scaler != nullptr;
  record["tensors"] = !c.tensors.empty();
  if (c.random) {
    for (const Device device : generator_devices()) {
      const PhiloxState state = random_state(device);
      record["random"][detail::concat(device)] = {{"seed", state.seed}, {"offset", state.offset}};
    }
  }
  if (c.loader) {
    const DataLoaderState s = c.loader->state();
    record["loader"] = {{"epoch", s.epoch},
                        {"position", s.position},
                        {"seed", s.seed},
                        {"dataset_size", s.dataset_size},
                        {"batch_size", s.batch_size}};
  }
  return record;
}

/// What the record of a file says.
struct Record {
  std::int64_t step = 0;
  std::size_t optimizers = 0;
  bool model = false, scaler = false, tensors = false, random = false;
  std::optional<DataLoaderState> loader = {};
  std::vector<std::pair<Device, PhiloxState>> generators = {};  // those that exist here
};

Record parse_record(const json& record) {
  Record r{.step = record.at("step"),
           .optimizers = record.at("optimizers"),
           .model = record.at("model"),
           .scaler = record.at("scaler"),
           .tensors = record.at("tensors"),
           .random = record.contains("random")};
  if (record.contains("loader")) {
    const json& s = record["loader"];
    r.loader = DataLoaderState{.epoch = s.at("epoch"),
                               .position = s.at("position"),
                               .seed = s.at("seed"),
                               .dataset_size = s.at("dataset_size"),
                               .batch_size = s.at("batch_size")};
  }
  if (!r.random) return r;
  for (const Device device : generator_devices()) {
    const std::string name = detail::concat(device);
    if (!record["random"].contains(name)) continue;
    const json& state = record["random"][name];
    r.generators.push_back({device, {.seed = state.at("seed"), .offset = state.at("offset")}});
  }
  return r;
}

Record read_record(const SafetensorsFile& file) {
  const auto text = file.metadata().find(kKey);
  MT_CHECK(text != file.metadata().end(), kLoad, ": ", file.path(),
           ": expected a checkpoint, got a safetensors file without the metadata key ", kKey);
  const json record = parse_json(kLoad, file.path() + ": " + kKey, text->second);
  try {
    MT_CHECK(record.at("version") == kVersion, kLoad, ": ", file.path(), ": expected version ",
             kVersion, ", got ", record.at("version").dump());
    return parse_record(record);
  } catch (const json::exception& e) {
    MT_THROW(kLoad, ": ", file.path(), ": ", kKey, ": ", e.what());
  }
}

/// Throws if the bytes are not those written.
void check_whole(const SafetensorsFile& file) {
  MT_CHECK(file.verify_checksum(), kLoad, ": ", file.path(),
           ": expected a checksum, got none: the file is damaged");
}

void check_holds_parts(const std::string& path, const Record& record, const Checkpoint& c) {
  const auto check = [&](bool wanted, bool has, const char* part) {
    MT_CHECK(!wanted || has, kLoad, ": ", path, ": expected it to hold ", part,
             ", got none; leave that part out to load the rest");
  };
  check(c.model != nullptr, record.model, "a model");
  check(c.scaler != nullptr, record.scaler, "a GradScaler");
  check(c.loader != nullptr, record.loader.has_value(), "a loader's position");
  check(c.random, record.random, "random generators");
  check(!c.tensors.empty(), record.tensors, "further tensors");
  MT_CHECK(c.optimizers.empty() || record.optimizers == c.optimizers.size(), kLoad, ": ", path,
           ": expected ", c.optimizers.size(), " optimizers, got ", record.optimizers);
}

// ---- tensors -----------------------------------------------------------------------------------

/// Adds a line for each tensor of `part` that the file lacks or holds otherwise, and for each that
/// only the file has.
void compare(const SafetensorsFile& file, const Part& part, std::ostream& faults) {
  std::set<std::string> expected;
  std::map<const TensorImpl*, const SafetensorsEntry*> seen;
  for (const nn::NamedTensor& n : part.tensors) {
    const std::string name = part.prefix + n.name;
    expected.insert(name);
    const SafetensorsEntry* e = file.find(name);
    const auto fault = [&](const auto&... got) {
      faults << "\n  " << name << ": expected " << n.tensor.dtype() << n.tensor.shape() << ", got ";
      (faults << ... << got);
    };
    if (!e) {
      fault("none");
    } else if (!(e->shape == n.tensor.shape()) || e->dtype != n.tensor.dtype()) {
      fault(e->dtype, e->shape);
    } else {
      if (e->dtype == Dtype::b8) (void)file.tensor(name);  // the one dtype with invalid bytes
      // One tensor by two names cannot take two values.
      const auto [first, fresh] = seen.emplace(n.tensor.impl().get(), e);
      if (!fresh && first->second->bytes.data() != e->bytes.data())
        fault("values of its own, but it is tied to ", first->second->name);
    }
  }
  for (const SafetensorsEntry& e : file.entries())
    if (e.name.starts_with(part.prefix) && !expected.contains(e.name))
      faults << "\n  " << e.name << ": expected none, got " << e.dtype << e.shape;
}

/// The part's tensors as the file has them.
std::vector<nn::NamedTensor> read_part(const SafetensorsFile& file, const Part& part) {
  std::vector<nn::NamedTensor> read;
  for (const nn::NamedTensor& n : part.tensors)
    read.push_back({n.name, file.tensor(part.prefix + n.name)});
  return read;
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const Checkpoint& checkpoint) {
  std::vector<nn::NamedTensor> tensors;
  for (Part& part : parts_of(checkpoint))
    for (nn::NamedTensor& n : part.tensors)
      tensors.push_back({part.prefix + n.name, std::move(n.tensor)});
  StringMap metadata = checkpoint.metadata;
  for (const auto& [key, value] : metadata)
    MT_CHECK(!key.starts_with("mixtape."), kSave,
             ": expected metadata keys that do not start with 'mixtape.', got '", key, "'");
  metadata[kKey] = record_of(checkpoint).dump();
  write_safetensors(path, tensors, metadata, {.checksum = true});
}

void load_checkpoint(const std::filesystem::path& path, Checkpoint& checkpoint) {
  const SafetensorsFile file(path);
  const Record record = read_record(file);
  check_holds_parts(file.path(), record, checkpoint);
  const std::vector<Part> parts = parts_of(checkpoint);
  std::ostringstream faults;
  for (const Part& part : parts) compare(file, part, faults);
  MT_CHECK(faults.str().empty(), kLoad, ": ", file.path(), ":", faults.str());
  check_whole(file);
  if (checkpoint.loader) checkpoint.loader->load_state(*record.loader);  // all or nothing

  const NoGrad no_grad;
  for (const Part& part : parts) part.load(read_part(file, part));
  if (checkpoint.random)
    for (const auto& [device, state] : record.generators) set_random_state(device, state);
  checkpoint.step = record.step;
  checkpoint.metadata = file.metadata();
  checkpoint.metadata.erase(kKey);
}

// ---- a directory of checkpoints ----------------------------------------------------------------

std::filesystem::path checkpoint_path(const std::filesystem::path& directory, std::int64_t step) {
  MT_CHECK(step >= 0, "checkpoint_path: expected a step of at least 0, got ", step);
  std::string digits = std::to_string(step);
  if (digits.size() < kDigits) digits.insert(0, kDigits - digits.size(), '0');
  return directory / detail::concat(kPrefix, digits, kSuffix);
}

std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& directory) {
  std::vector<std::pair<std::int64_t, std::filesystem::path>> found;
  std::error_code error;
  std::filesystem::directory_iterator at(directory, error);
  MT_CHECK(!error || error == std::errc::no_such_file_or_directory,
           "list_checkpoints: cannot read ", directory.string(), ": ", error.message());
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) continue;
    const char* end = name.data() + name.size() - kSuffix.size();
    std::int64_t step = 0;
    const auto [stop, fault] = std::from_chars(name.data() + kPrefix.size(), end, step);
    if (fault == std::errc() && stop == end) found.emplace_back(step, at->path());
  }
  std::sort(found.begin(), found.end());
  std::vector<std::filesystem::path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& directory) {
  const std::vector<std::filesystem::path> all = list_checkpoints(directory);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

WholeCheckpoint newest_whole_checkpoint(const std::filesystem::path& directory) {
  WholeCheckpoint found;
  std::vector<std::filesystem::path> all = list_checkpoints(directory);
  for (; !all.empty(); all.pop_back()) {
    try {
      const SafetensorsFile file(all.back());
      const Record record = read_record(file);
      check_whole(file);
      MT_CHECK(checkpoint_path(directory, record.step) == all.back(), kLoad, ": ", file.path(),
               ": expected the step of its name, got ", record.step);
      found.path = all.back();
      found.step = record.step;
      return found;
    } catch (const Error& e) {
      found.skipped.push_back({all.back(), e.what()});
    }
  }
  return found;
}

std::filesystem::path save_numbered_checkpoint(const std::filesystem::path& directory,
                                               const Checkpoint& checkpoint, KeepOptions options) {
  constexpr const char* kOp = "save_numbered_checkpoint";
  MT_CHECK(options.keep >= 0, kOp, ": expected keep to be at least 0, got ", options.keep);
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  MT_CHECK(!error, kOp, ": cannot make ", directory.string(), ": ", error.message());
  remove_stale_temporaries(directory, kPrefix);
  const std::filesystem::path path = checkpoint_path(directory, checkpoint.step);
  save_checkpoint(path, checkpoint);
  if (options.keep == 0) return path;
  std::vector<std::filesystem::path> all = list_checkpoints(directory);
  std::erase(all, path);  // never the one just written, whatever steps the others claim
  const auto keep = static_cast<std::size_t>(options.keep - 1);
  for (std::size_t i = 0; i + keep < all.size(); ++i) {
    std::filesystem::remove(all[i], error);
    MT_CHECK(!error, kOp, ": cannot remove ", all[i].string(), ": ", error.message());
  }
  return path;
}

}  // namespace mixtape::io
