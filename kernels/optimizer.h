// Optimizer, gradient-scaling and clipping kernels over many tensors in one launch.
//
// A table lists the tensors. On CUDA it lies in device memory (the caller uploads it once, and
// again only when an entry changes); on the CPU it is the host array itself. Everything that
// changes from step to step lies in small device blocks, so that a step can be captured and
// replayed: learning rate, betas, step counts, loss scale, found-inf, clip factor. All arithmetic
// and all state is fp32.
#pragma once

#include "engine/device_error.h"
#include "kernels/kernel.h"

namespace mixtape::kernels {

/// One parameter. Pointers of absent parts are null. `numel` elements each, contiguous.
struct ParameterEntry {
  void* parameter;  // `dtype`; written
  float* master;    // fp32 master copy of a 16-bit parameter: then it is updated, and rounded to
                    // parameter
  const void* gradient;  // `gradient_dtype`
  float* state[2];       // SGD: momentum buffer; Adam: first and second moment
  void* shadow;          // 16-bit copy for autocast (`shadow_dtype`), written with the update
  float* step;           // 1 element: steps this parameter has taken; not advanced when skipped
  std::int64_t numel;
  std::int64_t first_chunk;  // sum of earlier entries' chunks; a chunk is kChunk elements
  Dtype dtype, gradient_dtype, shadow_dtype;
};
inline constexpr std::int64_t kChunk = 8192;

struct ParameterTable {
  const ParameterEntry* host = nullptr;  // `count` entries
  const ParameterEntry* device =
      nullptr;  // the same in device memory (the host pointer for the CPU)
  std::int64_t count = 0, chunks = 0;
};

/// Hyper-parameters of one group, in device memory.
struct OptimizerScalars {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, momentum = 0, dampening = 0;
  float reserved = 0;
};
struct OptimizerFlags {
  bool nesterov = false;  // SGD
  bool decoupled = true;  // AdamW (Loshchilov and Hutter 2019); false: Adam with L2 in the gradient
  bool maximize = false;
};

/// Device scalars that accompany a step; null where unused. A non-zero *found_inf or a pending
/// device error skips the whole launch; decide_step makes one decision for several launches.
/// Gradients are multiplied by *inv_scale and by *clip_factor.
struct StepScalars {
  const float* found_inf = nullptr;
  const float* inv_scale = nullptr;
  const float* clip_factor = nullptr;
  const DeviceError* device_error = nullptr;
};

/// A contiguous run of gradient elements.
struct GradientRange {
  void* data;
  std::int64_t numel;
  std::int64_t first_chunk;
  Dtype dtype;
};
struct GradientTable {
  const GradientRange* host = nullptr;
  const GradientRange* device = nullptr;
  std::int64_t count = 0, chunks = 0;
};

/// Loss-scale state machine, in device memory (GradScaler).
struct ScalerState {
  float scale, inv_scale;
  float growth_tracker;  // consecutive steps without inf
  float found_inf;       // of the update in progress
  float skipped_in_a_row;
};
struct ScalerPolicy {
  float growth_factor = 2, backoff_factor = 0.5f, min_scale = 0x1p-126f, max_scale = 0x1p127f;
  int growth_interval = 2000;
};

std::size_t gradient_norm_workspace_bytes(Device device, std::int64_t chunks);

#define MT_DECLARE_OPTIMIZER                                                                       \
  /* *skip = 1 if a launch with `step` would be skipped now, else 0; to be their found_inf. */     \
  void decide_step(const Stream&, float* skip, const StepScalars& step);                           \
  /* g' = g * inv_scale * clip_factor; PyTorch's SGD rule: at step count 0 the momentum buffer */  \
  /* becomes g' + weight_decay * p. A parameter without gradient is left as it is. */              \
  void sgd_step(const Stream&, const ParameterTable& table, const OptimizerScalars* scalars,       \
                OptimizerFlags flags, const StepScalars& step);                                    \
  /* Adam (Kingma and Ba 2015) or AdamW with bias correction by each parameter's own step count.   \
   */                                                                                              \
  void adam_step(const Stream&, const ParameterTable& table, const OptimizerScalars* scalars,      \
                 OptimizerFlags flags, const StepScalars& step);                                   \
  /* Sets *found_inf to 1 (never to 0) when any gradient is inf or NaN; multiplies gradients by */ \
  /* *inv_scale in place unless it is null. per_range, optional: count floats, all written: 1 */   \
  /* where that range held an inf or NaN, else 0. */                                               \
  void gradient_unscale(const Stream&, const GradientTable& table, float* found_inf,               \
                        const float* inv_scale, float* per_range);                                 \
  /* *norm = L2 norm of all ranges in fp32, times *inv_scale unless null; no ranges give 0. */     \
  void gradient_norm(const Stream&, const GradientTable& table, float* norm,                       \
                     const float* inv_scale, Workspace workspace);                                 \
  /* *clip_factor = min(1, max_norm / (*norm + 1e-6)); NaN and inf norms give that value as is. */ \
  void clip_factor(const Stream&, float* factor, const float* norm, float max_norm);               \
  /* gradients *= *factor, in place. */                                                            \
  void gradient_scale(const Stream&, const GradientTable& table, const float* factor);             \
  /* PyTorch's update rule on `state` (backoff on found_inf, growth after growth_interval clean */ \
  /* steps, both clamped), then found_inf = 0 and inv_scale = 1 / scale. */                        \
  void scaler_update(const Stream&, ScalerState* state, const ScalerPolicy& policy);               \
  /* Writes host values to device memory in stream order (values travel as kernel arguments). */   \
  void set_scalars(const Stream&, OptimizerScalars* target, const OptimizerScalars& values);       \
  void set_scaler(const Stream&, ScalerState* target, const ScalerState& values);

namespace cpu {
MT_DECLARE_OPTIMIZER
}
namespace cuda {
MT_DECLARE_OPTIMIZER
}
#undef MT_DECLARE_OPTIMIZER

#define MT_KERNEL(name) inline constexpr Kernel name{#name, cpu::name, MT_CUDA(cuda::name)};
MT_KERNEL(decide_step)
MT_KERNEL(sgd_step)
MT_KERNEL(adam_step)
MT_KERNEL(gradient_unscale)
MT_KERNEL(gradient_norm)
MT_KERNEL(clip_factor)
MT_KERNEL(gradient_scale)
MT_KERNEL(scaler_update)
MT_KERNEL(set_scalars)
MT_KERNEL(set_scaler)
#undef MT_KERNEL

}  // namespace mixtape::kernels
