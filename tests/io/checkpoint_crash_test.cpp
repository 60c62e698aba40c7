// A save that is killed, runs out of room or may not grow the file at any byte leaves the
// checkpoint before it whole, and no temporary file for longer than until the next save. CASES 106.
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <random>
#include <thread>

#include "io/checkpoint.h"
#include "io/file.h"
#include "ops/ops.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::slurp;
using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

constexpr int kTimes = 50;
constexpr std::int64_t kNumel = 1 << 16;

/// Four tensors whose every value is the step's number: a mixture of two saves would show.
struct State {
  std::vector<nn::NamedTensor> tensors;
  State() {
    for (const char* name : {"a", "b", "c", "d"}) tensors.push_back({name, zeros({kNumel})});
  }
  // On the calling thread only: a forked child has no pool of threads.
  void set(std::int64_t step) {
    for (const nn::NamedTensor& n : tensors)
      std::ranges::fill(n.tensor.data<float>(), static_cast<float>(step));
  }
  void save(const std::filesystem::path& path, std::int64_t step) {
    set(step);
    save_checkpoint(path, {.tensors = tensors, .step = step});
  }
  /// The step of a checkpoint that is whole.
  std::int64_t load(const std::filesystem::path& path) {
    Checkpoint c{.tensors = tensors};
    load_checkpoint(path, c);
    for (const nn::NamedTensor& n : tensors)
      EXPECT_TRUE(std::ranges::all_of(n.tensor.data<float>(),
                                      [&](float v) { return v == static_cast<float>(c.step); }))
          << n.name << " at step " << c.step;
    return c.step;
  }
};

std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

pid_t start_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = work();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "child: %s\n", e.what());
    }
    ::_exit(code);
  }
  return child;
}

int wait_for(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

void limit_file_size(rlim_t bytes) {
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
  const rlimit limit{bytes, RLIM_INFINITY};
  if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(98);
}

TEST(CheckpointCrash, KilledAtAnyTime) {
  const TempDir dir;
  State state;
  state.save(dir / "c", 0);
  std::mt19937 random(1);
  std::int64_t last = 0;
  for (int i = 0; i < kTimes; ++i) {
    const pid_t child = start_child([&]() -> int {
      for (std::int64_t step = last + 1;; ++step) state.save(dir / "c", step);
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    const int status = wait_for(child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    const std::int64_t step = state.load(dir / "c");
    EXPECT_GE(step, last);
    last = step;
  }
  state.save(dir / "c", last + 1);
  EXPECT_EQ(names_in(dir.path()), std::vector<std::string>{"c"});
}

// The signal for a file past its limit ends the child at that byte, as a kill would.
TEST(CheckpointCrash, KilledAtAnyByte) {
  const TempDir dir;
  State state;
  state.save(dir / "c", 0);
  const std::uintmax_t size = std::filesystem::file_size(dir / "c");
  std::mt19937_64 random(2);
  for (int i = 0; i < kTimes; ++i) {
    const rlim_t limit = i == 0 ? 0 : random() % size;
    const pid_t child = start_child([&] {
      ::signal(SIGXFSZ, SIG_DFL);
      limit_file_size(limit);
      state.save(dir / "c", i + 1);
      return 0;
    });
    const int status = wait_for(child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ) << status;
    EXPECT_EQ(names_in(dir.path()).size(), 2u);  // what the next save removes
    EXPECT_EQ(state.load(dir / "c"), i);
    state.save(dir / "c", i + 1);
    ASSERT_EQ(names_in(dir.path()), std::vector<std::string>{"c"});
  }
}

TEST(CheckpointCrash, AWriteThatFailsAtAnyByte) {
  const TempDir dir;
  State state;
  state.save(dir / "c", 7);
  const std::uintmax_t size = std::filesystem::file_size(dir / "c");
  std::mt19937_64 random(3);
  for (int i = 0; i < kTimes; ++i) {
    const rlim_t limit = random() % size;
    const pid_t child = start_child([&] {
      ::signal(SIGXFSZ, SIG_IGN);
      limit_file_size(limit);
      const std::string written = std::to_string(limit) + " bytes written before";
      const auto result = throws_error([&] { state.save(dir / "c", 8); },
                                       {"write_safetensors", "/c", written, "File too large"});
      if (!result) std::fprintf(stderr, "%s\n", result.message());
      return result ? 0 : 1;
    });
    EXPECT_EQ(wait_for(child), 0);
    EXPECT_EQ(state.load(dir / "c"), 7);
    ASSERT_EQ(names_in(dir.path()), std::vector<std::string>{"c"});
  }
}

TEST(CheckpointCrash, AFullDisk) {
  const TempDir dir;
  constexpr int kNotAllowed = 77;
  const pid_t child = start_child([&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", dir.path().c_str(), "tmpfs", 0, "size=1500k") != 0)
      return kNotAllowed;
    State state;
    state.save(dir / "c", 1);  // 1 MiB: there is no room for a second
    const auto result = throws_error([&] { state.save(dir / "c", 2); },
                                     {"write_safetensors", "No space left on device"});
    if (!result) std::fprintf(stderr, "%s\n", result.message());
    const bool whole = state.load(dir / "c") == 1 && names_in(dir.path()).size() == 1;
    return result && whole ? 0 : 1;
  });
  const int status = wait_for(child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed)
    GTEST_SKIP() << "mounting a small file system is not allowed here";
  EXPECT_EQ(status, 0);
}

TEST(CheckpointCrash, OnlyTemporariesWithoutAWriterAreStale) {
  const TempDir dir;
  spew(dir / "c.tmp.123.0", "left by a killed process");
  spew(dir / "c.tmp.notes", "the user's");
  spew(dir / "d.tmp.123.0", "of another file");
  AtomicFile first("test", dir / "c");
  first.write("first");
  AtomicFile second("test", dir / "c");  // does not remove what the first is writing
  second.write("second");
  EXPECT_EQ(names_in(dir.path()).size(), 4u);
  first.commit();
  EXPECT_EQ(slurp(dir / "c"), "first");
  second.overwrite(0, "S");
  second.commit();
  EXPECT_EQ(slurp(dir / "c"), "Second");
  { const AtomicFile dropped("test", dir / "c"); }
  EXPECT_EQ(names_in(dir.path()), (std::vector<std::string>{"c", "c.tmp.notes", "d.tmp.123.0"}));
  EXPECT_TRUE(throws_error([&] { second.commit(); }, {"test", "a second"}));

  // A numbered save clears the directory of all of them.
  spew(dir / "checkpoint-000000000001.safetensors.tmp.99.3", "");
  State state;
  (void)save_numbered_checkpoint(dir.path(), {.tensors = state.tensors, .step = 5});
  EXPECT_FALSE(std::filesystem::exists(dir / "checkpoint-000000000001.safetensors.tmp.99.3"));
}

}  // namespace
}  // namespace mixtape::io
