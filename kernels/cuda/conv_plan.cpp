#include "kernels/cuda/conv_plan.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "engine/cuda/backend.h"
#include "engine/determinism.h"
#include "kernels/cuda/byte_key.h"
#include "kernels/cuda/cudnn_check.h"
#include "kernels/cuda/trial_timer.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr std::size_t kCandidates = 6;
constexpr std::size_t kMaxWorkspaceBytes = std::size_t{1} << 30;
constexpr int kRounds = 3;
constexpr float kMarginToSwitch = 0.98f;  // a later candidate must be at least 2 % faster

struct ConvPlans {
  std::vector<ExecutionPlan> candidates;  // best estimate first; empty: not supported
  int chosen = -1;                        // by a trial; -1: none yet
};

struct Handle {
  int device;
  cudnnHandle_t handle;
  cudaStream_t stream;  // what the handle queues on
};

/// A thread's handles, and its plans, which belong to a handle. Nothing here is ever destroyed:
/// a captured CUDA graph may still launch a plan's kernels, and the driver may be gone before
/// static destructors run. A thread that ends leaves its state to the next one.
struct ThreadState {
  std::vector<Handle> handles;
  std::unordered_map<ConvKey, ConvPlans, ByteHash, ByteEqual> plans;
};

class StateLease {
 public:
  StateLease() {
    std::lock_guard lock(pool().mutex);
    if (pool().idle.empty()) {
      state_ = new ThreadState;
    } else {
      state_ = pool().idle.back();
      pool().idle.pop_back();
    }
  }
  ~StateLease() {
    std::lock_guard lock(pool().mutex);
    pool().idle.push_back(state_);
  }
  StateLease(const StateLease&) = delete;
  StateLease& operator=(const StateLease&) = delete;
  ThreadState& state() { return *state_; }

 private:
  struct Pool {
    std::mutex mutex;
    std::vector<ThreadState*> idle;
  };
  static Pool& pool() {
    static auto& pool = *new Pool;
    return pool;
  }
  ThreadState* state_;
};

ThreadState& thread_state_of_cudnn() {
  thread_local StateLease lease;
  return lease.state();
}

/// This thread's handle on `device`, the current one, queueing on `stream`.
cudnnHandle_t handle_for(int device, cudaStream_t stream) {
  std::vector<Handle>& handles = thread_state_of_cudnn().handles;
  auto found = std::find_if(handles.begin(), handles.end(),
                            [&](const Handle& h) { return h.device == device; });
  if (found == handles.end()) {
    Handle h{device, nullptr, nullptr};
    MT_CUDNN_CHECK(cudnnCreate(&h.handle));
    handles.push_back(h);
    found = handles.end() - 1;
  }
  if (found->stream != stream) {
    MT_CUDNN_CHECK(cudnnSetStream(found->handle, stream));
    found->stream = stream;
  }
  return found->handle;
}

ConvPlans& plans_of(const ConvKey& key) {
  auto& plans = thread_state_of_cudnn().plans;
  const auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  const CudnnTarget target{handle_for(key.device, nullptr), nullptr};
  ConvPlans fresh;
  fresh.candidates = conv_candidates(key, target, kCandidates, kMaxWorkspaceBytes);
  return plans.emplace(key, std::move(fresh)).first->second;
}

cudnnStatus_t execute(const ConvKey& key, const ExecutionPlan& plan, const ConvPointers& p,
                      void* workspace, cudaStream_t stream) {
  const std::int64_t uids[] = {kConvX, kConvW, kConvY, kConvBias};
  void* const pointers[] = {p.x, p.w, p.y, p.bias};
  const std::size_t count = key.bias ? 4 : 3;
  return execute_plan(handle_for(key.device, stream), plan, std::span(uids, count),
                      std::span(pointers, count), workspace);
}

bool trials_allowed(const ConvKey& key, cudaStream_t stream) {
  return !key.deterministic && algorithm_trials() && !cudart::is_capturing(key.device, stream);
}

/// The fastest candidate that runs in `workspace`, or -1 if none does.
int fastest(const ConvKey& key, const std::vector<ExecutionPlan>& candidates,
            const ConvPointers& pointers, Workspace workspace, cudaStream_t stream) {
  constexpr float kFailed = std::numeric_limits<float>::infinity();
  TrialTimer timer(stream);
  std::vector<float> best(candidates.size(), kFailed);
  const auto time = [&](std::size_t i) {
    timer.start();
    const cudnnStatus_t status = execute(key, candidates[i], pointers, workspace.data, stream);
    const float ms = timer.stop();
    return status == CUDNN_STATUS_SUCCESS ? ms : kFailed;
  };
  std::vector<bool> works(candidates.size());
  for (std::size_t i = 0; i < candidates.size(); ++i)  // loads the kernels
    works[i] = candidates[i].workspace_bytes <= workspace.bytes && time(i) != kFailed;
  for (int round = 0; round < kRounds; ++round)
    for (std::size_t i = 0; i < candidates.size(); ++i)
      if (works[i]) best[i] = std::min(best[i], time(i));
  std::size_t chosen = 0;
  for (std::size_t i = 1; i < candidates.size(); ++i)
    if (best[i] < kMarginToSwitch * best[chosen]) chosen = i;
  return best[chosen] == kFailed ? -1 : static_cast<int>(chosen);
}

/// The first candidate that fits, in the heuristic's order.
int first_fitting(const ConvPlans& plans, std::size_t bytes) {
  for (std::size_t i = 0; i < plans.candidates.size(); ++i)
    if (plans.candidates[i].workspace_bytes <= bytes) return static_cast<int>(i);
  return -1;
}

}  // namespace

bool conv_supported(const ConvKey& key) { return !plans_of(key).candidates.empty(); }

std::size_t conv_plan_workspace_bytes(const ConvKey& key) {
  const ConvPlans& plans = plans_of(key);
  if (plans.candidates.empty()) return 0;
  if (plans.chosen >= 0)
    return plans.candidates[static_cast<std::size_t>(plans.chosen)].workspace_bytes;
  if (key.deterministic || !algorithm_trials()) return plans.candidates[0].workspace_bytes;
  std::size_t most = 0;
  for (const ExecutionPlan& plan : plans.candidates) most = std::max(most, plan.workspace_bytes);
  return most;
}

void run_convolution(const ConvKey& key, const ConvPointers& pointers, Workspace workspace,
                     const Stream& stream) {
  ConvPlans& plans = plans_of(key);
  MT_CHECK(!plans.candidates.empty(), "conv2d: cuDNN has no engine for x (", key.n, ", ", key.c,
           ", ", key.h, ", ", key.w, "), w (", key.o, ", ", key.c / key.groups, ", ", key.r, ", ",
           key.s, ") of ", key.dtype, key.deterministic ? " that is deterministic" : "");
  const cudaStream_t queue = native_stream(stream);
  if (plans.chosen < 0 && trials_allowed(key, queue))
    plans.chosen = fastest(key, plans.candidates, pointers, workspace, queue);
  int index = plans.chosen;
  if (index < 0 ||
      plans.candidates[static_cast<std::size_t>(index)].workspace_bytes > workspace.bytes)
    index = first_fitting(plans, workspace.bytes);
  MT_CHECK(index >= 0, "conv2d: expected a workspace of ", conv_plan_workspace_bytes(key),
           " bytes, got ", workspace.bytes);
  MT_CUDNN_CHECK(execute(key, plans.candidates[static_cast<std::size_t>(index)], pointers,
                         workspace.data, queue));
}

std::string conv_plan_name(const ConvKey& key) {
  const ConvPlans& plans = plans_of(key);
  if (plans.candidates.empty()) return "none";
  const int chosen = std::max(plans.chosen, 0);
  const ExecutionPlan& plan = plans.candidates[static_cast<std::size_t>(chosen)];
  return mixtape::detail::concat("engine ", plan.engine, ", ", plan.workspace_bytes, " bytes");
}

}  // namespace mixtape::kernels::cuda
