#include "kernels/cuda/algorithm_cache.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "engine/check.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr std::uint32_t kMagic = 0x31474C41;  // "ALG1"

struct Header {
  std::uint32_t magic, key_bytes, value_bytes, checksum;
};

/// FNV-1a.
std::uint32_t checksum_of(std::string_view bytes) {
  std::uint32_t h = 2166136261u;
  for (const char c : bytes) h = (h ^ static_cast<unsigned char>(c)) * 16777619u;
  return h;
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// The record at `at`, or false at the end or where the file is damaged.
bool read_record(std::string_view file, std::size_t at, Header& header) {
  if (file.size() - at < sizeof(Header)) return false;
  std::memcpy(&header, file.data() + at, sizeof(header));
  const std::size_t body = std::size_t{header.key_bytes} + header.value_bytes;
  if (header.magic != kMagic || file.size() - at - sizeof(Header) < body) return false;
  return checksum_of(file.substr(at + sizeof(Header), body)) == header.checksum;
}

std::filesystem::path directory() {
  const auto get = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (const std::string own = get("MIXTAPE_ALGORITHM_CACHE"); !own.empty())
    return own == "0" ? std::filesystem::path() : std::filesystem::path(own);
  if (const std::string cache = get("XDG_CACHE_HOME"); !cache.empty())
    return std::filesystem::path(cache) / "mixtape";
  const std::string home = get("HOME");
  return home.empty() ? std::filesystem::path() : std::filesystem::path(home) / ".cache/mixtape";
}

std::string file_name(int device, const std::string& library) {
  cudaDeviceProp properties{};
  int driver = 0;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::string name =
      detail::concat(properties.name, "-driver", driver, "-", library, ".algorithms");
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '.') c = '_';
  }
  return name;
}

}  // namespace

AlgorithmCache::AlgorithmCache(int device, std::string library)
    : device_(device), library_(std::move(library)) {}

void AlgorithmCache::load() {
  if (loaded_) return;
  loaded_ = true;
  const std::filesystem::path where = directory();
  const std::string name = where.empty() ? std::string() : file_name(device_, library_);
  if (name.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(where, ignored);
  file_ = (where / name).string();
  std::ifstream in(file_, std::ios::binary);
  const std::string records(std::istreambuf_iterator<char>(in), {});
  std::size_t at = 0;
  for (Header h; read_record(records, at, h);) {
    at += sizeof(Header);
    values_[records.substr(at, h.key_bytes)] = records.substr(at + h.key_bytes, h.value_bytes);
    at += std::size_t{h.key_bytes} + h.value_bytes;
  }
}

bool AlgorithmCache::find(std::span<const std::byte> key, std::span<std::byte> value) {
  load();
  const auto known = values_.find(std::string(text_of(key)));
  if (known == values_.end() || known->second.size() != value.size()) return false;
  std::memcpy(value.data(), known->second.data(), value.size());
  return true;
}

void AlgorithmCache::store(std::span<const std::byte> key, std::span<const std::byte> value) {
  load();
  if (file_.empty()) return;
  std::string record(sizeof(Header), '\0');
  record += text_of(key);
  record += text_of(value);
  const Header header{kMagic, static_cast<std::uint32_t>(key.size()),
                      static_cast<std::uint32_t>(value.size()),
                      checksum_of(std::string_view(record).substr(sizeof(Header)))};
  std::memcpy(record.data(), &header, sizeof(header));
  values_[std::string(text_of(key))] = text_of(value);
  const int file = open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;
  [[maybe_unused]] const auto written = write(file, record.data(), record.size());
  close(file);
}

}  // namespace mixtape::kernels::cuda
