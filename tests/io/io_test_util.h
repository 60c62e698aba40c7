// Shared by the io tests: a directory that goes away with the test, whole-file reads and writes,
// and an assertion that a call throws mixtape::Error with all of some fragments in its text.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>

#include "engine/check.h"

namespace mixtape::testing {

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "mixtape_io_XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("mkdtemp failed for " + name);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void spew(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

template <class F>
::testing::AssertionResult throws_error(F&& f, std::initializer_list<std::string_view> fragments) {
  try {
    f();
  } catch (const Error& e) {
    const std::string_view what = e.what();
    for (const std::string_view fragment : fragments)
      if (what.find(fragment) == what.npos)
        return ::testing::AssertionFailure()
               << "expected \"" << fragment << "\" in the error's text, got: " << what;
    return ::testing::AssertionSuccess();
  } catch (const std::exception& e) {
    return ::testing::AssertionFailure() << "expected mixtape::Error, got: " << e.what();
  }
  return ::testing::AssertionFailure() << "expected mixtape::Error, got no exception";
}

}  // namespace mixtape::testing
