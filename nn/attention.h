// Multi-head attention with its projections. SelfAttention is GPT-2's: one linear layer makes
// queries, keys and values, which attention reads in place, and one brings the heads together.
// MultiheadAttention also attends to another sequence, with PyTorch's parameters and names.
// Legend: B batch, T queries, S keys, C channels, H heads, G heads of keys and values, D = C / H.
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

struct MultiheadAttentionConfig {
  std::int64_t heads = 1, kv_heads = 0;  // kv_heads 0: as many as heads; fewer: grouped queries
  std::int64_t key_channels = 0, value_channels = 0;  // of what keys and values are made of; 0: C
  bool causal = false;                                // query t attends to keys s <= t
  bool bias = true;
  double dropout = 0;  // of the probabilities, in training
};

/// Query (B, T, C), key (B, S, key_channels), value (B, S, value_channels) -> (B, T, C), in
/// PyTorch's terms with batch_first. Its state_dict has the names and layouts of
/// torch.nn.MultiheadAttention: in_proj_weight, or q_proj_weight, k_proj_weight and v_proj_weight
/// where widths differ, in_proj_bias, out_proj.
///   nn::MultiheadAttention attention{512, {.heads = 8, .key_channels = 768, .value_channels =
///   768}};
///   Tensor y = attention(x, memory, memory);
class MultiheadAttention : public Module<MultiheadAttention> {
 public:
  explicit MultiheadAttention(std::int64_t channels, MultiheadAttentionConfig config = {});
  /// `mask` as in scaled_dot_product_attention: broadcastable to (B, H, T, S), floating and added,
  /// or bool, where true means attend (PyTorch's module means the opposite).
  Tensor forward(const Tensor& query, const Tensor& key, const Tensor& value,
                 const Tensor& mask = {});
  Tensor forward(const Tensor& x) { return forward(x, x, x); }
  std::string describe() const override;
  Tensor in_proj_weight;  // ((H + 2 G) D, C): rows of queries, keys, values; undefined if separate
  Tensor q_proj_weight, k_proj_weight, v_proj_weight;  // undefined if packed
  Tensor in_proj_bias;                                 // ((H + 2 G) D), undefined without
  Linear out_proj;                                     // C -> C

 private:
  struct Projected {
    Tensor q, k, v;  // (B, T, H D), (B, S, G D), (B, S, G D)
  };
  void add_projections(std::int64_t channels);
  Projected project(const Tensor& query, const Tensor& key, const Tensor& value) const;
  /// Rows [first, last) of the packed projection, or the weight `separate`, times x.
  Tensor rows(const Tensor& x, std::int64_t first, std::int64_t last, const Tensor& separate) const;
  Tensor heads(const Tensor& x, std::int64_t count) const;  // (B, N, count D) -> (B, count, N, D)
  std::int64_t query_rows() const { return config_.heads * columns_; }
  std::int64_t key_rows() const { return config_.kv_heads * columns_; }

  MultiheadAttentionConfig config_;
  std::int64_t columns_;  // D
};

}  // namespace mixtape::nn
