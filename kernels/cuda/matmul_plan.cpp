#include "kernels/cuda/matmul_plan.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "kernels/cuda/algorithm_cache.h"
#include "kernels/cuda/byte_key.h"
#include "kernels/cuda/cublas_check.h"
#include "kernels/cuda/matmul_trial.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kRequested = 24;  // heuristic results asked for, best first
constexpr int kCandidates = 8;  // of those, how many are kept

cudaDataType_t data_type(Dtype t) {
  switch (t) {
    case Dtype::f32: return CUDA_R_32F;
    case Dtype::f16: return CUDA_R_16F;
    case Dtype::bf16: return CUDA_R_16BF;
    case Dtype::f64: return CUDA_R_64F;
    default: MT_THROW("matmul: expected a floating dtype, got ", t);
  }
}

/// Handles carry no settings and may be shared by threads; they live until the process ends,
/// because the driver may be gone before static destructors run.
cublasLtHandle_t handle_of(int device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<cublasLtHandle_t> handles[kMaxDevices];
  static std::mutex mutex;
  MT_CHECK(device >= 0 && device < kMaxDevices, "matmul: expected a device index below ",
           kMaxDevices, ", got ", device);
  cublasLtHandle_t handle = handles[device].load(std::memory_order_acquire);
  if (handle == nullptr) {
    std::lock_guard lock(mutex);
    handle = handles[device].load(std::memory_order_acquire);
    if (handle == nullptr) {
      MT_CUBLAS_CHECK(cublasLtCreate(&handle));
      handles[device].store(handle, std::memory_order_release);
    }
  }
  return handle;
}

/// One thread's descriptors of a problem. The structs are cuBLASLt's "semi-opaque" ones, which are
/// initialised in place and need no destruction.
struct Descriptors {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, d;
};

template <class T>
void set(cublasLtMatmulDescOpaque_t& desc, cublasLtMatmulDescAttributes_t attribute, T value) {
  MT_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&desc, attribute, &value, sizeof(value)));
}

void describe_layout(cublasLtMatrixLayoutOpaque_t& layout, Dtype dtype, std::int64_t rows,
                     std::int64_t columns, std::int64_t ld, std::int32_t batch,
                     std::int64_t stride) {
  MT_CUBLAS_CHECK(cublasLtMatrixLayoutInit(&layout, data_type(dtype),
                                           static_cast<std::uint64_t>(rows),
                                           static_cast<std::uint64_t>(columns), ld));
  if (batch == 1) return;
  MT_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                   &batch, sizeof(batch)));
  MT_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(
      &layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
}

bool has_bias(const MatmulKey& key) { return (key.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
bool has_aux(const MatmulKey& key) { return (key.epilogue & 128) != 0; }  // the *_AUX_* bit

void set_pointers(Descriptors& d, const MatmulKey& key, const MatmulOperands& operands) {
  if (has_bias(key)) set(d.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  if (has_aux(key)) set(d.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.aux);
}

void describe(Descriptors& d, const MatmulKey& key) {
  const bool f64 = key.dtype == Dtype::f64;
  const cublasComputeType_t compute = f64        ? CUBLAS_COMPUTE_64F
                                      : key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                 : CUBLAS_COMPUTE_32F;
  MT_CUBLAS_CHECK(cublasLtMatmulDescInit(&d.product, compute, f64 ? CUDA_R_64F : CUDA_R_32F));
  set(d.product, CUBLASLT_MATMUL_DESC_TRANSA,
      static_cast<std::int32_t>(key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
  set(d.product, CUBLASLT_MATMUL_DESC_TRANSB,
      static_cast<std::int32_t>(key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
  set(d.product, CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue);
  if (has_aux(key)) {
    set(d.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.aux_ld);
    if (key.batch > 1)
      set(d.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, key.stride_aux);
  }
  describe_layout(d.a, key.dtype, key.transpose_a ? key.k : key.m, key.transpose_a ? key.m : key.k,
                  key.lda, key.batch, key.stride_a);
  describe_layout(d.b, key.dtype, key.transpose_b ? key.n : key.k, key.transpose_b ? key.k : key.n,
                  key.ldb, key.batch, key.stride_b);
  describe_layout(d.d, key.out_dtype, key.m, key.n, key.ldd, key.batch, key.stride_d);
}

struct Preference {
  cublasLtMatmulPreferenceOpaque_t value;

  explicit Preference(const MatmulKey& key) {
    MT_CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&value));
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{key.workspace_kib} << 10);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{1} << key.align_a);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{1} << key.align_b);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{1} << key.align_d);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{1} << key.align_d);
  }
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T x) {
    MT_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&value, attribute, &x, sizeof(x)));
  }
};

/// The heuristic has been seen to ignore the reduction mask, so what it returns is checked too.
bool reduces_in_compute_type(const cublasLtMatmulAlgo_t& algo) {
  std::uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
  std::size_t written = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(
      &algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof(scheme), &written);
  if (status != CUBLAS_STATUS_SUCCESS) return false;
  return scheme == CUBLASLT_REDUCTION_SCHEME_NONE ||
         scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

std::vector<MatmulCandidate> candidates_of(const MatmulKey& key, Descriptors& d) {
  Preference preference(key);
  cublasLtMatmulHeuristicResult_t results[kRequested];
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_of(key.device), &d.product, &d.a, &d.b, &d.d, &d.d,
                                     &preference.value, kRequested, results, &count);
  std::vector<MatmulCandidate> candidates;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)
    return candidates;  // the caller says so, or does the epilogue itself
  MT_CUBLAS_CHECK(status);
  for (int i = 0; i < count && candidates.size() < kCandidates; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS && reduces_in_compute_type(results[i].algo) &&
        results[i].workspaceSize <= std::size_t{key.workspace_kib} << 10)
      candidates.push_back({results[i].algo, results[i].workspaceSize});
  }
  return candidates;
}

// ---- what earlier processes have measured ------------------------------------------------------

/// A trial's choice as the disk keeps it; the library says that an algorithm may be restored by the
/// same version of itself.
struct StoredAlgorithm {
  cublasLtMatmulAlgo_t algo;
  std::uint64_t workspace_bytes;
};

AlgorithmCache& cache_of(int device) {
  static auto& caches = *new std::unordered_map<int, std::unique_ptr<AlgorithmCache>>;
  std::unique_ptr<AlgorithmCache>& cache = caches[device];
  if (cache == nullptr)
    cache = std::make_unique<AlgorithmCache>(
        device, mixtape::detail::concat("cublaslt", cublasLtGetVersion()));
  return *cache;
}
std::mutex cache_mutex;

/// The key without what names the device in this process.
MatmulKey stored_key(MatmulKey key) {
  key.device = 0;
  return key;
}

/// The index among the candidates, joined by it if need be, of an earlier choice; -1: none that
/// still runs.
int recall_choice(const MatmulKey& key, Descriptors& d, std::vector<MatmulCandidate>& candidates) {
  const MatmulKey stored = stored_key(key);
  StoredAlgorithm value{};
  {
    const std::lock_guard lock(cache_mutex);
    if (!cache_of(key.device)
             .find(std::as_bytes(std::span(&stored, 1)),
                   std::as_writable_bytes(std::span(&value, 1))))
      return -1;
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (std::memcmp(&candidates[i].algo, &value.algo, sizeof(value.algo)) == 0)
      return static_cast<int>(i);
  }
  cublasLtMatmulHeuristicResult_t result;
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle_of(key.device), &d.product, &d.a,
                                                        &d.b, &d.d, &d.d, &value.algo, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > std::size_t{key.workspace_kib}
                                                                    << 10)
    return -1;
  candidates.push_back({value.algo, result.workspaceSize});
  return static_cast<int>(candidates.size()) - 1;
}

void remember_choice(const MatmulKey& key, const MatmulCandidate& choice) {
  const MatmulKey stored = stored_key(key);
  const StoredAlgorithm value{choice.algo, choice.workspace_bytes};
  const std::lock_guard lock(cache_mutex);
  cache_of(key.device)
      .store(std::as_bytes(std::span(&stored, 1)), std::as_bytes(std::span(&value, 1)));
}

template <class T>
using PlanMap = std::unordered_map<MatmulKey, T, ByteHash, ByteEqual>;

/// What all threads share about a problem.
struct SharedPlan {
  std::vector<MatmulCandidate> candidates;  // best estimate first; empty: not supported
  std::atomic<int> chosen{-1};              // by a trial; -1: none yet
  std::mutex trial;
};

struct LocalPlan {
  Descriptors descriptors;
  SharedPlan* shared = nullptr;
};

SharedPlan* shared_plan(const MatmulKey& key, Descriptors& descriptors) {
  static std::mutex mutex;
  static auto& plans = *new PlanMap<std::unique_ptr<SharedPlan>>;
  std::lock_guard lock(mutex);
  std::unique_ptr<SharedPlan>& slot = plans[key];
  if (slot == nullptr) {
    auto plan = std::make_unique<SharedPlan>();
    plan->candidates = candidates_of(key, descriptors);
    if (plan->candidates.size() < 2)
      plan->chosen = 0;
    else if (choice_remembered(key))
      plan->chosen = recall_choice(key, descriptors, plan->candidates);
    slot = std::move(plan);
  }
  return slot.get();
}

LocalPlan& local_plan(const MatmulKey& key, const MatmulOperands& operands) {
  thread_local PlanMap<LocalPlan> plans;
  LocalPlan& plan = plans[key];
  if (plan.shared == nullptr) [[unlikely]] {
    describe(plan.descriptors, key);
    set_pointers(plan.descriptors, key, operands);  // their alignment guides the heuristic
    plan.shared = shared_plan(key, plan.descriptors);
  }
  return plan;
}

cublasStatus_t launch(const MatmulKey& key, Descriptors& d, const MatmulOperands& x,
                      const MatmulCandidate& candidate, void* workspace, cudaStream_t stream) {
  const float alpha = static_cast<float>(x.alpha), beta = static_cast<float>(x.beta);
  const bool f64 = key.dtype == Dtype::f64;
  return cublasLtMatmul(
      handle_of(key.device), &d.product,
      f64 ? static_cast<const void*>(&x.alpha) : static_cast<const void*>(&alpha), x.a, &d.a, x.b,
      &d.b, f64 ? static_cast<const void*>(&x.beta) : static_cast<const void*>(&beta), x.d, &d.d,
      x.d, &d.d, &candidate.algo, workspace, candidate.workspace_bytes, stream);
}

}  // namespace

std::uint8_t alignment_log2(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % 256 == 0) return 8;
  if (address % 16 == 0) return 4;
  return static_cast<std::uint8_t>(__builtin_ctzll(address));
}

bool run_matmul(const MatmulKey& key, const MatmulOperands& operands, Workspace workspace,
                const Stream& stream) {
  LocalPlan& plan = local_plan(key, operands);
  SharedPlan& shared = *plan.shared;
  if (shared.candidates.empty()) return false;
  set_pointers(plan.descriptors, key, operands);
  const cudaStream_t queue = native_stream(stream);
  int index = shared.chosen.load(std::memory_order_acquire);
  if (index < 0 && trial_allowed(key, queue)) {
    std::unique_lock lock(shared.trial, std::try_to_lock);
    if (lock.owns_lock() && shared.chosen.load() < 0) {
      const auto run = [&](const MatmulOperands& x, int candidate) {
        return launch(key, plan.descriptors, x,
                      shared.candidates[static_cast<std::size_t>(candidate)], workspace.data,
                      queue);
      };
      const int fastest =
          fastest_candidate(key, operands, static_cast<int>(shared.candidates.size()), run, stream);
      remember_choice(key, shared.candidates[static_cast<std::size_t>(fastest)]);
      shared.chosen = fastest;
    }
    index = shared.chosen.load(std::memory_order_acquire);
  }
  if (index < 0 || use_first_candidate()) index = 0;
  MT_CUBLAS_CHECK(launch(key, plan.descriptors, operands,
                         shared.candidates[static_cast<std::size_t>(index)], workspace.data,
                         queue));
  return true;
}

}  // namespace mixtape::kernels::cuda
