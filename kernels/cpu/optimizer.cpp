// Optimizer and loss-scaling kernels on the CPU: one parallel loop over all chunks of all tensors.
//
// A chunk is worked through in blocks that stay in the first-level cache, so that each byte of
// parameter, gradient and state crosses the memory bus once. Sums of squares are kept in double:
// it costs nothing in a loop bound by memory, and a norm of 10^8 elements stays exact to float.
#include "kernels/optimizer.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "engine/thread_pool.h"
#include "kernels/cpu/convert.h"
#include "kernels/optimizer_math.h"

namespace mixtape::kernels::cpu {
namespace {

constexpr std::int64_t kBlock = 1024;     // elements in the inner loops
constexpr std::int64_t kGrainChunks = 2;  // least work worth a thread

/// Calls f(entry, begin, n) for the chunks of `table`, in parallel; any entry type with first_chunk
/// and numel.
template <class Table, class F>
void for_each_chunk(const Table& table, F&& f) {
  parallel_for(0, table.chunks, kGrainChunks, [&](std::int64_t begin, std::int64_t end) {
    const auto* last = table.host + table.count;
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      const auto* entry =
          std::upper_bound(table.host, last, chunk,
                           [](std::int64_t c, const auto& e) { return c < e.first_chunk; }) -
          1;
      const std::int64_t start = (chunk - entry->first_chunk) * kChunk;
      f(*entry, start, std::min(kChunk, entry->numel - start), chunk);
    }
  });
}

bool skipped(const StepScalars& step) {
  return (step.found_inf != nullptr && *step.found_inf != 0) ||
         (step.device_error != nullptr && is_pending(*step.device_error));
}

/// What every gradient of this step is multiplied by.
float gradient_factor(const StepScalars& step) {
  return (step.inv_scale != nullptr ? *step.inv_scale : 1.0f) *
         (step.clip_factor != nullptr ? *step.clip_factor : 1.0f);
}

/// Runs update(p, g, offset, n) on fp32 blocks of one chunk and writes the results back to the
/// parameter and its 16-bit shadow. The master copy, where there is one, is what is updated.
template <class Update>
void update_chunk(const ParameterEntry& e, std::int64_t start, std::int64_t count,
                  Update&& update) {
  alignas(64) float parameter[kBlock], gradient[kBlock];
  for (std::int64_t i = start; i < start + count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, start + count - i);
    void* stored = element_address(e.parameter, e.dtype, i);
    float* p = parameter;
    if (e.master != nullptr)
      p = e.master + i;
    else if (e.dtype == Dtype::f32)
      p = static_cast<float*>(stored);
    else
      load_elements(e.dtype, stored, p, n);
    const void* source = element_address(e.gradient, e.gradient_dtype, i);
    const float* g = static_cast<const float*>(source);
    if (e.gradient_dtype != Dtype::f32) {
      load_elements(e.gradient_dtype, source, gradient, n);
      g = gradient;
    }
    update(p, g, i, n);
    if (p != stored) store_elements(e.dtype, stored, p, n);
    if (e.shadow != nullptr)
      store_elements(e.shadow_dtype, element_address(e.shadow, e.shadow_dtype, i), p, n);
  }
}

void advance_steps(const ParameterTable& table) {
  for (std::int64_t i = 0; i < table.count; ++i)
    if (table.host[i].gradient != nullptr && table.host[i].step != nullptr)
      *table.host[i].step += 1.0f;
}

struct SgdConstants {
  float factor, lr, weight_decay, momentum, one_minus_dampening;
  bool nesterov;
};

void sgd_plain(float* __restrict p, const float* __restrict g, std::int64_t n, SgdConstants k) {
  for (std::int64_t i = 0; i < n; ++i) p[i] -= k.lr * (g[i] * k.factor + k.weight_decay * p[i]);
}

void sgd_momentum(float* __restrict p, const float* __restrict g, float* __restrict buffer,
                  std::int64_t n, SgdConstants k, bool first) {
  const float keep = first ? 0.0f : k.momentum, take = first ? 1.0f : k.one_minus_dampening;
  const float along = k.nesterov ? 1.0f : 0.0f, of_buffer = k.nesterov ? k.momentum : 1.0f;
  for (std::int64_t i = 0; i < n; ++i) {
    const float d = g[i] * k.factor + k.weight_decay * p[i];
    const float b = first ? d : keep * buffer[i] + take * d;
    buffer[i] = b;
    p[i] -= k.lr * (along * d + of_buffer * b);
  }
}

struct AdamConstants {
  float factor, beta1, beta2, eps, l2, decay;  // l2 is added to g; p is multiplied by decay
  float step_size, inv_sqrt_correction2;
};

/// Bias corrections by this parameter's own step count, in double as PyTorch computes them.
AdamConstants adam_constants(const OptimizerScalars& s, OptimizerFlags flags, float factor,
                             float steps_taken) {
  const double t = static_cast<double>(steps_taken) + 1;
  AdamConstants k{};
  k.factor = factor;
  k.beta1 = s.beta1;
  k.beta2 = s.beta2;
  k.eps = s.eps;
  k.l2 = flags.decoupled ? 0.0f : s.weight_decay;
  k.decay =
      flags.decoupled ? static_cast<float>(1 - static_cast<double>(s.lr) * s.weight_decay) : 1.0f;
  k.step_size = static_cast<float>(s.lr / (1 - std::pow(static_cast<double>(s.beta1), t)));
  k.inv_sqrt_correction2 =
      static_cast<float>(1 / std::sqrt(1 - std::pow(static_cast<double>(s.beta2), t)));
  return k;
}

void adam(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
          std::int64_t n, AdamConstants k) {
  const float take1 = 1.0f - k.beta1, take2 = 1.0f - k.beta2;
  for (std::int64_t i = 0; i < n; ++i) {
    const float d = g[i] * k.factor + k.l2 * p[i];
    m[i] += take1 * (d - m[i]);
    v[i] = k.beta2 * v[i] + take2 * (d * d);
    const float denominator = std::sqrt(v[i]) * k.inv_sqrt_correction2 + k.eps;
    p[i] = p[i] * k.decay - k.step_size * (m[i] / denominator);
  }
}

/// Multiplies by `factor` in place and says whether a value before that was inf or NaN.
template <class T>
bool scale_and_check(T* data, std::int64_t n, float factor) {
  using C = compute_t<T>;
  int bad = 0;
  C block[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t m = std::min(kBlock, n - i);
    convert(data + i, block, m);
    for (std::int64_t j = 0; j < m; ++j) bad |= block[j] - block[j] != 0;  // inf - inf is NaN
    if (factor == 1) continue;
    for (std::int64_t j = 0; j < m; ++j) block[j] *= static_cast<C>(factor);
    convert(block, data + i, m);
  }
  return bad != 0;
}

template <class T>
double sum_of_squares(const T* data, std::int64_t n) {
  constexpr int kLanes = 32;
  double lane[kLanes] = {};
  compute_t<T> block[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t m = std::min(kBlock, n - i);
    convert(data + i, block, m);
    std::int64_t j = 0;
    for (; j + kLanes <= m; j += kLanes)
      for (int l = 0; l < kLanes; ++l) {
        const double x = block[j + l];
        lane[l] += x * x;
      }
    for (; j < m; ++j) lane[0] += static_cast<double>(block[j]) * block[j];
  }
  double total = 0;
  for (double x : lane) total += x;
  return total;
}

}  // namespace

void decide_step(const Stream&, float* skip, const StepScalars& step) {
  *skip = skipped(step) ? 1.0f : 0.0f;
}

void sgd_step(const Stream&, const ParameterTable& table, const OptimizerScalars* scalars,
              OptimizerFlags flags, const StepScalars& step) {
  if (skipped(step)) return;
  const OptimizerScalars& s = *scalars;
  const float sign = flags.maximize ? -1.0f : 1.0f;
  const SgdConstants k{sign * gradient_factor(step),
                       s.lr,
                       s.weight_decay,
                       s.momentum,
                       1 - s.dampening,
                       flags.nesterov};
  if (k.momentum != 0)
    for (std::int64_t i = 0; i < table.count; ++i)
      MT_CHECK(table.host[i].gradient == nullptr ||
                   (table.host[i].state[0] != nullptr && table.host[i].step != nullptr),
               "sgd_step: expected a momentum buffer and a step count for parameter ", i);
  for_each_chunk(
      table, [&](const ParameterEntry& e, std::int64_t start, std::int64_t count, std::int64_t) {
        if (e.gradient == nullptr) return;
        update_chunk(e, start, count,
                     [&](float* p, const float* g, std::int64_t offset, std::int64_t n) {
                       if (k.momentum == 0)
                         sgd_plain(p, g, n, k);
                       else
                         sgd_momentum(p, g, e.state[0] + offset, n, k, *e.step == 0);
                     });
      });
  advance_steps(table);
}

void adam_step(const Stream&, const ParameterTable& table, const OptimizerScalars* scalars,
               OptimizerFlags flags, const StepScalars& step) {
  if (skipped(step)) return;
  for (std::int64_t i = 0; i < table.count; ++i) {
    const ParameterEntry& e = table.host[i];
    MT_CHECK(e.gradient == nullptr ||
                 (e.state[0] != nullptr && e.state[1] != nullptr && e.step != nullptr),
             "adam_step: expected two moments and a step count for parameter ", i);
  }
  const float factor = (flags.maximize ? -1.0f : 1.0f) * gradient_factor(step);
  for_each_chunk(
      table, [&](const ParameterEntry& e, std::int64_t start, std::int64_t count, std::int64_t) {
        if (e.gradient == nullptr) return;
        const AdamConstants k = adam_constants(*scalars, flags, factor, *e.step);
        update_chunk(e, start, count,
                     [&](float* p, const float* g, std::int64_t offset, std::int64_t n) {
                       adam(p, g, e.state[0] + offset, e.state[1] + offset, n, k);
                     });
      });
  advance_steps(table);
}

void gradient_unscale(const Stream&, const GradientTable& table, float* found_inf,
                      const float* inv_scale, float* per_range) {
  if (per_range != nullptr) std::fill(per_range, per_range + table.count, 0.0f);
  const float factor = inv_scale != nullptr ? *inv_scale : 1.0f;
  for_each_chunk(
      table, [&](const GradientRange& r, std::int64_t start, std::int64_t count, std::int64_t) {
        const bool bad = dispatch_floating("gradient_unscale", r.dtype, [&](auto tag) {
          using T = typename decltype(tag)::type;
          return scale_and_check(static_cast<T*>(r.data) + start, count, factor);
        });
        if (!bad) return;
        std::atomic_ref(*found_inf).store(1.0f, std::memory_order_relaxed);
        if (per_range != nullptr)
          std::atomic_ref(per_range[&r - table.host]).store(1.0f, std::memory_order_relaxed);
      });
}

void gradient_norm(const Stream&, const GradientTable& table, float* norm, const float* inv_scale,
                   Workspace workspace) {
  MT_CHECK(workspace.bytes >= static_cast<std::size_t>(table.chunks) * sizeof(double),
           "gradient_norm: expected a workspace of ", table.chunks * sizeof(double), " bytes, got ",
           workspace.bytes);
  double* partial = static_cast<double*>(workspace.data);
  for_each_chunk(table, [&](const GradientRange& r, std::int64_t start, std::int64_t count,
                            std::int64_t chunk) {
    partial[chunk] = dispatch_floating("gradient_norm", r.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      return sum_of_squares(static_cast<const T*>(r.data) + start, count);
    });
  });
  double total = 0;
  for (std::int64_t i = 0; i < table.chunks; ++i) total += partial[i];
  *norm = static_cast<float>(std::sqrt(total) * (inv_scale != nullptr ? *inv_scale : 1.0f));
}

void clip_factor(const Stream&, float* factor, const float* norm, float max_norm) {
  *factor = optimizer_math::clip_factor(*norm, max_norm);
}

void gradient_scale(const Stream&, const GradientTable& table, const float* factor) {
  for_each_chunk(table,
                 [&](const GradientRange& r, std::int64_t start, std::int64_t count, std::int64_t) {
                   dispatch_floating("gradient_scale", r.dtype, [&](auto tag) {
                     using T = typename decltype(tag)::type;
                     scale_and_check(static_cast<T*>(r.data) + start, count, *factor);
                   });
                 });
}

void scaler_update(const Stream&, ScalerState* state, const ScalerPolicy& policy) {
  *state = optimizer_math::next_scaler_state(*state, policy);
}

void set_scalars(const Stream&, OptimizerScalars* target, const OptimizerScalars& values) {
  *target = values;
}
void set_scaler(const Stream&, ScalerState* target, const ScalerState& values) { *target = values; }

}  // namespace mixtape::kernels::cpu
