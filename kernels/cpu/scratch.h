// Per-thread scratch memory for CPU kernels: a stack of cache-line-aligned runs, kept between
// calls, so that a training step allocates nothing once it has run.
//
//   ScratchFrame frame;
//   float* row = frame.take<float>(C);   // valid until the frame ends; frames nest, and
//                                        // only the innermost one may take
//
// Meant for tiles and rows; what grows with the whole problem comes as a Workspace.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace mixtape::kernels::cpu {

class ScratchFrame {
 public:
  ScratchFrame()
      : arena_(arena()), run_(arena_.current), used_(arena_.used), depth_(++arena_.depth) {}
  ~ScratchFrame() {
    --arena_.depth;
    arena_.current = run_;
    arena_.used = used_;
    if (run_ == 0 && used_ == 0 && arena_.must_reset()) arena_.reset();
  }
  ScratchFrame(const ScratchFrame&) = delete;
  ScratchFrame& operator=(const ScratchFrame&) = delete;

  /// `count` elements with undefined content, 64-byte aligned.
  template <class T>
  T* take(std::int64_t count) {
    assert(depth_ == arena_.depth);  // only the innermost frame may take
    return static_cast<T*>(arena_.take(static_cast<std::size_t>(count) * sizeof(T)));
  }

 private:
  static constexpr std::size_t kAlign = 64, kSmallestRun = std::size_t{1} << 16;
  static constexpr std::size_t kLargestKept = std::size_t{1} << 26;  // between calls
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(kAlign)); }
  };
  struct Run {
    std::unique_ptr<std::byte, Delete> data;
    std::size_t bytes;
    explicit Run(std::size_t n)
        : data(static_cast<std::byte*>(::operator new(n, std::align_val_t(kAlign)))), bytes(n) {}
  };
  struct Arena {
    std::vector<Run> runs;
    std::size_t current = 0, used = 0;  // the run in use, and bytes taken from it
    std::size_t first = kSmallestRun;   // size of the first run
    int depth = 0;                      // frames alive

    void* take(std::size_t bytes) {
      bytes = (bytes + kAlign - 1) / kAlign * kAlign;
      if (runs.empty()) runs.emplace_back(std::max(bytes, first));
      while (runs[current].bytes - used < bytes) {
        if (current + 1 == runs.size()) runs.emplace_back(std::max(bytes, runs[current].bytes));
        ++current;
        used = 0;
      }
      std::byte* p = runs[current].data.get() + used;
      used += bytes;
      return p;
    }
    bool must_reset() const {
      return runs.size() > 1 || (!runs.empty() && runs[0].bytes > kLargestKept);
    }
    void reset() {  // next time one run as large as all these, within reason
      first = 0;
      for (const Run& r : runs) first += r.bytes;
      first = std::min(first, kLargestKept);
      runs.clear();
    }
  };
  static Arena& arena() {
    static thread_local Arena arena;
    return arena;
  }

  Arena& arena_;
  std::size_t run_, used_;
  int depth_;
};

}  // namespace mixtape::kernels::cpu
