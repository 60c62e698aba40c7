// Hugging Face's names and layouts of the two models' weights, and the sizes that a file implies.
//
// GPT-2's files keep the matrices of blocks as (in, out); the head is the token embedding and is
// not written, as transformers does it. Llama's keep queries, keys, values, gate and up apart; the
// rotation of queries and keys pairs element i of a head with i + D/2, as here (files in the layout
// of Meta's own releases pair neighbours and would have to be permuted; Hugging Face's have been).
#pragma once

#include "examples/gpt2/gpt2.h"
#include "examples/gpt2/llama.h"
#include "io/weight_map.h"

namespace gpt2 {

inline mt::io::WeightMap hugging_face_map(const Config&) {
  mt::io::WeightMap map;
  for (const char* layer : {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}) {
    const std::string weight = std::string("h.*.") + layer + ".weight";
    map.transpose(weight, "transformer." + weight);
  }
  // Biases of those, both norms of a block, and what is outside of the blocks.
  for (const char* name : {"h.*.*.*.bias", "h.*.*.*", "ln_f.*", "wte.weight", "wpe.weight"})
    map.rename(name, std::string("transformer.") + name);
  return map
      .tied("lm_head.weight", "transformer.wte.weight")
      // Masks, which old versions wrote.
      .ignore("transformer.h.*.attn.bias")
      .ignore("transformer.h.*.attn.masked_bias")
      .optional_prefix("transformer.");
}

}  // namespace gpt2

namespace llama {

inline mt::io::WeightMap hugging_face_map(const Config& c) {
  const std::int64_t d = c.channels / c.heads;
  const std::string theirs = "model.layers.*.";
  return mt::io::WeightMap()
      .split("layers.*.attention.qkv_proj.weight",
             {{theirs + "self_attn.q_proj.weight", c.heads * d},
              {theirs + "self_attn.k_proj.weight", c.kv_heads * d},
              {theirs + "self_attn.v_proj.weight", c.kv_heads * d}})
      .rename("layers.*.attention.o_proj.weight", theirs + "self_attn.o_proj.weight")
      .split("layers.*.mlp.gate_up.weight", {{theirs + "mlp.gate_proj.weight", c.hidden},
                                             {theirs + "mlp.up_proj.weight", c.hidden}})
      .rename("layers.*.mlp.down.weight", theirs + "mlp.down_proj.weight")
      .rename("layers.*.input_norm.weight", theirs + "input_layernorm.weight")
      .rename("layers.*.post_attention_norm.weight", theirs + "post_attention_layernorm.weight")
      .rename("embed_tokens.weight", "model.embed_tokens.weight")
      .rename("norm.weight", "model.norm.weight")
      .ignore(theirs + "self_attn.rotary_emb.inv_freq");  // which old versions wrote
}

}  // namespace llama

namespace gpt2 {

/// The shape of the matrix `name` (or, without it, of `other`).
inline mt::Shape matrix_of(const mt::io::ShardedSafetensors& file, const std::string& name,
                           const std::string& other) {
  const mt::io::SafetensorsEntry* e = file.find(name);
  if (e == nullptr) e = file.find(other);
  MT_CHECK(e != nullptr && e->shape.size() == 2, "gpt2: ", file.path(), ": expected a matrix '",
           name, "', got ", e == nullptr ? "none" : mt::detail::concat(e->shape));
  return e->shape;
}

/// Layers counted by a tensor that each has: its name between `before` and `after`.
inline std::int64_t count_layers(const mt::io::ShardedSafetensors& file, const std::string& before,
                                 const std::string& after) {
  std::int64_t n = 0;
  while (file.find(before + std::to_string(n) + after) != nullptr) ++n;
  return n;
}

/// Every size but the heads, of which a file says nothing.
inline void take_sizes(Config& c, const mt::io::ShardedSafetensors& file) {
  const mt::Shape wte = matrix_of(file, "transformer.wte.weight", "wte.weight");
  c.vocabulary = wte[0];
  c.channels = wte[1];
  c.context = matrix_of(file, "transformer.wpe.weight", "wpe.weight")[0];
  const std::string prefix = file.find("wte.weight") == nullptr ? "transformer.h." : "h.";
  c.layers = count_layers(file, prefix, ".ln_1.weight");
}

}  // namespace gpt2

namespace llama {

inline void take_sizes(Config& c, const mt::io::ShardedSafetensors& file) {
  const auto matrix = [&](const std::string& name) { return gpt2::matrix_of(file, name, name); };
  const mt::Shape embedding = matrix("model.embed_tokens.weight");
  c.vocabulary = embedding[0];
  c.channels = embedding[1];
  c.hidden = matrix("model.layers.0.mlp.gate_proj.weight")[0];
  c.layers = gpt2::count_layers(file, "model.layers.", ".input_layernorm.weight");
  const std::int64_t keys = matrix("model.layers.0.self_attn.k_proj.weight")[0];
  MT_CHECK(c.channels % c.heads == 0 && keys % (c.channels / c.heads) == 0, "llama: ", file.path(),
           ": expected heads that divide ", c.channels, " channels and ", keys,
           " rows of keys into whole heads, got ", c.heads);
  c.kv_heads = keys / (c.channels / c.heads);
}

}  // namespace llama
