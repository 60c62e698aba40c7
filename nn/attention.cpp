#include "nn/attention.h"

#include "engine/autocast.h"
#include "nn/init.h"

namespace mixtape::nn {
namespace {

template <class Config>
Config checked(const char* module, std::int64_t channels, Config config) {
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  MT_CHECK(config.heads > 0 && config.kv_heads > 0 && config.heads % config.kv_heads == 0 &&
               channels > 0 && channels % config.heads == 0,
           module, ": expected channels to be a multiple of heads, and heads of kv_heads, got ",
           channels, ", ", config.heads, " and ", config.kv_heads);
  MT_CHECK(config.dropout >= 0 && config.dropout <= 1, module,
           ": expected a dropout in [0, 1], got ", config.dropout);
  return config;
}

/// What describe() says of heads.
template <class Config>
std::string heads_text(const Config& config) {
  return detail::concat(config.heads, " heads",
                        config.kv_heads == config.heads
                            ? ""
                            : detail::concat(" on ", config.kv_heads, " of keys and values"));
}

std::int64_t packed_channels(std::int64_t channels, const SelfAttentionConfig& config) {
  return channels / config.heads * (config.heads + 2 * config.kv_heads);
}

}  // namespace

SelfAttention::SelfAttention(std::int64_t channels, SelfAttentionConfig config)
    : c_attn(channels, packed_channels(channels, checked("SelfAttention", channels, config)),
             {.bias = config.bias}),
      c_proj(channels, channels, {.bias = config.bias}),
      config_(checked("SelfAttention", channels, config)) {
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
  return detail::concat("SelfAttention(", c_proj.weight.size(0), ", ", heads_text(config_),
                        config_.causal ? ", causal" : "", ")");
}

// ---- MultiheadAttention ------------------------------------------------------------------------

MultiheadAttention::MultiheadAttention(std::int64_t channels, MultiheadAttentionConfig config)
    : out_proj(channels, channels, {.bias = config.bias}),
      config_(checked("MultiheadAttention", channels, config)),
      columns_(channels / config.heads) {
  MT_CHECK(config.key_channels >= 0 && config.value_channels >= 0,
           "MultiheadAttention: expected key and value channels of at least 0, got ",
           config.key_channels, " and ", config.value_channels);
  if (config_.key_channels == 0) config_.key_channels = channels;
  if (config_.value_channels == 0) config_.value_channels = channels;
  add_projections(channels);
  add("out_proj", out_proj);
  if (out_proj.bias) init::constant(out_proj.bias, 0);
}

void MultiheadAttention::add_projections(std::int64_t channels) {
  const auto matrix = [&](const char* name, Tensor& weight, std::int64_t rows, std::int64_t in) {
    weight = empty({rows, in});
    init::xavier_uniform(weight);
    add_parameter(name, weight);
  };
  const std::int64_t all = query_rows() + 2 * key_rows();
  if (config_.key_channels == channels && config_.value_channels == channels) {
    matrix("in_proj_weight", in_proj_weight, all, channels);
  } else {
    matrix("q_proj_weight", q_proj_weight, query_rows(), channels);
    matrix("k_proj_weight", k_proj_weight, key_rows(), config_.key_channels);
    matrix("v_proj_weight", v_proj_weight, key_rows(), config_.value_channels);
  }
  if (!config_.bias) return;
  in_proj_bias = zeros({all});
  add_parameter("in_proj_bias", in_proj_bias);
}

Tensor MultiheadAttention::rows(const Tensor& x, std::int64_t first, std::int64_t last,
                                const Tensor& separate) const {
  const Tensor bias = in_proj_bias ? in_proj_bias.slice(0, first, last) : Tensor();
  if (separate) return linear(x, separate, bias);
  // The whole weight has a 16-bit copy under autocast; a slice of it would be cast anew.
  const Tensor weight = autocast_enabled() ? autocast_low(in_proj_weight) : in_proj_weight;
  return linear(x, weight.slice(0, first, last), bias);
}

MultiheadAttention::Projected MultiheadAttention::project(const Tensor& query, const Tensor& key,
                                                          const Tensor& value) const {
  const std::int64_t q = query_rows(), k = q + key_rows(), v = k + key_rows();
  if (!in_proj_weight || !key.same(value))
    return {rows(query, 0, q, q_proj_weight), rows(key, q, k, k_proj_weight),
            rows(value, k, v, v_proj_weight)};
  if (query.same(key)) {
    const Tensor all = linear(query, in_proj_weight, in_proj_bias);
    return {all.slice(2, 0, q), all.slice(2, q, k), all.slice(2, k, v)};
  }
  const Tensor both = rows(key, q, v, {});
  return {rows(query, 0, q, {}), both.slice(2, 0, k - q), both.slice(2, k - q, v - q)};
}

Tensor MultiheadAttention::heads(const Tensor& x, std::int64_t count) const {
  return x.reshape({x.size(0), x.size(1), count, columns_}).transpose(1, 2);
}

Tensor MultiheadAttention::forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const Tensor& mask) {
  MT_CHECK(query.dim() == 3 && key.dim() == 3 && value.dim() == 3 &&
               query.size(2) == out_proj.weight.size(0) && key.size(2) == config_.key_channels &&
               value.size(2) == config_.value_channels && key.size(0) == query.size(0) &&
               value.size(0) == query.size(0) && value.size(1) == key.size(1),
           "MultiheadAttention: expected a query (B, T, ", out_proj.weight.size(0),
           "), a key (B, S, ", config_.key_channels, ") and a value (B, S, ",
           config_.value_channels, "), got ", query.shape(), ", ", key.shape(), " and ",
           value.shape());
  const double dropout = training() ? config_.dropout : 0;
  if (in_proj_weight && query.same(key) && key.same(value) && !mask)
    return out_proj(
        self_attention(linear(query, in_proj_weight, in_proj_bias), {.heads = config_.heads,
                                                                     .kv_heads = config_.kv_heads,
                                                                     .causal = config_.causal,
                                                                     .dropout = dropout}));
  const auto [q, k, v] = project(query, key, value);
  const Tensor y = scaled_dot_product_attention(
      heads(q, config_.heads), heads(k, config_.kv_heads), heads(v, config_.kv_heads),
      {.causal = config_.causal, .mask = mask, .dropout = dropout});
  return out_proj(y.transpose(1, 2).reshape({query.size(0), query.size(1), query_rows()}));
}

std::string MultiheadAttention::describe() const {
  const std::int64_t channels = out_proj.weight.size(0);
  const bool widths = config_.key_channels != channels || config_.value_channels != channels;
  return detail::concat("MultiheadAttention(", channels, ", ", heads_text(config_),
                        widths ? detail::concat(", keys of ", config_.key_channels,
                                                " and values of ", config_.value_channels)
                               : "",
                        config_.causal ? ", causal" : "", ")");
}

}  // namespace mixtape::nn
