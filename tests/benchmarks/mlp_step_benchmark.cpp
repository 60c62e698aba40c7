// One training step of the MLP 784-1024-1024-10 (AdamW, fp16 with GradScaler by default), eager:
// the same model and settings as the PyTorch peer, for a ratio measured on one machine. Prints one
// JSON line. Steps are timed in one run of all of them between two events, and each on the host.
#include <mixtape.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace mt = mixtape;
using Clock = std::chrono::steady_clock;

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

double milliseconds(Clock::duration d) {
  return std::chrono::duration<double, std::milli>(d).count();
}

int main(int argc, char** argv) {
  std::string precision = "fp16", device_name = mt::cuda_device_count() > 0 ? "cuda" : "cpu";
  int batch = 128, steps = 200;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--precision"))
      precision = argv[i + 1];
    else if (!std::strcmp(argv[i], "--device"))
      device_name = argv[i + 1];
    else if (!std::strcmp(argv[i], "--batch"))
      batch = std::atoi(argv[i + 1]);
    else if (!std::strcmp(argv[i], "--steps"))
      steps = std::atoi(argv[i + 1]);
    else
      return std::fprintf(stderr, "unknown option %s\n", argv[i]), 2;
  }
  const mt::Device device = mt::Device::parse(device_name);
  mt::manual_seed(1337);
  Mlp net;
  net.to(device);
  mt::optim::AdamW opt(net.parameters(), {.lr = 3e-4f, .beta2 = 0.95f, .weight_decay = 0.1f});
  mt::GradScaler scaler({.enabled = precision == "fp16"});
  const mt::Tensor x = mt::randn({batch, 784}, {.device = device});
  const mt::Tensor y = mt::randint(0, 10, {batch}, {.dtype = mt::Dtype::i64, .device = device});
  const auto step = [&] {
    mt::Tensor loss;
    {
      const mt::Autocast amp(precision == "bf16" ? mt::Dtype::bf16 : mt::Dtype::f16,
                             precision != "fp32");
      loss = mt::cross_entropy(net(x), y);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    return loss;
  };
  const float first = step().item<float>();
  for (int i = 0; i < 30; ++i) step();
  mt::synchronize(device);
  std::vector<double> host, device_ms;
  float last = 0;
  for (int block = 0; block < 10; ++block) {
    const auto start = Clock::now();
    mt::Tensor loss;
    for (int i = 0; i < steps / 10; ++i) {
      const auto t = Clock::now();
      loss = step();
      host.push_back(milliseconds(Clock::now() - t));
    }
    mt::synchronize(device);
    device_ms.push_back(milliseconds(Clock::now() - start) / (steps / 10));
    last = loss.item<float>();
  }
  const auto median = [](std::vector<double>& v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  const mt::MemoryStats memory = mt::memory_stats(device);
  std::printf(
      "{\"workload\": \"mlp\", \"engine\": \"mixtape\", \"mode\": \"eager\", \"precision\": "
      "\"%s\", \"batch\": %d, "
      "\"step_ms\": %.4f, \"host_ms\": %.4f, \"peak_mib\": %.1f, \"reserved_mib\": %.1f, "
      "\"loss_first\": %.4f, \"loss_last\": %.4f}\n",
      precision.c_str(), batch, median(device_ms), median(host),
      static_cast<double>(memory.allocated_peak) / 1048576,
      static_cast<double>(memory.reserved_peak) / 1048576, first, last);
  return 0;
}
