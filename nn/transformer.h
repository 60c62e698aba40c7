// A transformer block with its norms before attention and feed-forward layers (pre-norm, as GPT-2).
//
// Blocks in a row hand on a Residual: each addition to the stream and the LayerNorm that reads it
// next are one pass over memory, also across two blocks.
//
//   Tensor y = block(x);                                      // one block by itself
//   Residual r = {blocks[0].ln_1(x), x};                      // many
//   for (std::size_t i = 0; i < blocks.size(); ++i)
//     r = blocks[i](r, i + 1 < blocks.size() ? blocks[i + 1].ln_1 : ln_f);
//
// Legend: B batch, T positions, C channels.
#pragma once

#include "nn/attention.h"

namespace mixtape::nn {

/// The residual stream and what the next layer reads of it.
struct Residual {
  Tensor normalized, sum;  // (B, T, C)
};
/// Adds `update` to the stream and normalises, in one pass over memory. The sum keeps the stream's
/// dtype if that is the wider, and what is normalised has the update's: a float32 stream under
/// autocast stays float32.
Residual add_and_normalize(const Tensor& stream, const Tensor& update, const LayerNorm& norm);

/// c_proj(act(c_fc(x))): (.., C) -> (.., C); the activation's derivative is part of a product.
struct MlpConfig {
  Act act = Act::gelu_tanh;
  bool bias = true;
  bool recompute_activation = false;  // less memory, a little more time (MlpOptions)
};
class Mlp : public Module<Mlp> {
 public:
  Mlp(std::int64_t channels, std::int64_t hidden, MlpConfig config = {});
  Tensor forward(const Tensor& x) {
    return mlp(x, c_fc.weight, c_fc.bias, c_proj.weight, c_proj.bias,
               {.act = config_.act, .recompute_activation = config_.recompute_activation});
  }
  std::string describe() const override;
  Linear c_fc, c_proj;  // C -> hidden -> C

 private:
  MlpConfig config_;
};

struct TransformerBlockConfig {
  std::int64_t heads = 1, kv_heads = 0;  // kv_heads 0: as many as heads
  std::int64_t hidden = 0;               // of the feed-forward layers; 0: 4 C
  Act act = Act::gelu_tanh;
  bool causal = true;
  bool bias = true;
  double dropout = 0;  // of attention's probabilities and of what is added to the stream
  double eps = 1e-5;
  bool recompute_activation = false;  // of the feed-forward layers (MlpOptions)
};

/// y = x + attn(ln_1(x)), z = y + mlp(ln_2(y)): (B, T, C) -> the same.
///   nn::TransformerBlock block{768, {.heads = 12}};
class TransformerBlock : public Module<TransformerBlock> {
 public:
  explicit TransformerBlock(std::int64_t channels, TransformerBlockConfig config = {});
  Tensor forward(const Tensor& x);
  /// Takes the stream normalised by ln_1, and returns it normalised by `next`.
  Residual forward(const Residual& r, const LayerNorm& next);
  LayerNorm ln_1;
  SelfAttention attn;
  LayerNorm ln_2;
  Mlp mlp;
  Dropout dropout;
};

}  // namespace mixtape::nn
