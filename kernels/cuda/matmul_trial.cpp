#include "kernels/cuda/matmul_trial.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "engine/allocator.h"
#include "engine/cuda/backend.h"
#include "engine/determinism.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/trial_timer.h"
#include "kernels/matmul.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr double kMinFlops = 64e6;        // below: about a microsecond of work
constexpr float kMarginToSwitch = 0.98f;  // a later candidate must be at least 2 % faster
constexpr int kRounds = 3;
constexpr float kTargetMs = 0.2f;  // of work between two events
constexpr int kMaxRepeats = 20;
// Long products run at the clock that the card can sustain, which differs between algorithms that
// look alike for a millisecond: those that come within kNear of the best run on for kSustainedMs.
constexpr float kLongMs = 0.5f;
constexpr float kNear = 1.08f;
constexpr float kSustainedMs = 30.0f;
constexpr int kMostSustained = 4;

/// Memory for d while a trial of an accumulating product runs; none if the device has no room.
class Scratch {
 public:
  Scratch(std::size_t bytes, const Stream& stream) : device_(stream.device()) {
    try {
      block_ = allocator_of(device_).allocate(bytes, stream);
    } catch (const OutOfMemory&) {  // no trial, then
    }
  }
  ~Scratch() {
    if (block_.data != nullptr) allocator_of(device_).release(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return block_.data; }

 private:
  Device device_;
  Block block_;
};

std::size_t bytes_of_d(const MatmulKey& key) {
  const std::int64_t elements = (key.batch - 1) * key.stride_d + (key.n - 1) * key.ldd + key.m;
  return static_cast<std::size_t>(elements) * size_of(key.out_dtype);
}

/// Replaces the times of the library's first choice and of the best others by those of long runs,
/// and drops the rest.
void time_sustained(const MatmulOperands& operands, std::vector<float>& ms,
                    FunctionRef<cublasStatus_t(const MatmulOperands&, int)> run,
                    TrialTimer& timer) {
  std::vector<int> order(ms.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin() + 1, order.end(), [&](int a, int b) {
    return ms[static_cast<std::size_t>(a)] < ms[static_cast<std::size_t>(b)];
  });
  const float limit = kNear * *std::min_element(ms.begin(), ms.end());
  std::vector<float> sustained(ms.size(), std::numeric_limits<float>::infinity());
  int ran = 0;
  for (const int i : order) {
    const float once = ms[static_cast<std::size_t>(i)];
    if (once > limit || ran == kMostSustained) continue;
    ++ran;
    const int repeats = std::max(1, static_cast<int>(kSustainedMs / once));
    timer.start();
    for (int r = 0; r < repeats; ++r)
      MT_CHECK(run(operands, i) == CUBLAS_STATUS_SUCCESS,
               "matmul: a candidate ran once and then failed");
    sustained[static_cast<std::size_t>(i)] = timer.stop() / static_cast<float>(repeats);
  }
  ms = sustained;
}

int time_candidates(const MatmulOperands& operands, int count,
                    FunctionRef<cublasStatus_t(const MatmulOperands&, int)> run,
                    cudaStream_t stream) {
  constexpr float kFailed = std::numeric_limits<float>::infinity();
  TrialTimer timer(stream);
  std::vector<float> best(static_cast<std::size_t>(count), kFailed);
  std::vector<bool> works(static_cast<std::size_t>(count));
  float once = kFailed;
  for (int i = 0; i < count; ++i) {  // loads the kernels
    timer.start();
    works[static_cast<std::size_t>(i)] = run(operands, i) == CUBLAS_STATUS_SUCCESS;
    const float ms = timer.stop();
    if (works[static_cast<std::size_t>(i)]) once = std::min(once, ms);
  }
  if (once == kFailed) return 0;  // the caller's own launch reports the error
  const int repeats =
      std::clamp(static_cast<int>(kTargetMs / std::max(once, 1e-3f)), 1, kMaxRepeats);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < count; ++i) {
      if (!works[static_cast<std::size_t>(i)]) continue;
      timer.start();
      for (int r = 0; r < repeats; ++r)
        MT_CHECK(run(operands, i) == CUBLAS_STATUS_SUCCESS,
                 "matmul: a candidate ran once and then failed");
      float& slot = best[static_cast<std::size_t>(i)];
      slot = std::min(slot, timer.stop());
    }
  }
  for (float& ms : best) ms /= static_cast<float>(repeats);
  if (*std::min_element(best.begin(), best.end()) >= kLongMs)
    time_sustained(operands, best, run, timer);
  int chosen = 0;
  for (int i = 1; i < count; ++i) {
    const float challenger = best[static_cast<std::size_t>(i)];
    if (challenger < kMarginToSwitch * best[static_cast<std::size_t>(chosen)]) chosen = i;
  }
  return chosen;
}

}  // namespace

bool choice_remembered(const MatmulKey& key) {
  const double flops = 2.0 * static_cast<double>(key.m) * static_cast<double>(key.n) *
                       static_cast<double>(key.k) * key.batch;
  return flops >= kMinFlops && algorithm_trials() && !deterministic();
}

bool trial_allowed(const MatmulKey& key, cudaStream_t stream) {
  return choice_remembered(key) && !cudart::is_capturing(key.device, stream);
}

bool use_first_candidate() { return deterministic(); }

int fastest_candidate(const MatmulKey& key, const MatmulOperands& operands, int count,
                      FunctionRef<cublasStatus_t(const MatmulOperands&, int)> run,
                      const Stream& stream) {
  MatmulOperands trial = operands;
  if (operands.beta == 0) return time_candidates(trial, count, run, native_stream(stream));
  const Scratch scratch(bytes_of_d(key), stream);
  if (scratch.data() == nullptr) return 0;
  trial.d = scratch.data();
  trial.beta = 0;
  return time_candidates(trial, count, run, native_stream(stream));
}

}  // namespace mixtape::kernels::cuda
