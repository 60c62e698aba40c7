// Trains a ResNet on a folder of images (one subfolder a class) or on made-up ones, in mixed
// precision.
//
// SGD with momentum and a cosine schedule. fp16 with a GradScaler and channels-last images are the
// default on CUDA, where the whole step is captured as one graph. Writes the loss curve as a
// TensorBoard event file into --out. Legend: B images of a batch.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "examples/resnet50/resnet.h"
#include "examples/resnet50/synthetic.h"
#include "examples/validators.h"
#include "io/data_loader.h"
#include "io/event_writer.h"
#include "io/image_folder.h"
#include "io/progress.h"

namespace mt = mixtape;

struct Options {
  std::string model = "resnet50", data, validation, precision, device, out = "out/resnet50";
  bool synthetic = false, no_capture = false;
  std::optional<bool> channels_last;
  std::int64_t batch = 64, epochs = 1, steps = 0, size = 224, classes = 10;
  int workers = 4;
  float lr = 0;
  std::uint64_t seed = 1;

  mt::Autocast autocast() const {
    return mt::Autocast(precision == "fp16" ? mt::Dtype::f16 : mt::Dtype::bf16,
                        precision != "fp32");
  }
  mt::Tensor in_layout(const mt::Tensor& x) const {
    return *channels_last ? mt::to_channels_last(x) : x;
  }
};

void add_options(CLI::App& app, Options& o) {
  const auto count = [&](const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)
        ->check(examples::whole_number(1))
        ->capture_default_str();
  };
  app.add_option("--model", o.model)
      ->check(CLI::IsMember({"resnet18", "resnet34", "resnet50"}))
      ->capture_default_str();
  auto* data = app.add_option("--data", o.data, "folder of training images, one subfolder a class")
                   ->check(CLI::ExistingDirectory);
  app.add_option("--validation", o.validation, "folder of images to measure the accuracy on")
      ->check(CLI::ExistingDirectory);
  app.add_flag("--synthetic", o.synthetic, "train on made-up images")->excludes(data);
  count("--batch", o.batch, "images a step");
  count("--epochs", o.epochs, "passes over the images");
  count("--steps", o.steps, "stop after so many steps")->default_str("no limit");
  count("--size", o.size, "pixels of an image's side");
  count("--classes", o.classes, "classes of made-up images");
  count("--workers", o.workers, "threads that read images");
  app.add_option("--lr", o.lr, "peak learning rate")
      ->check(examples::above_zero())
      ->default_str("0.1 for each 256 images of a batch");
  app.add_option("--precision", o.precision, "default: fp32 on the CPU, fp16 on CUDA")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--device", o.device, "default: cuda if there is a GPU, else cpu")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_flag("--channels-last,!--no-channels-last", o.channels_last,
               "lay images out (N, H, W, C); default: on CUDA");
  app.add_flag("--no-capture", o.no_capture, "run each step op by op on CUDA too");
  app.add_option("--seed", o.seed, "of weights, order and augmentation")->capture_default_str();
  app.add_option("--out", o.out, "folder for the loss curve")->capture_default_str();
}

Options parse(int argc, char** argv) {
  Options o;
  CLI::App app{"Trains a ResNet in mixed precision."};
  add_options(app, o);
  try {
    app.parse(argc, argv);
    if (o.data.empty() && !o.synthetic) throw CLI::RequiredError("one of --data and --synthetic");
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    std::exit(0);
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "resnet50: %s (--help lists the options)\n", e.what());
    std::exit(2);
  }
  if (o.device.empty()) o.device = mt::Device::best().is_cuda() ? "cuda" : "cpu";
  const bool cuda = o.device == "cuda";
  if (o.precision.empty()) o.precision = cuda ? "fp16" : "fp32";
  if (!o.channels_last) o.channels_last = cuda;
  if (o.lr == 0) o.lr = 0.1f * static_cast<float>(o.batch) / 256;
  return o;
}

/// The training images, and how many classes they have.
std::unique_ptr<mt::io::Dataset> open_images(const Options& o, std::int64_t& classes) {
  classes = o.classes;
  if (o.synthetic)
    return std::make_unique<resnet::SyntheticImages>(
        std::max<std::int64_t>(o.batch, 50 * o.classes), o.size, o.classes);
  auto folder = std::make_unique<mt::io::ImageFolder>(
      o.data, mt::io::ImageFolderOptions{.size = o.size, .augment = true});
  classes = static_cast<std::int64_t>(folder->class_names().size());
  return folder;
}

mt::Tensor correct_of(const mt::Tensor& logits, const mt::Tensor& y) {
  const mt::NoGrad no_grad;
  return mt::sum(mt::eq(mt::argmax(logits, 1), y));
}

/// Share of the validation images that net classifies correctly.
double evaluate(resnet::ResNet& net, const Options& o, mt::Device device) {
  const mt::io::ImageFolder images(o.validation, {.size = o.size});
  mt::io::DataLoader loader(images,
                            {.batch_size = o.batch, .workers = o.workers, .device = device});
  const mt::InferenceMode inference;
  const auto amp = o.autocast();
  net.eval();
  mt::Tensor correct = mt::zeros({}, {.dtype = mt::Dtype::i64, .device = device});
  for (auto& [x, y] : loader) correct.add_(correct_of(net(o.in_layout(x)), y));
  net.train();
  return correct.item<double>() / static_cast<double>(images.size());
}

int train(const Options& o) {
  const mt::Device device = mt::Device::parse(o.device);
  mt::check_device("resnet50", device);
  std::int64_t classes = 0;
  const std::shared_ptr<const mt::io::Dataset> images = open_images(o, classes);
  MT_CHECK(images->size() >= o.batch, "resnet50: expected at least one batch of ", o.batch,
           " images, got ", images->size());
  mt::io::DataLoader loader(images, {.batch_size = o.batch,
                                     .shuffle = true,
                                     .seed = o.seed,
                                     .workers = o.workers,
                                     .drop_last = true,
                                     .device = device});
  mt::manual_seed(o.seed);
  resnet::ResNet net({.layers = std::stoi(o.model.substr(6)), .classes = classes});
  net.to(device);
  mt::optim::Sgd opt(net.parameters(), {.lr = o.lr, .momentum = 0.9f, .weight_decay = 1e-4f});
  mt::GradScaler scaler({.enabled = o.precision == "fp16"});
  const std::int64_t all = o.epochs * loader.size(),
                     steps = o.steps > 0 ? std::min(o.steps, all) : all;
  const mt::optim::WarmupCosine schedule{
      .lr = o.lr, .min_lr = 0, .warmup_steps = steps / 20 + 1, .total_steps = steps};
  std::printf("%s: %.1f M parameters, %lld images of %lld classes, %s on %s%s\n", o.model.c_str(),
              static_cast<double>(net.parameter_count()) / 1e6,
              static_cast<long long>(images->size()), static_cast<long long>(classes),
              o.precision.c_str(), o.device.c_str(), *o.channels_last ? ", channels-last" : "");

  const auto step = [&](mt::Inputs in) -> std::vector<mt::Tensor> {
    mt::Tensor logits, loss;
    {
      const auto amp = o.autocast();
      logits = net(o.in_layout(in[0]));
      loss = mt::cross_entropy(logits, in[1]);
    }
    scaler.scale(loss).backward();
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    return {loss.detach(), correct_of(logits, in[1])};
  };
  mt::CapturedStep captured = mt::capture(step, {.device = device});
  mt::io::EventWriter events(o.out);
  mt::io::ProgressBar bar(stdout, {.epochs = static_cast<int>(o.epochs),
                                   .samples_per_epoch = std::min(loader.size(), steps) * o.batch});
  const auto start = std::chrono::steady_clock::now();
  constexpr std::int64_t kLogEvery = 10;  // reading a loss waits for the device
  std::int64_t done = 0;
  for (std::int64_t epoch = 0; epoch < o.epochs && done < steps; ++epoch) {
    bar.start_epoch(static_cast<int>(epoch));
    loader.set_epoch(epoch);
    mt::Tensor loss, correct = mt::zeros({}, {.dtype = mt::Dtype::i64, .device = device});
    std::int64_t seen = 0;
    const auto metrics = [&] {
      return mt::io::ProgressMetrics{.loss = loss.item<double>(),
                                     .accuracy = correct.item<double>() / static_cast<double>(seen),
                                     .loss_scale = scaler.enabled()
                                                       ? std::optional<double>(scaler.get_scale())
                                                       : std::nullopt};
    };
    for (auto& [x, y] : loader) {
      opt.set_lr(schedule(done));
      const std::vector<mt::Tensor> out = o.no_capture ? step({{x, y}}) : captured({x, y});
      loss = out[0];
      correct.add_(out[1]);
      seen += o.batch;
      if (done % kLogEvery == 0)
        events.scalars({{"loss/train", loss.item<float>()}, {"lr", opt.lr()}}, done);
      bar.advance(o.batch, metrics);
      if (++done == steps) break;
    }
    bar.finish_epoch(metrics());
    const mt::io::ProgressMetrics last = metrics();
    std::printf("epoch %lld  loss %.4f  top-1 accuracy %.2f %%\n",
                static_cast<long long>(epoch + 1), *last.loss, 100 * *last.accuracy);
  }

  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("\nImages/s      %.1f\nPeak memory   %.1f MiB in tensors\n",
              static_cast<double>(done * o.batch) / seconds,
              static_cast<double>(mt::memory_stats(device).allocated_peak) / 1048576);
  if (!o.validation.empty())
    std::printf("Validation    top-1 accuracy %.2f %%\n", 100 * evaluate(net, o, device));
  std::printf("Loss curve    %s (tensorboard --logdir %s)\n", events.path().c_str(), o.out.c_str());
  return 0;
}

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  try {
    return train(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "resnet50: %s\n", e.what());
    return 1;
  }
}
