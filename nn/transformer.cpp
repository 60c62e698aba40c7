#include "nn/transformer.h"

namespace mixtape::nn {

Residual add_and_normalize(const Tensor& stream, const Tensor& update, const LayerNorm& norm) {
  const AddLayerNormResult r = add_layer_norm(update, stream, norm.weight, norm.bias, norm.eps());
  return {r.normalized, r.sum};
}

Mlp::Mlp(std::int64_t channels, std::int64_t hidden, MlpConfig config)
    : c_fc(channels, hidden, {.bias = config.bias}),
      c_proj(hidden, channels, {.bias = config.bias}),
      config_(config) {
  add("c_fc", c_fc);
  add("c_proj", c_proj);
}
std::string Mlp::describe() const {
  return detail::concat("Mlp(", c_fc.weight.size(1), ", ", c_fc.weight.size(0), ")");
}

TransformerBlock::TransformerBlock(std::int64_t channels, TransformerBlockConfig c)
    : ln_1({channels}, {.eps = c.eps, .bias = c.bias}),
      attn(channels, {.heads = c.heads,
                      .kv_heads = c.kv_heads,
                      .causal = c.causal,
                      .bias = c.bias,
                      .dropout = c.dropout}),
      ln_2({channels}, {.eps = c.eps, .bias = c.bias}),
      mlp(channels, c.hidden == 0 ? 4 * channels : c.hidden,
          {.act = c.act, .bias = c.bias, .recompute_activation = c.recompute_activation}),
      dropout(c.dropout) {
  add("ln_1", ln_1);
  add("attn", attn);
  add("ln_2", ln_2);
  add("mlp", mlp);
  add("dropout", dropout);
}

Tensor TransformerBlock::forward(const Tensor& x) {
  const Residual middle = add_and_normalize(x, dropout(attn(ln_1(x))), ln_2);
  return middle.sum + dropout(mlp(middle.normalized));
}

Residual TransformerBlock::forward(const Residual& r, const LayerNorm& next) {
  const Residual middle = add_and_normalize(r.sum, dropout(attn(r.normalized)), ln_2);
  return add_and_normalize(middle.sum, dropout(mlp(middle.normalized)), next);
}

}  // namespace mixtape::nn
