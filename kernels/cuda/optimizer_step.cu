// SGD and Adam on CUDA: two launches for all parameters. The first, of one block, decides whether
// the step is taken and advances the step counts; the second updates, one block a chunk, reading
// each of parameter, gradient and state once and writing what changes once.
//
// The decision travels in device globals and not in the launch, because found-inf is known only on
// the device. One thread makes it: another stream may report an error while this one looks, and all
// parameters and their step counts have to agree; and the error slot is host memory, slow to read.
#include <atomic>

#include "kernels/cuda/chunks.cuh"

namespace mixtape::kernels::cuda {
namespace {

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

__device__ bool skipped(const StepScalars& step) {
  return (step.found_inf != nullptr && *step.found_inf != 0) ||
         (step.device_error != nullptr && is_pending(*step.device_error));
}

__global__ void decide_step_kernel(float* skip, StepScalars step) {
  *skip = skipped(step) ? 1.0f : 0.0f;
}

__global__ void begin_step_kernel(const ParameterEntry* entries, std::int64_t count,
                                  StepScalars step, float sign, unsigned plan) {
  __shared__ bool skip;
  if (threadIdx.x == 0) {
    skip = skipped(step);
    step_plans[plan].factor = sign * (step.inv_scale != nullptr ? *step.inv_scale : 1.0f) *
                              (step.clip_factor != nullptr ? *step.clip_factor : 1.0f);
    step_plans[plan].skip = skip;
  }
  __syncthreads();
  if (skip) return;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    if (entries[i].gradient != nullptr && entries[i].step != nullptr) *entries[i].step += 1.0f;
  }
}

/// Runs `update`(p, g, state0, state1), which changes its references, on every element of this
/// block's chunk.
template <int kStates, class Update>
__device__ __forceinline__ void update_chunk(const ParameterEntry& e, std::int64_t start,
                                             const Update& update) {
  const std::int64_t count = min(kChunk, e.numel - start);
  float* source = e.master;
  const Dtype source_dtype = source != nullptr ? Dtype::f32 : e.dtype;
  void* p = source != nullptr ? static_cast<void*>(source) : e.parameter;
  const bool copy_out = e.master != nullptr;  // the parameter is a rounded copy of the master
  const bool four = fits_four(p, source_dtype) && fits_four(e.parameter, e.dtype) &&
                    fits_four(e.gradient, e.gradient_dtype) &&
                    (e.shadow == nullptr || fits_four(e.shadow, e.shadow_dtype)) &&
                    (kStates < 1 || is_aligned(e.state[0], 16)) &&
                    (kStates < 2 || is_aligned(e.state[1], 16));
  const std::int64_t whole = four ? count / 4 * 4 : 0;
#pragma unroll 2
  for (std::int64_t k = 4 * threadIdx.x; k < whole; k += 4 * kChunkThreads) {
    const std::int64_t i = start + k;
    float4 w = load4(p, source_dtype, i);
    const float4 g = load4(e.gradient, e.gradient_dtype, i);
    float4 a = make_float4(0, 0, 0, 0), b = a;
    if (kStates > 0) a = load4(e.state[0], Dtype::f32, i);
    if (kStates > 1) b = load4(e.state[1], Dtype::f32, i);
    update(w.x, g.x, a.x, b.x);
    update(w.y, g.y, a.y, b.y);
    update(w.z, g.z, a.z, b.z);
    update(w.w, g.w, a.w, b.w);
    store4(p, source_dtype, i, w);
    if (copy_out) store4(e.parameter, e.dtype, i, w);
    if (e.shadow != nullptr) store4(e.shadow, e.shadow_dtype, i, w);
    if (kStates > 0) store4(e.state[0], Dtype::f32, i, a);
    if (kStates > 1) store4(e.state[1], Dtype::f32, i, b);
  }
  for (std::int64_t k = whole + threadIdx.x; k < count; k += kChunkThreads) {
    const std::int64_t i = start + k;
    float w = load_as<float>(p, source_dtype, i);
    const float g = load_as<float>(e.gradient, e.gradient_dtype, i);
    float a = kStates > 0 ? e.state[0][i] : 0, b = kStates > 1 ? e.state[1][i] : 0;
    update(w, g, a, b);
    store_as<float>(p, source_dtype, i, w);
    if (copy_out) store_as<float>(e.parameter, e.dtype, i, w);
    if (e.shadow != nullptr) store_as<float>(e.shadow, e.shadow_dtype, i, w);
    if (kStates > 0) e.state[0][i] = a;
    if (kStates > 1) e.state[1][i] = b;
  }
}

template <bool kMomentum>
__global__ void __launch_bounds__(kChunkThreads)
    sgd_step_kernel(const ParameterEntry* entries, std::int64_t count,
                    const OptimizerScalars* scalars, OptimizerFlags flags, unsigned plan) {
  const StepPlan step = step_plans[plan];
  if (step.skip) return;
  const std::int64_t chunk = blockIdx.x;
  const ParameterEntry e = entries[entry_of_chunk(entries, count, chunk)];
  if (e.gradient == nullptr) return;
  const OptimizerScalars s = *scalars;
  const bool first = kMomentum && *e.step == 1.0f;
  const float take = 1.0f - s.dampening;
  update_chunk<kMomentum ? 1 : 0>(e, (chunk - e.first_chunk) * kChunk,
                                  [&](float& p, float g, float& buffer, float&) {
                                    const float d = g * step.factor + s.weight_decay * p;
                                    if (!kMomentum) {
                                      p -= s.lr * d;
                                      return;
                                    }
                                    buffer = first ? d : s.momentum * buffer + take * d;
                                    p -= s.lr * (flags.nesterov ? d + s.momentum * buffer : buffer);
                                  });
}

__global__ void __launch_bounds__(kChunkThreads)
    adam_step_kernel(const ParameterEntry* entries, std::int64_t count,
                     const OptimizerScalars* scalars, OptimizerFlags flags, unsigned plan) {
  const StepPlan step = step_plans[plan];
  if (step.skip) return;
  const std::int64_t chunk = blockIdx.x;
  const ParameterEntry e = entries[entry_of_chunk(entries, count, chunk)];
  if (e.gradient == nullptr) return;
  const OptimizerScalars s = *scalars;
  __shared__ float shared_step_size, shared_correction;
  if (threadIdx.x == 0) {  // in double, as PyTorch computes them
    const double t = *e.step;
    shared_step_size = static_cast<float>(s.lr / (1 - pow(static_cast<double>(s.beta1), t)));
    shared_correction = static_cast<float>(1 / sqrt(1 - pow(static_cast<double>(s.beta2), t)));
  }
  __syncthreads();
  const float step_size = shared_step_size, correction = shared_correction;
  const float l2 = flags.decoupled ? 0.0f : s.weight_decay;
  const float decay =
      flags.decoupled ? static_cast<float>(1 - static_cast<double>(s.lr) * s.weight_decay) : 1.0f;
  const float take1 = 1.0f - s.beta1, take2 = 1.0f - s.beta2;
  update_chunk<2>(e, (chunk - e.first_chunk) * kChunk, [&](float& p, float g, float& m, float& v) {
    const float d = g * step.factor + l2 * p;
    m += take1 * (d - m);
    v = s.beta2 * v + take2 * (d * d);
    p = p * decay - step_size * (m / (sqrtf(v) * correction + s.eps));
  });
}

unsigned begin_step(const Stream& stream, const ParameterTable& table, OptimizerFlags flags,
                    const StepScalars& step) {
  const unsigned plan = next_plan();
  launch(begin_step_kernel, dim3(1), dim3(256), 0, static_cast<cudaStream_t>(stream.native()),
         table.device, table.count, step, flags.maximize ? -1.0f : 1.0f, plan);
  return plan;
}

}  // namespace

void decide_step(const Stream& stream, float* skip, const StepScalars& step) {
  const CudaDeviceGuard guard(stream.device());
  launch(decide_step_kernel, dim3(1), dim3(1), 0, static_cast<cudaStream_t>(stream.native()), skip,
         step);
}

void sgd_step(const Stream& stream, const ParameterTable& table, const OptimizerScalars* scalars,
              OptimizerFlags flags, const StepScalars& step) {
  if (table.chunks == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const bool momentum = table.host[0].state[0] != nullptr;
  for (std::int64_t i = 0; i < table.count; ++i) {
    MT_CHECK((table.host[i].state[0] != nullptr) == momentum &&
                 (!momentum || table.host[i].step != nullptr),
             "sgd_step: expected a momentum buffer and a step count for parameter ", i);
  }
  const unsigned plan = begin_step(stream, table, flags, step);
  launch(momentum ? sgd_step_kernel<true> : sgd_step_kernel<false>,
         dim3(blocks_for(table.chunks, 1)), dim3(kChunkThreads), 0,
         static_cast<cudaStream_t>(stream.native()), table.device, table.count, scalars, flags,
         plan);
}

void adam_step(const Stream& stream, const ParameterTable& table, const OptimizerScalars* scalars,
               OptimizerFlags flags, const StepScalars& step) {
  if (table.chunks == 0) return;
  const CudaDeviceGuard guard(stream.device());
  for (std::int64_t i = 0; i < table.count; ++i) {
    const ParameterEntry& e = table.host[i];
    MT_CHECK(e.gradient == nullptr ||
                 (e.state[0] != nullptr && e.state[1] != nullptr && e.step != nullptr),
             "adam_step: expected two moments and a step count for parameter ", i);
  }
  const unsigned plan = begin_step(stream, table, flags, step);
  launch(adam_step_kernel, dim3(blocks_for(table.chunks, 1)), dim3(kChunkThreads), 0,
         static_cast<cudaStream_t>(stream.native()), table.device, table.count, scalars, flags,
         plan);
}

}  // namespace mixtape::kernels::cuda
