// GPT-2 (Radford et al. 2019), as a user writes it: pre-LayerNorm blocks on a residual stream, the
// head tied to the token embedding. Names of parameters are Hugging Face's.
//
// Legend: B batch, T tokens, C channels, V vocabulary.
#pragma once

#include <mixtape.h>

#include <cmath>
#include <cstdint>

namespace gpt2 {

namespace mt = mixtape;

struct Config {
  std::int64_t layers = 12, heads = 12, channels = 768, context = 1024;
  std::int64_t vocabulary = 50304;  // 50257 tokens, rounded up to whole tiles of the head
  double dropout = 0;
  bool recompute_activation = false;  // of the feed-forward layers: less memory, a little more time
  bool checkpoint = false;            // blocks keep their inputs only and run again in backward
};

class Gpt2 : public mt::nn::Module<Gpt2> {
 public:
  explicit Gpt2(const Config& c)
      : config(c), wte(c.vocabulary, c.channels), wpe(c.context, c.channels), ln_f({c.channels}) {
    add("wte", wte);
    add("wpe", wpe);
    add("h", h);
    for (std::int64_t i = 0; i < c.layers; ++i)
      h.emplace_back(c.channels, mt::nn::TransformerBlockConfig{
                                     .heads = c.heads,
                                     .dropout = c.dropout,
                                     .recompute_activation = c.recompute_activation});
    add("ln_f", ln_f);
    initialize();
  }

  /// Tokens (B, T) -> the final normalised stream (B, T, C).
  mt::Tensor features(const mt::Tensor& tokens) {
    const std::int64_t t = tokens.size(1);
    MT_CHECK(t <= config.context, "gpt2: expected at most ", config.context, " tokens, got ", t);
    // Under autocast the stream is 16-bit from the start: the tied head needs that copy anyway.
    const mt::Tensor x = mt::embedding(low(wte.weight), tokens) + low(wpe.weight).slice(0, 0, t);
    mt::nn::Residual r = {h[0].ln_1(x), x};
    for (std::size_t i = 0; i < h.size(); ++i) r = block(i, r);
    return r.normalized;
  }
  /// What the features say of the next token: (.., C) -> logits (.., V).
  mt::Tensor head(const mt::Tensor& x) { return mt::linear(x, wte.weight); }
  mt::Tensor forward(const mt::Tensor& tokens) { return head(features(tokens)); }  // (B, T, V)
  /// Mean cross-entropy of the next tokens, (B, T) against (B, T).
  mt::Tensor loss(const mt::Tensor& tokens, const mt::Tensor& targets) {
    const mt::Tensor logits = forward(tokens);
    return mt::cross_entropy(logits.reshape({targets.numel(), config.vocabulary}),
                             targets.reshape({targets.numel()}));
  }

  Config config;
  mt::nn::Embedding wte, wpe;
  mt::nn::ModuleList<mt::nn::TransformerBlock> h;
  mt::nn::LayerNorm ln_f;

 private:
  mt::nn::Residual block(std::size_t i, const mt::nn::Residual& r) {
    mt::nn::TransformerBlock& self = h[i];
    const mt::nn::LayerNorm& next = i + 1 < h.size() ? h[i + 1].ln_1 : ln_f;
    if (!config.checkpoint) return self(r, next);
    const auto run = [&self, &next](const mt::Tensor& normalized, const mt::Tensor& sum) {
      const mt::nn::Residual out = self(mt::nn::Residual{normalized, sum}, next);
      return std::vector<mt::Tensor>{out.normalized, out.sum};
    };
    const std::vector<mt::Tensor> out = mt::nn::checkpoint(run, r.normalized, r.sum);
    return {out[0], out[1]};
  }
  static mt::Tensor low(const mt::Tensor& weight) {
    return mt::autocast_enabled() ? mt::autocast_low(weight) : weight;
  }
  /// Normal(0, 0.02), and smaller by the square root of the residual additions where a layer writes
  /// to the stream.
  void initialize() {
    const mt::NoGrad no_grad;
    const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
    for (auto& [name, parameter] : named_parameters()) {
      if (parameter.dim() > 1)
        parameter.normal_(0, name.ends_with("c_proj.weight") ? residual : 0.02);
      if (name.ends_with(".bias")) parameter.zero_();
    }
  }
};

}  // namespace gpt2
