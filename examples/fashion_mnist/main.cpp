// Trains a small convolutional network on Fashion-MNIST in mixed precision and reports its
// accuracy.
//
// bf16 by default on the CPU, fp16 with a GradScaler on CUDA. Writes the loss curve as a
// TensorBoard event file and an SVG plot into --out, and checkpoints that --resume goes on from.
// With --dp the ranks of an mpirun share each batch. Legend: B images of 28 x 28.
#include <mixtape.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

#include "distributed/data_parallel.h"
#include "engine/determinism.h"
#include "examples/fashion_mnist/options.h"
#include "examples/fashion_mnist/report.h"
#include "examples/profile_option.h"
#include "examples/ranks.h"
#include "examples/resume.h"
#include "io/checkpoint.h"
#include "io/data_loader.h"
#include "io/fashion_mnist.h"

namespace mt = mixtape;

using fashion_mnist::Options;

struct Cnn : mt::nn::Module<Cnn> {
  mt::nn::Conv2d conv1{1, 16, {.padding = {1, 1}, .act = mt::Act::relu}};
  mt::nn::Conv2d conv2{16, 32, {.padding = {1, 1}, .act = mt::Act::relu}};
  mt::nn::Linear hidden{32 * 7 * 7, 128, {.act = mt::Act::relu}}, out{128, 10};
  Cnn() {
    add("conv1", conv1);
    add("conv2", conv2);
    add("hidden", hidden);
    add("out", out);
  }
  mt::Tensor forward(const mt::Tensor& x) {   // (B, 1, 28, 28)
    mt::Tensor h = mt::max_pool2d(conv1(x));  // (B, 16, 14, 14)
    h = mt::max_pool2d(conv2(h));             // (B, 32, 7, 7)
    return out(hidden(h.flatten(1)));         // (B, 10)
  }
};

/// Counts images and those that were classified correctly, on the device.
class Accuracy {
 public:
  explicit Accuracy(mt::Device device)
      : counts_(mt::zeros({2}, {.dtype = mt::Dtype::i64, .device = device})) {}
  void add(const mt::Tensor& logits, const mt::Tensor& y) {
    const mt::NoGrad no_grad;
    counts_.select(0, 0).add_(mt::sum(mt::eq(mt::argmax(logits, 1), y)));
    counts_.select(0, 1).add_(y.size(0));
  }
  /// Over what all ranks counted; all of them call it.
  double of(const examples::Ranks& ranks) const {
    const auto counts = ranks.sum(counts_).to_vector<double>();
    return counts[0] / std::max(counts[1], 1.0);
  }

 private:
  mt::Tensor counts_;  // correct, all
};

constexpr const char* kCurves = "fashion_mnist.curves";  // in a checkpoint's metadata

/// Share of the images of all ranks' loaders that net classifies correctly.
double evaluate(Cnn& net, mt::io::DataLoader& loader, const Options& o,
                const examples::Ranks& ranks) {
  const mt::InferenceMode inference;
  const mt::Autocast amp(o.precision == "fp16" ? mt::Dtype::f16 : mt::Dtype::bf16,
                         o.precision != "fp32");
  net.eval();
  Accuracy accuracy(ranks.device());
  for (auto& [x, y] : loader) accuracy.add(net(x), y);
  net.train();
  return accuracy.of(ranks);
}

int train(const Options& o) {
  const examples::Ranks ranks("fashion_mnist", o.dp, o.device);
  const mt::Device device = ranks.device();
  mt::set_deterministic(o.deterministic);
  const mt::io::FashionMnist train_set(o.data, mt::io::Split::train),
      test_set(o.data, mt::io::Split::test);
  mt::io::DataLoader loader(train_set, {.batch_size = ranks.share("a --batch", o.batch),
                                        .shuffle = true,
                                        .seed = o.seed,
                                        .drop_last = true,
                                        .device = device,
                                        .shard = ranks.rank(),
                                        .shard_count = ranks.size()});
  mt::io::DataLoader test_loader(test_set, {.batch_size = 500,
                                            .device = device,
                                            .shard = ranks.rank(),
                                            .shard_count = ranks.size(),
                                            .even_shards = false});

  mt::manual_seed(o.seed);
  Cnn net;
  net.to(device);
  std::optional<mt::distributed::DataParallel> dp;
  if (o.dp) dp.emplace(net, ranks.world());
  mt::optim::AdamW opt(net.parameters(), {.lr = o.lr, .weight_decay = 0.01f});
  mt::GradScaler scaler({.enabled = o.precision == "fp16"});
  const auto steps_per_epoch = static_cast<std::int64_t>(loader.size());
  const mt::optim::WarmupCosine schedule{.lr = o.lr,
                                         .min_lr = o.lr / 50,
                                         .warmup_steps = 50,
                                         .total_steps = o.epochs * steps_per_epoch};

  mt::io::Checkpoint state{
      .model = &net, .optimizers = {&opt}, .scaler = &scaler, .loader = &loader};
  if (o.resume) examples::resume("fashion_mnist", o.out, state, ranks, o.seed);
  std::optional<fashion_mnist::Report> report;
  if (ranks.first()) {
    report.emplace(o, net.parameter_count(), steps_per_epoch);
    report->restore_curves(state.metadata[kCurves]);
  }
  const auto save = [&] {
    if (!report) return;
    state.metadata[kCurves] = report->curves();
    mt::io::save_numbered_checkpoint(o.out, state, {.keep = 2});
  };
  const auto start = std::chrono::steady_clock::now();
  constexpr std::int64_t kLogEvery = 20;  // reading a loss waits for the device and for all ranks
  std::int64_t& step = state.step;
  std::optional<double> accuracy;
  const auto profiler = start_profiler(ranks.first() ? o.profile : "");

  for (std::int64_t epoch = step / steps_per_epoch; epoch < o.epochs; ++epoch) {
    mt::io::ProgressMetrics shown;
    if (report) {
      report->bar.start_epoch(static_cast<int>(epoch));
      report->bar.advance(step % steps_per_epoch * o.batch, [&] { return shown; });
    }
    loader.set_epoch(epoch);  // from where the checkpoint was, in the first one
    Accuracy train_accuracy(device);
    for (auto& [x, y] : loader) {
      mt::Tensor logits, loss;
      {
        const mt::Autocast amp(o.precision == "fp16" ? mt::Dtype::f16 : mt::Dtype::bf16,
                               o.precision != "fp32");
        logits = net(x);
        loss = mt::cross_entropy(logits, y);
      }
      scaler.scale(loss).backward();
      opt.set_lr(schedule(step));
      scaler.step(opt);
      scaler.update();
      opt.zero_grad();

      train_accuracy.add(logits, y);
      if (step % kLogEvery == 0 || (step + 1) % steps_per_epoch == 0) {
        shown.loss = ranks.mean(loss).item<float>();
        shown.accuracy = train_accuracy.of(ranks);
        if (scaler.enabled()) shown.loss_scale = scaler.get_scale();
        if (report) report->log(step, *shown.loss, opt.lr());
      }
      ++step;
      if (report) report->bar.advance(o.batch, [&] { return shown; });
      if (profiler) profiler->step();
      if (o.save_every > 0 && step % o.save_every == 0 && step % steps_per_epoch != 0) save();
    }
    accuracy = evaluate(net, test_loader, o, ranks);
    if (report) {
      report->bar.finish_epoch(shown);
      report->log_accuracy(step, *accuracy);
    }
    save();
  }
  if (!accuracy) accuracy = evaluate(net, test_loader, o, ranks);  // resumed at its end

  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string communication = dp ? dp->summary() : "";
  if (report) report->finish(*accuracy, seconds, communication, device);
  return 0;
}

int main(int argc, char** argv) {
  const Options options = fashion_mnist::parse(argc, argv);
  try {
    return train(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "fashion_mnist: %s\n", e.what());
    return 1;
  }
}
