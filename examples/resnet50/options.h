// The options of examples/resnet50.
#pragma once

#include <mixtape.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "examples/validators.h"

namespace resnet {

namespace mt = mixtape;

struct Options {
  std::string model = "resnet50", data, validation, precision, device, out = "out/resnet50";
  bool synthetic = false, no_capture = false, resume = false, deterministic = false;
  std::optional<bool> channels_last;
  std::int64_t batch = 64, epochs = 1, steps = 0, size = 224, classes = 10, save_every = 0;
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

inline void add_options(CLI::App& app, Options& o) {
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
  app.add_option("--out", o.out, "folder for the loss curve and checkpoints")
      ->capture_default_str();
  app.add_option("--save-every", o.save_every,
                 "steps between checkpoints, beside one after each epoch; 0: none")
      ->check(examples::whole_number(0))
      ->capture_default_str();
  app.add_flag("--resume", o.resume, "go on from the newest whole checkpoint in --out");
  app.add_flag("--deterministic", o.deterministic, "two runs give the same bits");
}

inline Options parse(int argc, char** argv) {
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

}  // namespace resnet
