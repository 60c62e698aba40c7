// One training step of a ResNet on 224 x 224 images (SGD with momentum; fp16 with GradScaler and
// channels-last on CUDA by default), eager or captured: the same model and settings as
// resnet_peer.py, for a ratio measured on one machine. Prints one JSON line.
#include "examples/resnet50/resnet.h"
#include "tests/benchmarks/step_benchmark.h"

namespace mt = mixtape;

int main(int argc, char** argv) {
  const bool gpu = mt::Device::best().is_cuda();
  const step_benchmark::Options o(argc, argv,
                                  {{"model", "resnet50"},
                                   {"precision", gpu ? "fp16" : "fp32"},
                                   {"layout", gpu ? "channels-last" : "contiguous"},
                                   {"mode", "eager"},
                                   {"batch", "256"},
                                   {"size", "224"},
                                   {"steps", gpu ? "50" : "3"},
                                   {"warmup", gpu ? "15" : "2"},
                                   {"threads", "0"},
                                   {"device", gpu ? "cuda" : "cpu"}});
  const step_benchmark::Precision precision(o.text("precision"));
  const mt::Device device = mt::Device::parse(o.text("device"));
  if (o.number("threads") > 0) mt::set_num_threads(static_cast<int>(o.number("threads")));
  const std::int64_t batch = o.number("batch"), size = o.number("size");
  mt::manual_seed(1337);
  resnet::ResNet net({.layers = std::atoll(o.text("model").substr(6).c_str())});
  net.to(device);
  mt::optim::Sgd opt(net.parameters(), {.lr = 1e-3f, .momentum = 0.9f, .weight_decay = 1e-4f});
  mt::GradScaler scaler({.enabled = precision.scaled()});
  mt::Tensor images = mt::randn({batch, 3, size, size}, {.device = device});
  if (o.text("layout") == "channels-last") images = mt::to_channels_last(images);
  const std::vector<mt::Tensor> in = {
      images, mt::randint(0, 1000, {batch}, {.dtype = mt::Dtype::i64, .device = device})};
  const bool last = o.text("layout") == "channels-last";
  const auto train = [&](mt::Inputs batch_in) -> std::vector<mt::Tensor> {
    mt::Tensor loss;
    {
      const auto amp = precision.autocast();
      const mt::Tensor x = last ? mt::to_channels_last(batch_in[0]) : batch_in[0];
      loss = mt::cross_entropy(net(x), batch_in[1]);
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
  step_benchmark::print(o.text("model").c_str(), o.text("mode"), o.text("precision"), batch,
                        static_cast<double>(batch), "images/s", device, result);
  return 0;
}
