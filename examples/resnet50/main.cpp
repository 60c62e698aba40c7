// Trains a ResNet on a folder of images (one subfolder a class) or on made-up ones, in mixed
// precision.
//
// SGD with momentum and a cosine schedule. fp16 with a GradScaler and channels-last images are the
// default on CUDA, where the whole step is captured as one graph. Writes the loss curve as a
// TensorBoard event file into --out, and checkpoints that --resume goes on from.
// Legend: B images of a batch.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "engine/determinism.h"
#include "examples/resnet50/options.h"
#include "examples/resnet50/resnet.h"
#include "examples/resnet50/synthetic.h"
#include "examples/resume.h"
#include "io/checkpoint.h"
#include "io/data_loader.h"
#include "io/event_writer.h"
#include "io/image_folder.h"
#include "io/progress.h"

namespace mt = mixtape;

using resnet::Options;

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
  mt::set_deterministic(o.deterministic);
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
  mt::io::Checkpoint state{
      .model = &net, .optimizers = {&opt}, .scaler = &scaler, .loader = &loader};
  if (o.resume) examples::resume("resnet50", o.out, state);
  const auto save = [&] { mt::io::save_numbered_checkpoint(o.out, state, {.keep = 2}); };
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
  std::int64_t& done = state.step;
  const std::int64_t first = done;
  for (std::int64_t epoch = done / loader.size(); epoch < o.epochs && done < steps; ++epoch) {
    bar.start_epoch(static_cast<int>(epoch));
    bar.advance(done % loader.size() * o.batch, [] { return mt::io::ProgressMetrics{}; });
    loader.set_epoch(epoch);  // from where the checkpoint was, in the first one
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
      if (o.save_every > 0 && done % o.save_every == 0 && done % loader.size() != 0) save();
    }
    bar.finish_epoch(metrics());
    const mt::io::ProgressMetrics last = metrics();
    std::printf("epoch %lld  loss %.4f  top-1 accuracy %.2f %%\n",
                static_cast<long long>(epoch + 1), *last.loss, 100 * *last.accuracy);
    save();
  }

  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("\nImages/s      %.1f\nPeak memory   %.1f MiB in tensors\n",
              static_cast<double>((done - first) * o.batch) / seconds,
              static_cast<double>(mt::memory_stats(device).allocated_peak) / 1048576);
  if (!o.validation.empty())
    std::printf("Validation    top-1 accuracy %.2f %%\n", 100 * evaluate(net, o, device));
  std::printf("Loss curve    %s (tensorboard --logdir %s)\n", events.path().c_str(), o.out.c_str());
  return 0;
}

int main(int argc, char** argv) {
  const Options options = resnet::parse(argc, argv);
  try {
    return train(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "resnet50: %s\n", e.what());
    return 1;
  }
}
