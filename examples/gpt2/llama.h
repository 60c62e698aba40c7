// A Llama-style language model (Touvron et al. 2023) with the interface of gpt2.h: RMSNorm on a
// residual stream, rotary positions, grouped-query attention, SwiGLU, no biases, an untied head.
// Projections that read the same input are one product: queries, keys and values, and gate and up.
//
// Legend: B batch, T tokens, C channels, H query heads, G key and value heads, D = C / H, V
// vocabulary.
#pragma once

#include <mixtape.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace llama {

namespace mt = mixtape;

struct Config {
  std::int64_t layers = 12, heads = 12, kv_heads = 4, channels = 768, hidden = 2048;
  std::int64_t context = 1024, vocabulary = 50304;
  double rotary_base = 10000, eps = 1e-5;
  bool recompute = false;  // blocks keep their inputs only and run again in backward
};

/// The residual stream and what the next layer reads of it.
struct Residual {
  mt::Tensor normalized, sum;  // (B, T, C)
};

class Attention : public mt::nn::Module<Attention> {
 public:
  explicit Attention(const Config& c)
      : qkv_proj(c.channels, (c.heads + 2 * c.kv_heads) * (c.channels / c.heads), {.bias = false}),
        o_proj(c.channels, c.channels, {.bias = false}),
        config_(c) {
    MT_CHECK(c.channels % c.heads == 0 && c.heads % c.kv_heads == 0, "llama: expected ", c.heads,
             " heads to divide ", c.channels, " channels and ", c.kv_heads,
             " key and value heads to divide the heads");
    add("qkv_proj", qkv_proj);
    add("o_proj", o_proj);
  }
  mt::Tensor forward(const mt::Tensor& x) {  // (B, T, C) -> (B, T, C)
    const std::int64_t h = config_.heads, g = config_.kv_heads;
    const mt::Tensor qkv =
        qkv_proj(x).reshape({x.size(0), x.size(1), h + 2 * g, config_.channels / h});
    const mt::Tensor turned =
        mt::rotary_embedding(qkv, {.heads = h + g, .base = config_.rotary_base});
    return o_proj(mt::self_attention(turned.flatten(2), {.heads = h, .kv_heads = g}));
  }
  mt::nn::Linear qkv_proj, o_proj;

 private:
  Config config_;
};

class Block : public mt::nn::Module<Block> {
 public:
  explicit Block(const Config& c)
      : input_norm({c.channels}, {.eps = c.eps}),
        attention(c),
        post_attention_norm({c.channels}, {.eps = c.eps}),
        mlp(c.channels, c.hidden),
        eps_(c.eps) {
    add("input_norm", input_norm);
    add("attention", attention);
    add("post_attention_norm", post_attention_norm);
    add("mlp", mlp);
  }
  /// Takes the stream normalised by input_norm, and returns it normalised by `next`.
  Residual forward(const Residual& r, const mt::nn::RmsNorm& next) {
    const Residual middle = add_and_normalize(r.sum, attention(r.normalized), post_attention_norm);
    return add_and_normalize(middle.sum, mlp(middle.normalized), next);
  }
  mt::nn::RmsNorm input_norm;
  Attention attention;
  mt::nn::RmsNorm post_attention_norm;
  mt::nn::SwiGlu mlp;

 private:
  /// Adds `update` to the stream and normalises, in one pass over memory.
  Residual add_and_normalize(const mt::Tensor& stream, const mt::Tensor& update,
                             const mt::nn::RmsNorm& norm) const {
    const auto r = mt::add_rms_norm(stream, update, norm.weight, eps_);
    return {r.normalized, r.sum};
  }
  double eps_;
};

class Llama : public mt::nn::Module<Llama> {
 public:
  explicit Llama(const Config& c)
      : config(c),
        embed_tokens(c.vocabulary, c.channels),
        norm({c.channels}, {.eps = c.eps}),
        lm_head(c.channels, c.vocabulary, {.bias = false}) {
    add("embed_tokens", embed_tokens);
    add("layers", layers);
    for (std::int64_t i = 0; i < c.layers; ++i) layers.emplace_back(c);
    add("norm", norm);
    add("lm_head", lm_head);
    initialize();
  }

  /// Tokens (B, T) -> the final normalised stream (B, T, C).
  mt::Tensor features(const mt::Tensor& tokens) {
    MT_CHECK(tokens.size(1) <= config.context, "llama: expected at most ", config.context,
             " tokens, got ", tokens.size(1));
    // Under autocast the stream is 16-bit from the start.
    const mt::Tensor x = mt::embedding(low(embed_tokens.weight), tokens);
    if (config.layers == 0) return norm(x);
    Residual r = {layers[0].input_norm(x), x};
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const mt::nn::RmsNorm& next = i + 1 < layers.size() ? layers[i + 1].input_norm : norm;
      r = config.recompute ? recomputed(layers[i], r, next) : layers[i](r, next);
    }
    return r.normalized;
  }
  /// What the features say of the next token: (.., C) -> logits (.., V).
  mt::Tensor head(const mt::Tensor& x) { return lm_head(x); }
  mt::Tensor forward(const mt::Tensor& tokens) { return head(features(tokens)); }  // (B, T, V)
  /// Mean cross-entropy of the next tokens, (B, T) against (B, T).
  mt::Tensor loss(const mt::Tensor& tokens, const mt::Tensor& targets) {
    return mt::cross_entropy(forward(tokens).reshape({targets.numel(), config.vocabulary}),
                             targets.reshape({targets.numel()}));
  }

  Config config;
  mt::nn::Embedding embed_tokens;
  mt::nn::ModuleList<Block> layers;
  mt::nn::RmsNorm norm;
  mt::nn::Linear lm_head;

 private:
  static mt::Tensor low(const mt::Tensor& weight) {
    return mt::autocast_enabled() ? mt::autocast_low(weight) : weight;
  }
  static Residual recomputed(Block& block, const Residual& r, const mt::nn::RmsNorm& next) {
    const std::vector<mt::Tensor> out = mt::nn::checkpoint(
        [&block, &next](const mt::Tensor& normalized, const mt::Tensor& sum) {
          const Residual y = block(Residual{normalized, sum}, next);
          return std::vector<mt::Tensor>{y.normalized, y.sum};
        },
        r.normalized, r.sum);
    return {out[0], out[1]};
  }
  /// Normal(0, 0.02), and smaller by the square root of the residual additions where a layer writes
  /// to the stream.
  void initialize() {
    const mt::NoGrad no_grad;
    const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
    for (auto& [name, parameter] : named_parameters()) {
      if (parameter.dim() < 2) continue;
      const bool writes = name.ends_with("o_proj.weight") || name.ends_with("down.weight");
      parameter.normal_(0, writes ? residual : 0.02);
    }
  }
};

}  // namespace llama
