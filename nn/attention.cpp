#include "nn/attention.h"

namespace mixtape::nn {
namespace {

SelfAttentionConfig checked(std::int64_t channels, SelfAttentionConfig config) {
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  MT_CHECK(
      config.heads > 0 && config.kv_heads > 0 && config.heads % config.kv_heads == 0 &&
          channels > 0 && channels % config.heads == 0,
      "SelfAttention: expected channels to be a multiple of heads, and heads of kv_heads, got ",
      channels, ", ", config.heads, " and ", config.kv_heads);
  MT_CHECK(config.dropout >= 0 && config.dropout <= 1,
           "SelfAttention: expected a dropout in [0, 1], got ", config.dropout);
  return config;
}

std::int64_t packed_channels(std::int64_t channels, const SelfAttentionConfig& config) {
  return channels / config.heads * (config.heads + 2 * config.kv_heads);
}

}  // namespace

SelfAttention::SelfAttention(std::int64_t channels, SelfAttentionConfig config)
    : c_attn(channels, packed_channels(channels, checked(channels, config)), {.bias = config.bias}),
      c_proj(channels, channels, {.bias = config.bias}),
      config_(checked(channels, config)) {
  add("c_attn", c_attn);
  add("c_proj", c_proj);
}

Tensor SelfAttention::forward(const Tensor& x) {
  return c_proj(self_attention(c_attn(x), {.heads = config_.heads,
                                           .kv_heads = config_.kv_heads,
                                           .causal = config_.causal,
                                           .dropout = training() ? config_.dropout : 0}));
}

std::string SelfAttention::describe() const {
  return detail::concat("SelfAttention(", c_proj.weight.size(0), ", ", config_.heads, " heads",
                        config_.kv_heads == config_.heads
                            ? ""
                            : detail::concat(" on ", config_.kv_heads, " of keys and values"),
                        config_.causal ? ", causal" : "", ")");
}

}  // namespace mixtape::nn
