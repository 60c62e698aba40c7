// SGD and Adam steps over a table of parameters in two launches. The first, of one block, decides
// whether the step is taken and advances the step counts; the second updates, one block a chunk.
//
// The decision travels in device globals and not in the launch, because found-inf is known only on
// the device; the error slot is host memory, which must not be read once a block, and one reading
// decides for all. A thread updates four elements at a time: 16-byte accesses of fp32 arrays,
// 8-byte of 16-bit ones, where the entry's pointers allow, all loads before the first store.
// Storage types are looked up at run time: every byte of parameter, gradient and state crosses the
// bus once, which bounds the kernel. Deterministic.
#include <atomic>

#include "kernels/cuda/chunks.cuh"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kWidth = 4;  // elements that a thread has in hand

/// Four elements as they are stored: f32 in four words, 16-bit types in two.
struct Packed {
  std::uint32_t word[kWidth];
};

/// `whole`: all four exist and the address is aligned to four elements; else `count` exist.
__device__ __forceinline__ Packed load_packed(const void* data, Dtype dtype, std::int64_t i,
                                              bool whole, int count) {
  Packed p{};
  if (dtype == Dtype::f32) {
    const float* from = static_cast<const float*>(data) + i;
    if (whole) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      return {{v.x, v.y, v.z, v.w}};
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (k < count) p.word[k] = __float_as_uint(from[k]);
  } else if (dtype == Dtype::f64) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (k < count)
        p.word[k] = __float_as_uint(static_cast<float>(static_cast<const double*>(data)[i + k]));
  } else {
    const std::uint16_t* from = static_cast<const std::uint16_t*>(data) + i;
    if (whole) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      return {{v.x, v.y, 0, 0}};
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (k < count) p.word[k / 2] |= static_cast<std::uint32_t>(from[k]) << (16 * (k % 2));
  }
  return p;
}

__device__ __forceinline__ void unpack(const Packed& p, Dtype dtype, float (&v)[kWidth]) {
  if (dtype == Dtype::f16 || dtype == Dtype::bf16) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 2) {
      const float2 pair = dtype == Dtype::f16 ? unpack_pair<Half>(p.word[k / 2])
                                              : unpack_pair<BFloat16>(p.word[k / 2]);
      v[k] = pair.x;
      v[k + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[k] = __uint_as_float(p.word[k]);
  }
}

__device__ __forceinline__ void store_values(void* data, Dtype dtype, std::int64_t i, bool whole,
                                             int count, const float (&v)[kWidth]) {
  if (!whole || dtype == Dtype::f64) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (k < count) store_as(data, dtype, i + k, v[k]);
  } else if (dtype == Dtype::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + i) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(data) + i) =
        dtype == Dtype::f16
            ? make_uint2(pack_pair<Half>(v[0], v[1]), pack_pair<Half>(v[2], v[3]))
            : make_uint2(pack_pair<BFloat16>(v[0], v[1]), pack_pair<BFloat16>(v[2], v[3]));
  }
}

/// Whether every array of an entry is aligned to four elements (absent ones are).
__device__ __forceinline__ bool aligned_entry(const ParameterEntry& e) {
  const auto off = [](const void* p, Dtype dtype) {
    const unsigned bytes = dtype == Dtype::f32 ? 16 : dtype == Dtype::f64 ? 1 : 8;
    return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(p)) & (bytes - 1);
  };
  return (off(e.parameter, e.dtype) | off(e.master, Dtype::f32) |
          off(e.gradient, e.gradient_dtype) | off(e.state[0], Dtype::f32) |
          off(e.state[1], Dtype::f32) | off(e.shadow, e.shadow_dtype)) == 0;
}

/// What one step does, decided on the device.
struct StepPlan {
  float factor;  // of every gradient
  int skip;
};
constexpr unsigned kPlans = 1024;  // launches that may be in flight on different streams
__device__ StepPlan step_plans[kPlans];

unsigned next_plan() {
  static std::atomic<unsigned> next{0};
  return next.fetch_add(1, std::memory_order_relaxed) % kPlans;
}

__global__ void begin_step_kernel(const ParameterEntry* entries, std::int64_t count,
                                  StepScalars step, float sign, unsigned plan) {
  bool skip = false;
  if (threadIdx.x == 0) {
    skip = (step.found_inf != nullptr && *step.found_inf != 0) ||
           (step.device_error != nullptr &&
            *static_cast<const volatile std::uint32_t*>(&step.device_error->set) != 0);
    const float inv_scale = step.inv_scale != nullptr ? *step.inv_scale : 1.0f;
    const float clip = step.clip_factor != nullptr ? *step.clip_factor : 1.0f;
    step_plans[plan] = {sign * inv_scale * clip, skip};
  }
  if (__syncthreads_or(skip)) return;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x)
    if (entries[i].gradient != nullptr && entries[i].step != nullptr) *entries[i].step += 1.0f;
}

struct SgdRule {
  float factor, lr, weight_decay, momentum, take;
  bool nesterov, first, states;  // states: a momentum buffer is read and written
  static constexpr int kStates = 1;

  __device__ __forceinline__ SgdRule(const OptimizerScalars& s, OptimizerFlags flags,
                                     float gradient_factor, const ParameterEntry& e)
      : factor(gradient_factor),
        lr(s.lr),
        weight_decay(s.weight_decay),
        momentum(s.momentum),
        take(1.0f - s.dampening),
        nesterov(flags.nesterov),
        first(e.step != nullptr && *e.step == 1.0f),
        states(s.momentum != 0.0f && e.state[0] != nullptr) {}
  __device__ __forceinline__ void apply(float& p, float g, float& buffer, float&) const {
    float d = g * factor + weight_decay * p;
    if (states) {
      buffer = first ? d : momentum * buffer + take * d;
      d = nesterov ? d + momentum * buffer : buffer;
    }
    p -= lr * d;
  }
};

/// base^exponent by repeated squaring.
__device__ __forceinline__ double power(double base, unsigned exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

/// Bias corrections by the parameter's own step count, in double as PyTorch computes them.
struct AdamRule {
  float factor, beta1, beta2, take1, take2, eps, l2, decay, step_size, inv_sqrt_correction2;
  static constexpr bool states = true;
  static constexpr int kStates = 2;

  __device__ __forceinline__ AdamRule(const OptimizerScalars& s, OptimizerFlags flags,
                                      float gradient_factor, const ParameterEntry& e)
      : factor(gradient_factor),
        beta1(s.beta1),
        beta2(s.beta2),
        take1(1.0f - s.beta1),
        take2(1.0f - s.beta2),
        eps(s.eps),
        l2(flags.decoupled ? 0.0f : s.weight_decay) {
    const unsigned t = static_cast<unsigned>(*e.step);  // this step counted
    const double lr = s.lr;
    decay = flags.decoupled ? static_cast<float>(1 - lr * s.weight_decay) : 1.0f;
    step_size = static_cast<float>(lr / (1 - power(s.beta1, t)));
    inv_sqrt_correction2 = static_cast<float>(1 / sqrt(1 - power(s.beta2, t)));
  }
  __device__ __forceinline__ void apply(float& p, float g, float& m, float& v) const {
    const float d = g * factor + l2 * p;
    m += take1 * (d - m);
    v = beta2 * v + take2 * (d * d);
    const float denominator = sqrtf(v) * inv_sqrt_correction2 + eps;
    p = p * decay - step_size * (m / denominator);
  }
};

/// Updates elements i .. i + 3 of one parameter.
template <class Rule>
__device__ __forceinline__ void update(const ParameterEntry& e, const Rule& rule, std::int64_t i,
                                       bool whole, int count) {
  void* const primary = e.master != nullptr ? e.master : e.parameter;
  const Dtype primary_dtype = e.master != nullptr ? Dtype::f32 : e.dtype;
  const bool second = Rule::kStates == 2;
  const Packed packed_p = load_packed(primary, primary_dtype, i, whole, count);
  const Packed packed_g = load_packed(e.gradient, e.gradient_dtype, i, whole, count);
  Packed packed_s[2] = {};
  if (rule.states) packed_s[0] = load_packed(e.state[0], Dtype::f32, i, whole, count);
  if (second) packed_s[1] = load_packed(e.state[1], Dtype::f32, i, whole, count);
  float p[kWidth], g[kWidth], s[2][kWidth];
  unpack(packed_p, primary_dtype, p);
  unpack(packed_g, e.gradient_dtype, g);
  unpack(packed_s[0], Dtype::f32, s[0]);
  unpack(packed_s[1], Dtype::f32, s[1]);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) rule.apply(p[k], g[k], s[0][k], s[1][k]);
  store_values(primary, primary_dtype, i, whole, count, p);
  if (rule.states) store_values(e.state[0], Dtype::f32, i, whole, count, s[0]);
  if (second) store_values(e.state[1], Dtype::f32, i, whole, count, s[1]);
  if (e.master != nullptr) store_values(e.parameter, e.dtype, i, whole, count, p);
  if (e.shadow != nullptr) store_values(e.shadow, e.shadow_dtype, i, whole, count, p);
}

template <class Rule>
__global__ void __launch_bounds__(kChunkThreads)
    optimizer_step_kernel(const ParameterEntry* entries, std::int64_t count,
                          const OptimizerScalars* scalars, OptimizerFlags flags, unsigned plan) {
  const StepPlan step = step_plans[plan];
  if (step.skip) return;
  const std::int64_t chunk = blockIdx.x;
  const ParameterEntry e = entries[find_entry(entries, count, chunk)];
  if (e.gradient == nullptr) return;
  const Rule rule(*scalars, flags, step.factor, e);
  const Chunk piece = chunk_of(e, chunk);
  const bool vector = aligned_entry(e);
  for (int i = threadIdx.x * kWidth; i < piece.count; i += kChunkThreads * kWidth)
    update(e, rule, piece.start + i, vector && i + kWidth <= piece.count,
           min(kWidth, piece.count - i));
}

template <class Rule>
void optimizer_step(const Stream& stream, const ParameterTable& table,
                    const OptimizerScalars* scalars, OptimizerFlags flags,
                    const StepScalars& step) {
  if (table.count == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  const unsigned plan = next_plan();
  launch(begin_step_kernel, 1, 1024, 0, queue, table.device, table.count, step,
         flags.maximize ? -1.0f : 1.0f, plan);
  if (table.chunks == 0) return;
  launch(optimizer_step_kernel<Rule>, blocks_for(table.chunks, 1), kChunkThreads, 0, queue,
         table.device, table.count, scalars, flags, plan);
}

__global__ void set_scalars_kernel(OptimizerScalars* target, OptimizerScalars values) {
  *target = values;
}

}  // namespace

void sgd_step(const Stream& stream, const ParameterTable& table, const OptimizerScalars* scalars,
              OptimizerFlags flags, const StepScalars& step) {
  // The momentum is in device memory: whether it needs a buffer shows in whether there are any.
  const bool buffers = table.count > 0 && table.host[0].state[0] != nullptr;
  for (std::int64_t i = 0; i < table.count; ++i)
    MT_CHECK((table.host[i].state[0] != nullptr) == buffers &&
                 (!buffers || table.host[i].step != nullptr),
             "sgd_step: expected a momentum buffer and a step count for parameter ", i);
  optimizer_step<SgdRule>(stream, table, scalars, flags, step);
}

void adam_step(const Stream& stream, const ParameterTable& table, const OptimizerScalars* scalars,
               OptimizerFlags flags, const StepScalars& step) {
  for (std::int64_t i = 0; i < table.count; ++i) {
    const ParameterEntry& e = table.host[i];
    MT_CHECK(e.gradient == nullptr ||
                 (e.state[0] != nullptr && e.state[1] != nullptr && e.step != nullptr),
             "adam_step: expected two moments and a step count for parameter ", i);
  }
  optimizer_step<AdamRule>(stream, table, scalars, flags, step);
}

void set_scalars(const Stream& stream, OptimizerScalars* target, const OptimizerScalars& values) {
  const CudaDeviceGuard guard(stream.device());
  launch(set_scalars_kernel, 1, 1, 0, native_stream(stream), target, values);
}

}  // namespace mixtape::kernels::cuda
