// The options of examples/gpt2, and what they say of the model.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "examples/gpt2/data.h"
#include "examples/gpt2/gpt2.h"
#include "examples/gpt2/llama.h"
#include "examples/validators.h"

namespace gpt2 {

struct Options {
  DataOptions data;
  std::string model = "gpt2", init, save_weights;
  std::int64_t layers = 4, heads = 4, channels = 128, context = 128;
  std::int64_t kv_heads = 0, hidden = 0;  // llama; 0: as many as heads, and 8/3 of the channels
  double dropout = 0;                     // gpt2
  bool recompute = false;                 // llama
  std::int64_t batch = 16, accumulate = 1, steps = 300, eval_every = 100, save_every = 0;
  float lr = 2e-3f;
  std::string precision = "bf16", device, out, prompt = "\n", profile;
  std::uint64_t seed = 1;
  std::int64_t sample = 300;
  double temperature = 0.8;
  bool resume = false, no_capture = false, dp = false, deterministic = false;
};

inline void add_model_options(CLI::App& app, Options& o) {
  const auto count = [&](const char* name, std::int64_t& value, const char* what) {
    return app.add_option(name, value, what)
        ->check(examples::whole_number(1))
        ->capture_default_str();
  };
  app.add_option("--model", o.model)
      ->check(CLI::IsMember({"gpt2", "llama"}))
      ->capture_default_str();
  auto* init = app.add_option("--init", o.init,
                              "Hugging Face weights to start from: a .safetensors file, an index, "
                              "or a folder with one; all sizes but --heads are the file's")
                   ->check(CLI::ExistingPath);
  app.add_option("--export", o.save_weights,
                 "write the weights with Hugging Face's names at the end");
  auto* heads = count("--heads", o.heads, "attention heads");
  init->needs(heads);  // no file says how many, and any divisor of the channels would run
  count("--layers", o.layers, "transformer blocks")->excludes(init);
  count("--channels", o.channels, "width of the residual stream")->excludes(init);
  count("--kv-heads", o.kv_heads, "llama: heads of keys and values (default: --heads)")
      ->excludes(init)
      ->default_str("");
  count("--hidden", o.hidden,
        "llama: width of the feed-forward layers (default: 8/3 of --channels)")
      ->excludes(init)
      ->default_str("");
  count("--context", o.context, "tokens of a window");
  app.add_option("--dropout", o.dropout, "gpt2: of activations and attention")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
  app.add_flag("--recompute", o.recompute, "llama: keep the inputs of blocks only, for memory");
}

inline void add_training_options(CLI::App& app, Options& o) {
  const auto count = [&](const char* name, std::int64_t& value, const char* what) {
    app.add_option(name, value, what)->check(examples::whole_number(1))->capture_default_str();
  };
  auto* text =
      app.add_option("--text", o.data.text, "a text file to learn")->check(CLI::ExistingFile);
  app.add_option("--tokens", o.data.tokens, "or a folder of token files (.bin)")
      ->check(CLI::ExistingDirectory)
      ->excludes(text);
  app.add_option("--bpe", o.data.bpe, "folder with vocab.json and merges.txt (default: bytes)")
      ->check(CLI::ExistingDirectory);
  count("--batch", o.batch, "windows a micro-batch, over all ranks");
  count("--accumulate", o.accumulate, "micro-batches a step");
  count("--steps", o.steps, "optimizer steps");
  count("--eval-every", o.eval_every, "steps between evaluations");
  app.add_option("--save-every", o.save_every, "steps between checkpoints; 0: at the end only")
      ->check(examples::whole_number(0))
      ->capture_default_str();
  app.add_option("--lr", o.lr, "peak learning rate")
      ->check(examples::above_zero())
      ->capture_default_str();
  app.add_option("--precision", o.precision)
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  app.add_option("--device", o.device, "default: cuda if there is a GPU, else cpu")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--seed", o.seed)->capture_default_str();
  app.add_option("--prompt", o.prompt, "what the samples go on from");
  app.add_option("--sample", o.sample, "tokens to sample at the end; 0: none")
      ->check(examples::whole_number(0))
      ->capture_default_str();
  app.add_option("--temperature", o.temperature)
      ->check(examples::above_zero())
      ->capture_default_str();
  app.add_option("--out", o.out, "folder for checkpoints and the loss curve (default: out/MODEL)");
  app.add_flag("--resume", o.resume, "go on from the newest checkpoint in --out");
  app.add_option("--profile", o.profile, "profile three steps and write a trace to this folder");
  app.add_flag("--no-capture", o.no_capture, "run each step op by op on CUDA too");
  app.add_flag("--deterministic", o.deterministic, "two runs give the same bits");
  app.add_flag("--dp", o.dp, "data parallel: train on all ranks of mpirun, srun or torchrun");
}

/// What no single option can check.
inline void check(const CLI::App& app, const Options& o) {
  if (o.data.text.empty() && o.data.tokens.empty())
    throw CLI::RequiredError("one of --text and --tokens");
  const bool llama = o.model == "llama";
  for (const char* name : {"--kv-heads", "--hidden", "--recompute"})
    if (!llama && app.count(name) > 0)
      throw CLI::ValidationError(name, "is an option of --model llama");
  if (llama && app.count("--dropout") > 0)
    throw CLI::ValidationError("--dropout", "is an option of --model gpt2");
  const std::filesystem::path folder = std::filesystem::path(o.save_weights).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder))
    throw CLI::ValidationError("--export", "no such folder: " + folder.string());
}

inline Options parse(int argc, char** argv) {
  Options o;
  CLI::App app{"Trains GPT-2 or a Llama-style model in mixed precision and samples from it."};
  add_model_options(app, o);
  add_training_options(app, o);
  try {
    app.parse(argc, argv);
    check(app, o);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    std::exit(0);
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "gpt2: %s (--help lists the options)\n", e.what());
    std::exit(2);
  }
  if (o.device.empty()) o.device = mt::Device::best().is_cuda() ? "cuda" : "cpu";
  if (o.out.empty()) o.out = "out/" + o.model;
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  if (o.hidden == 0) o.hidden = (o.channels * 8 / 3 + 63) / 64 * 64;
  return o;
}

inline Config gpt2_config(const Options& o) {
  return {.layers = o.layers,
          .heads = o.heads,
          .channels = o.channels,
          .context = o.context,
          .dropout = o.dropout};
}
inline llama::Config llama_config(const Options& o) {
  return {.layers = o.layers,
          .heads = o.heads,
          .kv_heads = o.kv_heads,
          .channels = o.channels,
          .hidden = o.hidden,
          .context = o.context,
          .recompute = o.recompute};
}

}  // namespace gpt2
