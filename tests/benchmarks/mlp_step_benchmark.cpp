// One training step of the MLP 784-1024-1024-10 (AdamW, fp16 with GradScaler by default), eager or
// captured: the same model and settings as the PyTorch peer, for a ratio measured on one machine.
// Prints one JSON line.
#include "tests/benchmarks/step_benchmark.h"

namespace mt = mixtape;

struct Mlp : mt::nn::Module<Mlp> {
  mt::nn::Linear a{784, 1024, {.act = mt::Act::relu}}, b{1024, 1024, {.act = mt::Act::relu}},
      c{1024, 10};
  Mlp() {
    add("a", a);
    add("b", b);
    add("c", c);
  }
  mt::Tensor forward(const mt::Tensor& x) { return c(b(a(x))); }  // (B, 784) -> (B, 10)
};

int main(int argc, char** argv) {
  const step_benchmark::Options o(argc, argv,
                                  {{"precision", "fp16"},
                                   {"mode", "eager"},
                                   {"batch", "128"},
                                   {"steps", "200"},
                                   {"warmup", "30"},
                                   {"device", mt::Device::best().is_cuda() ? "cuda" : "cpu"}});
  const step_benchmark::Precision precision(o.text("precision"));
  const mt::Device device = mt::Device::parse(o.text("device"));
  const std::int64_t batch = o.number("batch");
  mt::manual_seed(1337);
  Mlp net;
  net.to(device);
  mt::optim::AdamW opt(net.parameters(), {.lr = 3e-4f, .beta2 = 0.95f, .weight_decay = 0.1f});
  mt::GradScaler scaler({.enabled = precision.scaled()});
  const std::vector<mt::Tensor> in = {
      mt::randn({batch, 784}, {.device = device}),
      mt::randint(0, 10, {batch}, {.dtype = mt::Dtype::i64, .device = device})};
  const auto train = [&](mt::Inputs batch_in) -> std::vector<mt::Tensor> {
    mt::Tensor loss;
    {
      const auto amp = precision.autocast();
      loss = mt::cross_entropy(net(batch_in[0]), batch_in[1]);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    return {loss.detach()};
  };
  mt::CapturedStep captured = mt::capture(train, {.device = device});
  const bool replay = o.text("mode") == "captured";
  const auto result = step_benchmark::measure(
      [&] { return replay ? captured(in)[0] : train(in)[0]; }, device,
      static_cast<int>(o.number("warmup")), static_cast<int>(o.number("steps")));
  step_benchmark::print("mlp", o.text("mode"), o.text("precision"), batch,
                        static_cast<double>(batch), "samples/s", device, result);
  return 0;
}
