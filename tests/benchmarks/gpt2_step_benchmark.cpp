// One training step of GPT-2 (AdamW, clipping to 1), eager or captured: the same model, data and
// settings as the PyTorch peer, for a ratio measured on one machine. Prints one JSON line.
//
// --dp 1: the model in DataParallel on one rank, through NCCL or MPI; --profile 1: with the
// profiler recording; both for what they cost.
#include "distributed/data_parallel.h"
#include "distributed/process_group.h"
#include "examples/gpt2/gpt2.h"
#include "tests/benchmarks/step_benchmark.h"

namespace mt = mixtape;

int main(int argc, char** argv) {
  const step_benchmark::Options o(argc, argv,
                                  {{"precision", "bf16"},
                                   {"mode", "eager"},
                                   {"batch", "32"},
                                   {"layers", "12"},
                                   {"channels", "768"},
                                   {"heads", "12"},
                                   {"ctx", "1024"},
                                   {"vocab", "50304"},
                                   {"steps", "30"},
                                   {"warmup", "10"},
                                   {"device", mt::Device::best().is_cuda() ? "cuda" : "cpu"},
                                   {"fused-head", "0"},
                                   {"checkpoint", "0"},
                                   {"dp", "0"},
                                   {"profile", "0"},
                                   {"recompute-activation", "0"}});
  const step_benchmark::Precision precision(o.text("precision"));
  const mt::Device device = mt::Device::parse(o.text("device"));
  const bool dp = o.number("dp") != 0, profile = o.number("profile") != 0;
  using mt::distributed::DeviceChoice;
  if (dp)
    mt::distributed::init(
        {.device = device.is_cpu() ? DeviceChoice::cpu : DeviceChoice::cuda, .force_comm = true});
  const std::int64_t batch = o.number("batch"), context = o.number("ctx"),
                     vocabulary = o.number("vocab");
  mt::manual_seed(1337);
  gpt2::Gpt2 net({.layers = o.number("layers"),
                  .heads = o.number("heads"),
                  .channels = o.number("channels"),
                  .context = context,
                  .vocabulary = vocabulary,
                  .recompute_activation = o.number("recompute-activation") != 0,
                  .checkpoint = o.number("checkpoint") != 0});
  net.to(device);
  std::optional<mt::distributed::DataParallel> parallel;
  if (dp) parallel.emplace(net, mt::distributed::world());
  mt::optim::AdamW opt(net.parameters(), {.lr = 3e-4f, .beta2 = 0.95f, .weight_decay = 0.1f});
  mt::GradScaler scaler({.enabled = precision.scaled()});
  const std::int64_t tokens = vocabulary > 50257 ? 50257 : vocabulary;
  const mt::TensorOptions index{.dtype = mt::Dtype::i64, .device = device};
  const mt::Tensor x = mt::randint(0, tokens, {batch, context}, index),
                   y = mt::randint(0, tokens, {batch, context}, index);
  const bool fused_head = o.number("fused-head") != 0;
  const auto train = [&](mt::Inputs in) -> std::vector<mt::Tensor> {
    mt::Tensor loss;
    {
      const auto amp = precision.autocast();
      loss = fused_head ? mt::linear_cross_entropy(net.features(in[0]), net.wte.weight, in[1])
                        : net.loss(in[0], in[1]);
    }
    scaler.scale(loss).backward();
    scaler.unscale(opt);
    mt::optim::clip_grad_norm(net.parameters(), 1.0f);
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    return {loss.detach()};
  };
  mt::CapturedStep captured = mt::capture(train, {.device = device});
  const bool replay = o.text("mode") == "captured";
  const std::vector<mt::Tensor> in = {x, y};
  std::optional<mt::Profiler> profiler;
  if (profile) profiler.emplace();
  const auto result = step_benchmark::measure(
      [&] {
        const mt::Tensor loss = replay ? captured(in)[0] : train(in)[0];
        if (profiler) profiler->step();
        return loss;
      },
      device, static_cast<int>(o.number("warmup")), static_cast<int>(o.number("steps")));
  step_benchmark::print("gpt2", o.text("mode"), o.text("precision"), batch,
                        static_cast<double>(batch * context), "tokens/s", device, result);
  if (parallel) std::fprintf(stderr, "%s", parallel->summary().c_str());
  return 0;
}
