// Trains a small convolutional network on Fashion-MNIST in mixed precision and reports its
// accuracy.
//
// bf16 by default on the CPU, fp16 with a GradScaler on CUDA. Writes the loss curve as a
// TensorBoard event file and an SVG plot into --out. With --dp the ranks of an mpirun share each
// batch. Legend: B images of 28 x 28.
#include <mixtape.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "distributed/data_parallel.h"
#include "examples/profile_option.h"
#include "examples/ranks.h"
#include "examples/validators.h"
#include "io/data_loader.h"
#include "io/event_writer.h"
#include "io/fashion_mnist.h"
#include "io/line_plot.h"
#include "io/progress.h"

namespace mt = mixtape;

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

struct Options {
  int epochs = 4, batch = 128;
  std::string precision, device, data = "data/fashion-mnist", out = "out/fashion_mnist", profile;
  std::uint64_t seed = 1;
  float lr = 2e-3f;
  bool dp = false;
};

Options parse(int argc, char** argv) {
  Options o;
  CLI::App app{"Trains a small CNN on Fashion-MNIST in mixed precision."};
  app.add_option("--epochs", o.epochs, "passes over the 60,000 training images")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--batch", o.batch, "images a step, over all ranks")
      ->check(CLI::Range(1, 60000))
      ->capture_default_str();
  app.add_option("--precision", o.precision, "default: bf16 on the CPU, fp16 on CUDA")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--device", o.device, "default: cuda if there is a GPU, else cpu")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--data", o.data, "folder with the four IDX files, plain or .gz")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  app.add_option("--seed", o.seed, "of weights and shuffling")->capture_default_str();
  app.add_option("--lr", o.lr, "peak learning rate")
      ->check(examples::above_zero())
      ->capture_default_str();
  app.add_option("--out", o.out, "folder for the loss curve")->capture_default_str();
  app.add_flag("--dp", o.dp, "data parallel: train on all ranks of mpirun, srun or torchrun");
  app.add_option("--profile", o.profile, "profile three steps and write a trace to this folder");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    std::exit(0);
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "fashion_mnist: %s (--help lists the options)\n", e.what());
    std::exit(2);
  }
  if (o.device.empty()) o.device = mt::Device::best().is_cuda() ? "cuda" : "cpu";
  if (o.precision.empty()) o.precision = o.device == "cuda" ? "fp16" : "bf16";
  return o;
}

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

/// What rank 0 shows and writes.
struct Report {
  const Options& o;
  mt::io::EventWriter events{o.out};
  mt::io::PlotSeries train_loss{.name = "training loss"},
      test_error{.name = "test error (share)", .markers = true};
  mt::io::ProgressBar bar;

  Report(const Options& options, const Cnn& net, std::int64_t steps_per_epoch)
      : o(options),
        bar(stdout, {.epochs = o.epochs, .samples_per_epoch = steps_per_epoch * o.batch}) {
    std::printf("Fashion-MNIST: %lld parameters, %s on %s, %d epochs of %lld steps\n",
                static_cast<long long>(net.parameter_count()), o.precision.c_str(),
                o.device.c_str(), o.epochs, static_cast<long long>(steps_per_epoch));
  }
  void log(std::int64_t step, double loss, double lr) {
    events.scalars({{"loss/train", loss}, {"lr", lr}}, step);
    train_loss.x.push_back(static_cast<double>(step));
    train_loss.y.push_back(loss);
  }
  void log_accuracy(std::int64_t step, double accuracy) {
    events.scalar("accuracy/test", accuracy, step);
    test_error.x.push_back(static_cast<double>(step));
    test_error.y.push_back(1 - accuracy);
  }
  void finish(double accuracy, double seconds, const std::string& communication,
              mt::Device device) {
    const std::filesystem::path plot = std::filesystem::path(o.out) / "loss.svg";
    mt::io::write_line_plot(plot, {train_loss, test_error},
                            {.title = "Fashion-MNIST, " + o.precision,
                             .x_label = "step",
                             .y_label = "loss",
                             .smoothing = 0.8});
    const mt::MemoryStats memory = mt::memory_stats(device);
    std::printf("\nTest accuracy  %.2f %%  (%d epochs in %.1f s)\n", 100 * accuracy, o.epochs,
                seconds);
    std::printf("%sPeak memory    %.1f MiB in tensors, %.1f MiB reserved\n", communication.c_str(),
                static_cast<double>(memory.allocated_peak) / 1048576,
                static_cast<double>(memory.reserved_peak) / 1048576);
    std::printf("Loss curve     %s\n               %s (tensorboard --logdir %s)\n", plot.c_str(),
                events.path().c_str(), o.out.c_str());
    std::printf("Next           try --precision fp16, --epochs 10 or --seed 2; the model is %s\n",
                "examples/fashion_mnist/main.cpp");
  }
};

int train(const Options& o) {
  const examples::Ranks ranks("fashion_mnist", o.dp, o.device);
  const mt::Device device = ranks.device();
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

  std::optional<Report> report;
  if (ranks.first()) report.emplace(o, net, steps_per_epoch);
  const auto start = std::chrono::steady_clock::now();
  constexpr std::int64_t kLogEvery = 20;  // reading a loss waits for the device and for all ranks
  std::int64_t step = 0;
  double accuracy = 0;
  const auto profiler = start_profiler(ranks.first() ? o.profile : "");

  for (int epoch = 0; epoch < o.epochs; ++epoch) {
    if (report) report->bar.start_epoch(epoch);
    loader.set_epoch(epoch);
    mt::io::ProgressMetrics shown;
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
    }
    accuracy = evaluate(net, test_loader, o, ranks);
    if (report) {
      report->bar.finish_epoch(shown);
      report->log_accuracy(step, accuracy);
    }
  }

  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string communication = dp ? dp->summary() : "";
  if (report) report->finish(accuracy, seconds, communication, device);
  return 0;
}

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  try {
    return train(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "fashion_mnist: %s\n", e.what());
    return 1;
  }
}
