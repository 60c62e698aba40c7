// Sampling from a language model, one token at a time.
#pragma once

#include <mixtape.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "io/tokenizer.h"

namespace gpt2 {

namespace mt = mixtape;

struct SampleOptions {
  std::int64_t tokens = 300;
  double temperature = 0.8;  // 0: always the likeliest
  std::uint64_t seed = 1;
};

/// Draws from softmax(logits / temperature) over the tokenizer's own ids.
inline std::int32_t draw(const std::vector<float>& logits, std::int64_t vocabulary,
                         double temperature, std::mt19937_64& random) {
  const auto end = logits.begin() + vocabulary;
  const auto likeliest = std::max_element(logits.begin(), end);
  if (temperature == 0) return static_cast<std::int32_t>(likeliest - logits.begin());
  std::vector<double> weights;
  for (auto l = logits.begin(); l != end; ++l)
    weights.push_back(std::exp((*l - *likeliest) / temperature));
  return static_cast<std::int32_t>(
      std::discrete_distribution<std::int64_t>(weights.begin(), weights.end())(random));
}

/// `prompt` and what the model goes on with. The window moves when the context is full.
template <class Model>
std::string sample(Model& net, const mt::io::Tokenizer& tokenizer, const std::string& prompt,
                   const SampleOptions& options) {
  const mt::InferenceMode inference;
  std::mt19937_64 random(options.seed);
  std::vector<std::int32_t> ids = tokenizer.encode(prompt);
  MT_CHECK(!ids.empty(), "sample: expected a prompt of at least one token, got none");
  const mt::Device device = net.parameters().front().device();
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    const auto length =
        std::min<std::int64_t>(static_cast<std::int64_t>(ids.size()), net.config.context);
    const mt::Tensor window =
        mt::from_span(std::span<const std::int32_t>(ids).last(static_cast<std::size_t>(length)),
                      {1, length})
            .to(device);
    const mt::Tensor logits = net.head(net.features(window).select(1, length - 1));  // (1, V)
    ids.push_back(
        draw(logits.to_vector<float>(), tokenizer.vocab_size(), options.temperature, random));
  }
  return tokenizer.decode(ids);
}

}  // namespace gpt2
