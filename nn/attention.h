// Multi-head self-attention with its projections, as in GPT-2: one linear layer makes queries, keys
// and values, which attention reads in place, and one brings the heads together.
// Legend: B batch, T positions, C channels, D channels of a head.
#pragma once

#include "nn/layers.h"

namespace mixtape::nn {

struct SelfAttentionConfig {
  std::int64_t heads = 1, kv_heads = 0;  // kv_heads 0: as many as heads; fewer: grouped queries
  bool causal = true;
  bool bias = true;
  double dropout = 0;  // of the probabilities, in training
};

/// (B, T, C) -> (B, T, C) with D = C / heads.
///   nn::SelfAttention attention{768, {.heads = 12}};
class SelfAttention : public Module<SelfAttention> {
 public:
  explicit SelfAttention(std::int64_t channels, SelfAttentionConfig config = {});
  Tensor forward(const Tensor& x);
  std::string describe() const override;
  Linear c_attn;  // C -> (heads + 2 kv_heads) D
  Linear c_proj;  // C -> C

 private:
  SelfAttentionConfig config_;
};

}  // namespace mixtape::nn
