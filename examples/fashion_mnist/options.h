// The options of examples/fashion_mnist.
#pragma once

#include <mixtape.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "examples/validators.h"

namespace fashion_mnist {

namespace mt = mixtape;

struct Options {
  int epochs = 4, batch = 128;
  std::string precision, device, data = "data/fashion-mnist", out = "out/fashion_mnist", profile;
  std::uint64_t seed = 1;
  float lr = 2e-3f;
  std::int64_t save_every = 0;
  bool dp = false, resume = false, deterministic = false;
};

inline Options parse(int argc, char** argv) {
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
  app.add_option("--out", o.out, "folder for the loss curve and checkpoints")
      ->capture_default_str();
  app.add_option("--save-every", o.save_every,
                 "steps between checkpoints, beside one after each epoch; 0: none")
      ->check(examples::whole_number(0))
      ->capture_default_str();
  app.add_flag("--resume", o.resume, "go on from the newest whole checkpoint in --out");
  app.add_flag("--deterministic", o.deterministic, "two runs give the same bits");
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

}  // namespace fashion_mnist
