// Scaled dot-product attention without the T x S matrix of probabilities (Dao et al.,
// "FlashAttention", 2022): forward keeps one log-sum-exp a row, backward remakes the probabilities
// from it.
//
// Legend: B batch, H query heads, G key-value heads (H a multiple of G: head h reads h / (H / G)),
// T queries, S keys, D elements of a head. out = softmax(scale * q k^T + mask) v, softmax over the
// unmasked keys of a row. A row with none (masked whole, or S = 0) gives out 0, lse -inf, and no
// gradient, whatever reaches it.
//
// q, k, v, out and gradients: one floating dtype, any strides but 1 in the last dimension, so that
// they may lie in one packed projection. Arithmetic and sums are float (double for f64), rounded
// once on store; cuDNN rounds the probabilities to the storage type before their products. Results
// do not depend on the number of threads; cuDNN's backward adds in any order unless in
// deterministic mode (engine/determinism.h).
#pragma once

#include <string>

#include "engine/philox.h"
#include "kernels/kernel.h"

namespace mixtape::kernels {

struct AttentionArgs {
  View q = {};     // (B, H, T, D)
  View k = {};     // (B, G, S, D)
  View v = {};     // (B, G, S, D)
  View mask = {};  // optional, (B, H, T, S) by strides that may be 0; b8 (true: attend) or floating
                   // (added to the scaled products; -inf masks)
  bool causal = false;  // query t attends to keys s <= t, also where T != S
  double scale = 1;
  double dropout = 0;       // probability of dropping one of a row's probabilities
  PhiloxState random = {};  // element (b, h, t, s) draws number ((b H + h) T + t) S' + s of
                            // random's stream, S' = S rounded up to a multiple of 4
};

struct AttentionForward {
  View out = {};  // (B, H, T, D)
  View lse = {};  // (B, H, T) contiguous, f32 (f64 for f64), natural logarithm; optional
  AttentionArgs args;
};

struct AttentionBackward {
  View dq = {}, dk = {}, dv = {};  // out, each optional; like q, k, v
  View dout = {}, out = {}, lse = {};
  AttentionArgs args;
};

/// Who computes attention on CUDA. cuDNN's fused kernels take f16 and bf16 with D a multiple of 8
/// up to 128, no mask and no dropout; our own blocked kernel takes everything with D <= 256.
enum class AttentionBackend : std::uint8_t {
  automatic,  // cuDNN where it can
  own,
  cudnn,  // an error where cuDNN cannot
};
/// Process-wide; starts as the environment variable MIXTAPE_ATTENTION says (auto, own or cudnn).
void set_attention_backend(AttentionBackend backend);
AttentionBackend attention_backend();
/// What computes the call, for reports: "cpu", "own", "cudnn"; where cuDNN was passed over, "own
/// (cuDNN: reason)".
std::string attention_choice(const AttentionForward& args);
std::string attention_choice(const AttentionBackward& args);

/// Elements that one call draws from the generator.
std::int64_t attention_draws(const AttentionArgs& args);

/// Scratch. On CUDA the first call with a shape may build a library's plan (milliseconds), which
/// has to happen before a stream is captured. cuDNN's backward on Hopper may take 2 B H T S bytes:
/// up to 256 MiB, in deterministic mode without a limit.
std::size_t attention_forward_workspace_bytes(const Stream& stream, const AttentionForward& args);
std::size_t attention_backward_workspace_bytes(const Stream& stream, const AttentionBackward& args);

#define MT_DECLARE_ATTENTION                                                                  \
  void attention_forward(const Stream&, const AttentionForward& args, Workspace workspace);   \
  void attention_backward(const Stream&, const AttentionBackward& args, Workspace workspace); \
  std::size_t attention_forward_workspace_bytes(const Stream&, const AttentionForward& args); \
  std::size_t attention_backward_workspace_bytes(const Stream&, const AttentionBackward& args);

namespace cpu {
MT_DECLARE_ATTENTION
}
namespace cuda {
MT_DECLARE_ATTENTION
std::string attention_choice(const AttentionForward& args);
std::string attention_choice(const AttentionBackward& args);
}  // namespace cuda
#undef MT_DECLARE_ATTENTION

inline constexpr Kernel attention_forward{"attention_forward", cpu::attention_forward,
                                          MT_CUDA(cuda::attention_forward)};
inline constexpr Kernel attention_backward{"attention_backward", cpu::attention_backward,
                                           MT_CUDA(cuda::attention_backward)};

namespace detail {
/// Throws unless shapes, dtypes and strides are what the contract says.
void check_attention(const char* op, const AttentionArgs& args);
void check_attention(const AttentionForward& args);
void check_attention(const AttentionBackward& args);
}  // namespace detail

}  // namespace mixtape::kernels
