// Checkpoints: what comes back, what is refused, and resuming a run. CASES 50, 64, 107.
#include "io/checkpoint.h"

#include <cstring>

#include "engine/autocast.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "optim/schedule.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::slurp;
using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

struct Net : nn::Module<Net> {
  nn::Linear in{6, 16}, out{16, 3};
  nn::Dropout dropout{0.5};
  Tensor mean = zeros({6});
  explicit Net(std::int64_t hidden = 16) : in(6, hidden), out(hidden, 3) {
    add("in", in);
    add("out", out);
    add("dropout", dropout);
    add_buffer("mean", mean);
  }
  Tensor forward(const Tensor& x) { return out(dropout(relu(in(x - mean)))); }
};

std::string bytes_of(const Tensor& t) {
  const Tensor dense = t.contiguous();
  return {static_cast<const char*>(dense.raw_data()),
          static_cast<std::size_t>(dense.numel()) * size_of(dense.dtype())};
}

void expect_same_state(const optim::State& a, const optim::State& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    EXPECT_EQ(a[i].tensor.describe(), b[i].tensor.describe()) << a[i].name;
    EXPECT_EQ(bytes_of(a[i].tensor), bytes_of(b[i].tensor)) << a[i].name;
  }
}

/// A run with everything that a checkpoint covers: 40 samples in batches of 8, shuffled, dropout,
/// float16 autocast, a GradScaler and a schedule.
struct TrainingRun {
  explicit TrainingRun(std::uint64_t seed)
      : data(randn({40, 6}), randint(0, 3, {40}, {.dtype = Dtype::i64})) {
    manual_seed(seed);
    for (const Tensor& p : net.parameters()) {
      const NoGrad no_grad;
      Tensor(p).uniform_(-0.4, 0.4);
    }
  }
  /// Losses of `steps` steps.
  std::vector<float> train(int steps) {
    std::vector<float> losses;
    while (steps > 0) {
      for (auto& [x, y] : loader) {
        opt.set_lr(schedule(checkpoint.step));
        Tensor loss;
        {
          const Autocast amp(Dtype::f16);
          loss = cross_entropy(net(x), y);
        }
        scaler.scale(loss).backward();
        scaler.step(opt);
        scaler.update();
        opt.zero_grad();
        losses.push_back(loss.item<float>());
        ++checkpoint.step;
        if (--steps == 0) break;
      }
    }
    return losses;
  }
  Net net;
  TensorDataset data;
  DataLoader loader{data, {.batch_size = 8, .shuffle = true, .seed = 5}};
  optim::AdamW opt{net.parameters(), {.lr = 1e-2f, .weight_decay = 0.1f}};
  GradScaler scaler{{.init_scale = 1024, .growth_interval = 3}};
  optim::WarmupCosine schedule{.lr = 3e-2f, .warmup_steps = 4, .total_steps = 20};
  Checkpoint checkpoint{.model = &net, .optimizers = {&opt}, .scaler = &scaler, .loader = &loader};
};

// 14 steps cross two ends of an epoch (5 batches); the cut falls within the second.
TEST(Checkpoint, Case107ResumingIsNotStopping) {
  const TempDir dir;
  manual_seed(1);
  TrainingRun whole(2);
  const std::vector<float> expected = whole.train(14);

  manual_seed(1);
  std::vector<float> losses;
  {
    TrainingRun first(2);
    losses = first.train(7);
    first.checkpoint.metadata["note"] = "half way";
    save_checkpoint(dir / "c", first.checkpoint);
  }
  manual_seed(1);
  TrainingRun second(99);  // other weights,
  (void)randn({1000});     // generators elsewhere,
  (void)second.train(3);   // moments, scale and loader too
  load_checkpoint(dir / "c", second.checkpoint);
  EXPECT_EQ(second.checkpoint.step, 7);
  EXPECT_EQ(second.checkpoint.metadata, (StringMap{{"note", "half way"}}));
  const std::vector<float> rest = second.train(7);
  losses.insert(losses.end(), rest.begin(), rest.end());
  EXPECT_EQ(losses, expected);
  for (std::size_t i = 0; i < whole.net.parameters().size(); ++i)
    EXPECT_EQ(bytes_of(whole.net.parameters()[i]), bytes_of(second.net.parameters()[i]));
  EXPECT_EQ(whole.scaler.get_scale(), second.scaler.get_scale());
  EXPECT_EQ(whole.loader.state(), second.loader.state());
}

TEST(Checkpoint, Case64StateKeepsItsDtype) {
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16, Dtype::f32}) {
    const TempDir dir;
    Net a, b;
    a.to(dtype);
    b.to(dtype);
    optim::AdamW opt_a(a.parameters(), {.lr = 0.01f}), opt_b(b.parameters(), {.lr = 0.5f});
    for (int step = 0; step < 3; ++step) {
      // The second layer has no gradient in the first step: its step counts differ.
      Tensor loss = a.in(ones({2, 6}, {.dtype = dtype})).sum();
      if (step > 0) loss = loss + a(ones({2, 6}, {.dtype = dtype})).sum();
      loss.backward();
      opt_a.step();
      opt_a.zero_grad();
    }
    save_checkpoint(dir / "c", {.model = &a, .optimizers = {&opt_a}});
    Checkpoint into{.model = &b, .optimizers = {&opt_b}};
    load_checkpoint(dir / "c", into);
    expect_same_state(opt_a.state_dict(), opt_b.state_dict());
    expect_same_state(a.state_dict(), b.state_dict());
    EXPECT_EQ(opt_b.lr(), 0.01f);
    const SafetensorsFile file(dir / "c");
    EXPECT_EQ(file.at("model.in.weight").dtype, dtype);
    EXPECT_EQ(file.at("optimizer.0.in.weight.exp_avg").dtype, Dtype::f32);
    EXPECT_EQ(file.contains("optimizer.0.in.weight.master"), dtype != Dtype::f32);
    EXPECT_EQ(file.tensor("optimizer.0.in.weight.step").item<float>(), 3);
    EXPECT_EQ(file.tensor("optimizer.0.out.weight.step").item<float>(), 2);
  }
}

/// One weight and a scaler; an infinite input makes an overflow.
struct Scaled {
  Tensor w = ones({1});
  optim::Sgd opt{{w.set_requires_grad()}, {.lr = 1e-3f}};
  GradScaler scaler{{.init_scale = 65536, .growth_interval = 50}};
  void step(float x) {
    scaler.scale((w * tensor({x})).sum()).backward();
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
  }
};

TEST(Checkpoint, Case50ScaleAndTrackerComeBack) {
  const TempDir dir;
  Scaled a, b;
  for (int i = 0; i < 3; ++i) a.step(std::numeric_limits<float>::infinity());
  for (int i = 0; i < 37; ++i) a.step(0.1f);
  EXPECT_EQ(a.scaler.get_scale(), 8192);
  EXPECT_EQ(a.scaler.state_dict()[0].tensor.to_vector<float>()[1], 37);
  b.step(1);
  save_checkpoint(dir / "c",
                  {.optimizers = {&a.opt}, .scaler = &a.scaler, .tensors = {{"w", a.w}}});
  Checkpoint into{.optimizers = {&b.opt}, .scaler = &b.scaler, .tensors = {{"w", b.w}}};
  load_checkpoint(dir / "c", into);
  expect_same_state(a.scaler.state_dict(), b.scaler.state_dict());
  for (int i = 0; i < 100; ++i) {
    a.step(static_cast<float>(i) * 0.01f);
    b.step(static_cast<float>(i) * 0.01f);
    ASSERT_EQ(bytes_of(a.w), bytes_of(b.w)) << i;
    ASSERT_EQ(a.scaler.get_scale(), b.scaler.get_scale()) << i;
  }
  EXPECT_EQ(a.scaler.get_scale(), 8192 * 4);
}

// Two models with the same names in one optimizer: each gets its own moments back.
TEST(Checkpoint, OneOptimizerOverTwoModels) {
  const TempDir dir;
  Net a, b;
  std::vector<Tensor> both = a.parameters();
  for (const Tensor& p : b.parameters()) both.push_back(p);
  optim::Adam opt(both);
  a(ones({1, 6})).sum().backward();
  opt.step();
  save_checkpoint(dir / "c", {.optimizers = {&opt}});
  const optim::State before = opt.state_dict();
  std::vector<std::string> kept;
  for (const nn::NamedTensor& n : before) kept.push_back(bytes_of(n.tensor));
  b(ones({1, 6})).sum().backward();
  opt.step();
  Checkpoint into{.optimizers = {&opt}};
  load_checkpoint(dir / "c", into);
  for (std::size_t i = 0; i < before.size(); ++i)
    EXPECT_EQ(bytes_of(opt.state_dict()[i].tensor), kept[i]) << before[i].name;
}

// ---- what is refused ---------------------------------------------------------------------------

TEST(Checkpoint, FaultsAreListedAndNothingChanges) {
  const TempDir dir;
  Net small(8), large(16);
  save_checkpoint(dir / "c", {.model = &small});
  Checkpoint into{.model = &large};
  const std::string before = bytes_of(large.in.weight);
  const PhiloxState random = random_state(Device::cpu());
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "c", into); },
                           {"load_checkpoint",
                            "model.in.weight: expected float32(16, 6), got "
                            "float32(8, 6)",
                            "model.in.bias", "model.out.weight"}));
  EXPECT_EQ(bytes_of(large.in.weight), before);
  EXPECT_EQ(random_state(Device::cpu()), random);

  Net half(8);
  half.to(Dtype::bf16);
  into.model = &half;
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "c", into); },
                           {"model.in.weight: expected bfloat16(8, 6), got float32(8, 6)"}));

  struct Wider : Net {
    nn::Linear extra{1, 1};
    Wider() : Net(8) { add("extra", extra); }
  } wider;
  into.model = &wider;
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "c", into); },
                           {"model.extra.weight: expected float32(1, 1), got none"}));
  save_checkpoint(dir / "w", {.model = &wider});
  into.model = &small;
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "w", into); },
                           {"model.extra.weight: expected none, got float32(1, 1)"}));
}

TEST(Checkpoint, PartsThatTheFileLacks) {
  const TempDir dir;
  manual_seed(3);
  TrainingRun run(3);
  save_checkpoint(dir / "c", {.model = &run.net, .random = false});
  const auto fails = [&](Checkpoint into, std::string_view part) {
    return throws_error([&] { load_checkpoint(dir / "c", into); }, {"load_checkpoint", part});
  };
  EXPECT_TRUE(fails({.model = &run.net}, "random generators"));
  EXPECT_TRUE(fails({.optimizers = {&run.opt}, .random = false}, "expected 1 optimizers, got 0"));
  EXPECT_TRUE(fails({.scaler = &run.scaler, .random = false}, "a GradScaler"));
  EXPECT_TRUE(fails({.loader = &run.loader, .random = false}, "a loader's position"));
  EXPECT_TRUE(fails({.tensors = {{"w", ones({1})}}, .random = false}, "further tensors"));
  Checkpoint model_only{.model = &run.net, .random = false};
  load_checkpoint(dir / "c", model_only);

  save_checkpoint(dir / "c", run.checkpoint);
  load_checkpoint(dir / "c", model_only);
  DataLoader other(run.data, {.batch_size = 4, .shuffle = true, .seed = 5});
  Checkpoint into{.loader = &other};
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "c", into); },
                           {"DataLoader::load_state: batch size: expected 4, got 8"}));
}

TEST(Checkpoint, OtherFilesAndReservedKeys) {
  const TempDir dir;
  Net net;
  Checkpoint c{.model = &net};
  write_safetensors(dir / "plain", net.state_dict());
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "plain", c); }, {"expected a checkpoint"}));
  write_safetensors(dir / "new", net.state_dict(), {{"mixtape.checkpoint", R"({"version":3})"}});
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "new", c); }, {"version 2, got 3"}));
  for (const char* text : {"[]", "{", R"({"version":2,"step":"x"})", R"({"version":2,"step":3})"}) {
    write_safetensors(dir / "bad", net.state_dict(), {{"mixtape.checkpoint", text}});
    EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "bad", c); }, {"mixtape.checkpoint"}));
  }
  c.metadata["mixtape.checkpoint"] = "x";
  EXPECT_TRUE(throws_error([&] { save_checkpoint(dir / "c", c); }, {"'mixtape.checkpoint'"}));
  struct Plain : optim::Optimizer {
    void step() override {}
    std::vector<Tensor> parameters() const override { return {}; }
  } plain;
  EXPECT_TRUE(throws_error([&] { save_checkpoint(dir / "c", {.optimizers = {&plain}}); },
                           {"override state_dict()"}));
}

struct Tied : nn::Module<Tied> {
  nn::Linear a{4, 4, {.bias = false}}, b{4, 4, {.bias = false}};
  explicit Tied(bool tie) {
    if (tie) b.weight = a.weight;
    add("a", a);
    add("b", b);
  }
  Tensor forward(const Tensor& x) { return b(a(x)); }
};

TEST(Checkpoint, TiedParametersDoNotTakeTwoValues) {
  const TempDir dir;
  Tied tied(true), other(true), untied(false);
  save_checkpoint(dir / "tied", {.model = &tied});
  save_checkpoint(dir / "untied", {.model = &untied});
  Checkpoint into{.model = &other};
  load_checkpoint(dir / "tied", into);
  EXPECT_EQ(bytes_of(other.b.weight), bytes_of(tied.a.weight));
  EXPECT_TRUE(other.a.weight.same(other.b.weight));
  EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "untied", into); },
                           {"model.b.weight", "tied to model.a.weight"}));
}

// ---- a directory of them -----------------------------------------------------------------------

TEST(Checkpoint, TheNewestAreKept) {
  const TempDir dir;
  const std::filesystem::path run = dir / "runs/a";
  EXPECT_EQ(latest_checkpoint(run), std::nullopt);
  Net net;
  Checkpoint c{.model = &net};
  for (const std::int64_t step : {5, 90, 100, 1000}) {
    c.step = step;
    EXPECT_EQ(save_numbered_checkpoint(run, c, {.keep = 3}), checkpoint_path(run, step));
  }
  spew(run / "checkpoint-12x.safetensors", "");
  spew(run / "notes.txt", "");
  EXPECT_EQ(list_checkpoints(run), (std::vector{checkpoint_path(run, 90), checkpoint_path(run, 100),
                                                checkpoint_path(run, 1000)}));
  EXPECT_EQ(latest_checkpoint(run), checkpoint_path(run, 1000));
  EXPECT_EQ(checkpoint_path("r", 1000).string(), "r/checkpoint-000000001000.safetensors");
  // Going back to an earlier step never removes what was just written.
  c.step = 7;
  (void)save_numbered_checkpoint(run, c, {.keep = 1});
  EXPECT_EQ(list_checkpoints(run), std::vector{checkpoint_path(run, 7)});
  EXPECT_TRUE(std::filesystem::exists(run / "notes.txt"));
  EXPECT_TRUE(throws_error([&] { (void)save_numbered_checkpoint(run, c, {.keep = -1}); }, {"-1"}));
  spew(dir / "file", "");
  EXPECT_TRUE(throws_error([&] { (void)list_checkpoints(dir / "file"); }, {"cannot read", "file"}));
  EXPECT_TRUE(
      throws_error([&] { (void)save_numbered_checkpoint(dir / "file", c); }, {"cannot make"}));
}

TEST(Checkpoint, TheNewestWholeOneIsFound) {
  const TempDir dir;
  Net net;
  Checkpoint c{.model = &net};
  EXPECT_EQ(newest_whole_checkpoint(dir / "none").path, std::nullopt);
  for (c.step = 1; c.step <= 5; ++c.step) (void)save_numbered_checkpoint(dir.path(), c);
  EXPECT_EQ(newest_whole_checkpoint(dir.path()).step, 5);
  // One bit of a tensor's bytes, a shorter file, an empty one, and the file of another step.
  const auto damage = [&](std::int64_t step, auto&& change) {
    std::string bytes = slurp(checkpoint_path(dir.path(), step));
    change(bytes);
    spew(checkpoint_path(dir.path(), step), bytes);
  };
  damage(5, [](std::string& b) { b[b.size() - 3] = static_cast<char>(b[b.size() - 3] ^ 1); });
  damage(4, [](std::string& b) { b.resize(b.size() / 2); });
  damage(3, [](std::string& b) { b.clear(); });
  damage(2, [&](std::string& b) { b = slurp(checkpoint_path(dir.path(), 1)); });
  const WholeCheckpoint found = newest_whole_checkpoint(dir.path());
  EXPECT_EQ(found.path, checkpoint_path(dir.path(), 1));
  EXPECT_EQ(found.step, 1);
  ASSERT_EQ(found.skipped.size(), 4u);
  EXPECT_EQ(found.skipped[0].path, checkpoint_path(dir.path(), 5));
  EXPECT_NE(found.skipped[0].reason.find("CRC-32"), std::string::npos);
  EXPECT_NE(found.skipped[3].reason.find("step of its name"), std::string::npos);
  EXPECT_TRUE(throws_error([&] { load_checkpoint(checkpoint_path(dir.path(), 5), c); },
                           {"damaged", "CRC-32"}));
}

TEST(Checkpoint, EveryByteIsUnderTheChecksum) {
  const TempDir dir;
  const Tensor t = full({3}, 1.5, {});
  save_checkpoint(dir / "a", {.tensors = {{"t", t}}, .random = false});
  const std::string whole = slurp(dir / "a");
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string bytes = whole;
    bytes[i] = static_cast<char>(bytes[i] ^ 4);
    spew(dir / "b", bytes);
    Checkpoint into{.tensors = {{"t", t}}, .random = false};
    EXPECT_TRUE(throws_error([&] { load_checkpoint(dir / "b", into); }, {})) << "byte " << i;
  }
}

}  // namespace
}  // namespace mixtape::io
