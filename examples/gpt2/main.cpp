// Trains GPT-2 or a Llama-style model on a text or on token files in mixed precision, and writes
// what it has learnt.
//
// bf16 on the CPU and on CUDA by default; fp16 gets a GradScaler. On CUDA the whole step is
// captured as one graph. Checkpoints hold the whole run: --resume goes on as if it had never
// stopped. With --dp the ranks of an mpirun share each micro-batch, and rank 0 writes.
//
// Legend: B batch, T tokens of a window, V vocabulary.
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "distributed/data.h"
#include "distributed/data_parallel.h"
#include "engine/determinism.h"
#include "examples/gpt2/data.h"
#include "examples/gpt2/options.h"
#include "examples/gpt2/sample.h"
#include "examples/gpt2/weights.h"
#include "examples/profile_option.h"
#include "examples/ranks.h"
#include "examples/resume.h"
#include "io/checkpoint.h"
#include "io/data_loader.h"
#include "io/event_writer.h"
#include "io/progress.h"

namespace mt = mixtape;

using gpt2::Options;

mt::Autocast autocast(const Options& o) {
  return mt::Autocast(o.precision == "fp16" ? mt::Dtype::f16 : mt::Dtype::bf16,
                      o.precision != "fp32");
}

/// Mean loss over at most `batches` batches of each rank's validation windows.
template <class Model>
double evaluate(Model& net, mt::io::DataLoader& loader, const Options& o,
                const examples::Ranks& ranks, int batches = 20) {
  const mt::InferenceMode inference;
  const auto amp = autocast(o);
  net.eval();
  mt::Tensor total = mt::zeros({2}, {.device = ranks.device()});  // loss, windows
  for (auto& [x, y] : loader) {
    const auto rows = static_cast<double>(x.size(0));
    total.select(0, 0).add_(net.loss(x, y) * rows);
    total.select(0, 1).add_(rows);
    if (--batches == 0) break;
  }
  net.train();
  const auto sums = ranks.sum(total).to_vector<double>();
  return sums[0] / sums[1];
}

/// What rank 0 shows and writes.
struct Report {
  mt::io::EventWriter events;
  mt::io::ProgressBar bar;
  Report(const Options& o, std::int64_t first_step)
      : events(o.out),
        bar(stdout, {.epochs = 1, .samples_per_epoch = o.steps * o.accumulate * o.batch}) {
    bar.start_epoch(0);
    bar.advance(first_step * o.accumulate * o.batch, [] { return mt::io::ProgressMetrics{}; });
  }
};

/// The model that --init starts from, or a new one as large as the options say.
template <class Model, class Config>
std::unique_ptr<Model> make_model(const Options& o, Config config, const gpt2::Data& data) {
  mt::manual_seed(o.seed);
  if (o.init.empty()) {
    config.vocabulary = data.padded_vocabulary();
    return std::make_unique<Model>(config);
  }
  take_sizes(config, mt::io::ShardedSafetensors(o.init));
  MT_CHECK(data.tokenizer().vocab_size() <= config.vocabulary, "--init: expected a vocabulary of ",
           "at least the tokenizer's ", data.tokenizer().vocab_size(), ", got ", config.vocabulary);
  MT_CHECK(o.context <= config.context, "--context: expected at most the ", config.context,
           " positions of --init, got ", o.context);
  auto net = std::make_unique<Model>(config);
  mt::io::load_weights(o.init, *net, hugging_face_map(config));
  return net;
}

template <class Model, class Config>
int train(const Options& o, const Config& config) {
  const examples::Ranks ranks("gpt2", o.dp, o.device);
  const mt::Device device = ranks.device();
  mt::set_deterministic(o.deterministic);
  const gpt2::Data data(o.data, o.context, o.out);
  const std::unique_ptr<Model> made = make_model<Model>(o, config, data);
  Model& net = *made;
  const std::int64_t batch = ranks.share("a --batch", o.batch);
  mt::io::DataLoader loader(data.train, {.batch_size = batch,
                                         .shuffle = true,
                                         .seed = o.seed,
                                         .drop_last = true,
                                         .device = device,
                                         .shard = ranks.rank(),
                                         .shard_count = ranks.size()});
  mt::io::DataLoader validation(data.validation, {.batch_size = batch,
                                                  .device = device,
                                                  .shard = ranks.rank(),
                                                  .shard_count = ranks.size(),
                                                  .even_shards = false});

  net.to(device);
  std::optional<mt::distributed::DataParallel> dp;
  if (o.dp) {
    dp.emplace(net, ranks.world());
    mt::distributed::seed(o.seed);  // dropout of its own on every rank
  }
  mt::optim::AdamW opt(net.parameters(), {.lr = o.lr, .beta2 = 0.95f, .weight_decay = 0.1f});
  mt::GradScaler scaler({.enabled = o.precision == "fp16"});
  const mt::optim::WarmupCosine schedule{
      .lr = o.lr, .min_lr = o.lr / 10, .warmup_steps = o.steps / 20 + 1, .total_steps = o.steps};
  mt::io::Checkpoint state{
      .model = &net, .optimizers = {&opt}, .scaler = &scaler, .loader = &loader};
  if (o.resume) examples::resume("gpt2", o.out, state, ranks, o.seed);
  if (ranks.first())
    std::printf("%s: %.1f M parameters, %lld tokens in %lld windows, %s on %s\n", o.model.c_str(),
                static_cast<double>(net.parameter_count()) / 1e6,
                static_cast<long long>(data.tokens()), static_cast<long long>(data.train.size()),
                o.precision.c_str(), o.device.c_str());

  // One step: micro-batches x0, y0, x1, y1, ... of equal size, so that their mean is the batch's.
  const auto step = [&](mt::Inputs in) -> std::vector<mt::Tensor> {
    mt::Tensor total;
    for (std::size_t i = 0; i < in.size(); i += 2) {
      mt::Tensor loss;
      {
        const auto amp = autocast(o);
        loss = net.loss(in[i], in[i + 1]) * (1.0f / static_cast<float>(o.accumulate));
      }
      const bool last = i + 2 == in.size();
      const auto local = dp ? dp->no_sync(!last) : mt::distributed::DataParallel::NoSync();
      scaler.scale(loss).backward();
      total = total ? total + loss.detach() : loss.detach();
    }
    scaler.unscale(opt);
    mt::optim::clip_grad_norm(net.parameters(), 1.0f);
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    return {ranks.mean(total)};
  };
  mt::CapturedStep captured = mt::capture(step, {.device = device});

  std::optional<Report> report;
  if (ranks.first()) report.emplace(o, state.step);
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t first = state.step;
  std::vector<mt::Tensor> micro;
  mt::Tensor loss;
  const auto profiler = start_profiler(ranks.first() ? o.profile : "");
  while (state.step < o.steps) {
    for (auto& [x, y] : loader) {
      micro.insert(micro.end(), {x, y});
      if (static_cast<std::int64_t>(micro.size()) < 2 * o.accumulate) continue;
      opt.set_lr(schedule(state.step));
      loss = (o.no_capture ? step(micro) : captured(micro))[0];
      micro.clear();
      ++state.step;
      if (profiler) profiler->step();
      const auto metrics = [&] { return mt::io::ProgressMetrics{.loss = loss.item<float>()}; };
      if (report) report->bar.advance(o.accumulate * o.batch, metrics);
      if (state.step % o.eval_every == 0 || state.step == o.steps) {
        const double held_out = evaluate(net, validation, o, ranks);
        if (report) {
          report->events.scalars(
              {{"loss/train", loss.item<float>()}, {"loss/validation", held_out}, {"lr", opt.lr()}},
              state.step);
          report->bar.note(mt::detail::concat("step ", state.step, "  validation loss ", held_out));
        }
      }
      if (ranks.first() &&
          (state.step == o.steps || (o.save_every > 0 && state.step % o.save_every == 0)))
        mt::io::save_numbered_checkpoint(o.out, state, {.keep = 2});
      if (state.step == o.steps) break;
    }
  }
  const std::string communication = dp ? dp->summary() : "";
  if (!report) return 0;
  report->bar.finish_epoch(
      {.loss = loss ? std::optional<double>(loss.item<float>()) : std::nullopt});

  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto trained =
      static_cast<double>((state.step - first) * o.accumulate * o.batch * o.context);
  const mt::MemoryStats memory = mt::memory_stats(device);
  std::printf("\nTokens/s      %.0f\n%sPeak memory   %.1f MiB reserved\nCheckpoint    %s\n",
              trained / seconds, communication.c_str(),
              static_cast<double>(memory.reserved_peak) / 1048576,
              mt::io::latest_checkpoint(o.out).value_or("none").c_str());
  if (!o.save_weights.empty()) {
    mt::io::save_weights(o.save_weights, net, hugging_face_map(net.config));
    std::printf("Weights       %s\n", o.save_weights.c_str());
  }
  if (o.sample > 0) {
    net.eval();
    const auto amp = autocast(o);
    std::printf(
        "Sample\n%s\n",
        gpt2::sample(net, data.tokenizer(), o.prompt, {o.sample, o.temperature, o.seed}).c_str());
  }
  return 0;
}

int main(int argc, char** argv) {
  const Options o = gpt2::parse(argc, argv);
  try {
    return o.model == "llama" ? train<llama::Llama>(o, llama_config(o))
                              : train<gpt2::Gpt2>(o, gpt2_config(o));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpt2: %s\n", e.what());
    return 1;
  }
}
