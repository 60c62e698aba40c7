// Training as parity.py has PyTorch do it: AdamW, clipping to 1, one batch a step, losses of every
// step.
#pragma once

#include <mixtape.h>

#include <string>
#include <vector>

#include "engine/determinism.h"
#include "examples/gpt2/gpt2.h"

namespace mixtape::testing {

struct TrainSettings {
  std::string precision = "fp32";  // fp32, bf16, fp16 (with a GradScaler)
  float lr = 1e-3f;
  bool captured = false;
};

/// `text`: tokens (steps, batch, context + 1). Deterministic: two calls agree in every bit.
inline std::vector<float> train(gpt2::Gpt2& net, const Tensor& text, const TrainSettings& s) {
  set_deterministic(true);
  const bool fp16 = s.precision == "fp16";
  optim::AdamW opt(net.parameters(), {.lr = s.lr, .beta2 = 0.95f, .weight_decay = 0.1f});
  GradScaler scaler({.enabled = fp16});
  const auto step = [&](Inputs in) -> std::vector<Tensor> {
    Tensor loss;
    {
      const Autocast amp(fp16 ? Dtype::f16 : Dtype::bf16, s.precision != "fp32");
      loss = net.loss(in[0], in[1]);
    }
    scaler.scale(loss).backward();
    scaler.unscale(opt);
    optim::clip_grad_norm(net.parameters(), 1.0f);
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    return {loss.detach()};
  };
  const Device device = net.parameters().front().device();
  CapturedStep captured = capture(step, {.device = device});
  const std::int64_t context = text.size(2) - 1;
  std::vector<float> losses;
  for (std::int64_t i = 0; i < text.size(0); ++i) {
    const Tensor batch = text[i].to(device);
    const std::vector<Tensor> in = {batch.slice(1, 0, context).contiguous(),
                                    batch.slice(1, 1).contiguous()};
    losses.push_back((s.captured ? captured(in) : step(in))[0].item<float>());
  }
  set_deterministic(false);
  return losses;
}

}  // namespace mixtape::testing
