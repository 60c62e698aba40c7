// Weights of other names, layouts and splits; and models in one file or in shards with an index.
#include "io/weight_map.h"

#include <gtest/gtest.h>

#include "engine/grad_mode.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "optim/optimizer.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;
using Values = std::vector<float>;

struct Layer : nn::Module<Layer> {
  nn::Linear packed{2, 4}, out{2, 3};
  Layer() {
    add("packed", packed);
    add("out", out);
  }
};
struct Net : nn::Module<Net> {
  nn::ModuleList<Layer> layers;
  nn::LayerNorm norm{{2}};
  Net() {
    add("layers", layers);
    add("norm", norm);
    layers.emplace_back();
    layers.emplace_back();
  }
};

WeightMap map_of_net() {
  return WeightMap()
      .split("layers.*.packed.weight", {{"m.*.a.weight", 3}, {"m.*.b.weight", 1}})
      .split("layers.*.packed.bias", {{"m.*.a.bias", 3}, {"m.*.b.bias", 1}})
      .transpose("layers.*.out.weight", "m.*.out.kernel")
      .rename("layers.*.*.bias", "m.*.*.offset")
      .tied("head", "norm.weight")
      .ignore("m.*.mask")
      .optional_prefix("m.");
}

Values values(const std::vector<nn::NamedTensor>& tensors, const std::string& name) {
  for (const nn::NamedTensor& n : tensors)
    if (n.name == name) return n.tensor.to_vector<float>();
  return {};
}

/// 0, 1, 2, ... over all parameters.
void number(Net& net) {
  const NoGrad no_grad;
  std::int64_t next = 0;
  for (Tensor p : net.parameters()) {
    p.copy_(arange(next, next + p.numel()).reshape(p.shape()));
    next += p.numel();
  }
}

TEST(WeightMap, RenamesTransposesAndSplits) {
  Net net;
  number(net);
  const auto there = mapped_weights(net, map_of_net());
  EXPECT_EQ(values(there, "m.0.a.weight"), (Values{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(values(there, "m.0.b.weight"), (Values{6, 7}));
  EXPECT_EQ(values(there, "m.0.a.bias"), (Values{8, 9, 10}));
  EXPECT_EQ(values(there, "m.0.b.bias"), (Values{11}));
  EXPECT_EQ(values(there, "m.0.out.kernel"), (Values{12, 14, 16, 13, 15, 17}));
  EXPECT_EQ(values(there, "m.1.out.offset"), (Values{39, 40, 41}));
  EXPECT_EQ(values(there, "norm.weight"), (Values{42, 43}));  // no rule: its own name
}

TEST(WeightMap, WhatIsSavedIsLoaded) {
  const TempDir dir;
  Net from, to;
  number(from);
  save_weights(dir / "w.safetensors", from, map_of_net());
  EXPECT_EQ(SafetensorsFile(dir / "w.safetensors").metadata(), (StringMap{{"format", "pt"}}));
  load_weights(dir / "w.safetensors", to, map_of_net());
  for (std::size_t i = 0; i < from.parameters().size(); ++i)
    EXPECT_EQ(to.parameters()[i].to_vector<float>(), from.parameters()[i].to_vector<float>());
  Net plain;
  save_weights(dir / "plain.safetensors", from);
  load_weights(dir / "plain.safetensors", plain);
  EXPECT_EQ(plain.norm.bias.to_vector<float>(), from.norm.bias.to_vector<float>());
}

TEST(WeightMap, LoadsOtherDtypesIntoParametersThatAnOptimizerHolds) {
  const TempDir dir;
  Net from, to;
  number(from);
  from.to(Dtype::bf16);
  save_weights(dir / "w.safetensors", from, map_of_net());
  to.to(Dtype::f16);
  optim::Sgd opt(to.parameters(), {.lr = 0});
  load_weights(dir / "w.safetensors", to, map_of_net());
  for (Tensor p : to.parameters()) p.set_grad(zeros(p.shape()));
  opt.step();
  EXPECT_EQ(to.layers[1].out.bias.to_vector<float>(), (Values{39, 40, 41}));
}

TEST(WeightMap, FilesMayLackThePrefixAndHoldWhatIsNotNeeded) {
  const TempDir dir;
  Net from, to;
  number(from);
  std::vector<nn::NamedTensor> tensors;
  for (const nn::NamedTensor& n : mapped_weights(from, map_of_net()))
    tensors.push_back({n.name.starts_with("m.") ? n.name.substr(2) : n.name, n.tensor});
  tensors.push_back({"1.mask", zeros({3})});
  tensors.push_back({"head", from.norm.weight.detach().clone()});
  write_safetensors(dir / "w.safetensors", tensors);
  load_weights(dir / "w.safetensors", to, map_of_net());
  EXPECT_EQ(to.layers[1].out.bias.to_vector<float>(), (Values{39, 40, 41}));

  tensors.back().tensor = zeros({2});
  write_safetensors(dir / "w.safetensors", tensors);
  EXPECT_TRUE(throws_error([&] { load_weights(dir / "w.safetensors", to, map_of_net()); },
                           {"head: expected the values of norm.weight, to which it is tied"}));
}

TEST(WeightMap, FaultsAreListedAndNothingChanges) {
  const TempDir dir;
  Net from, to;
  number(from);
  const Values before = to.norm.weight.to_vector<float>();
  std::vector<nn::NamedTensor> tensors = mapped_weights(from, map_of_net());
  tensors[0].tensor = zeros({2, 2});                      // m.0.a.weight
  tensors[1].name = "m.0.c.weight";                       // was m.0.b.weight
  tensors[2].tensor = zeros({3}, {.dtype = Dtype::i64});  // m.0.a.bias
  write_safetensors(dir / "w.safetensors", tensors);
  EXPECT_TRUE(throws_error(
      [&] { load_weights(dir / "w.safetensors", to, map_of_net()); },
      {"load_weights: ", "w.safetensors", "m.0.a.weight: expected float32(3, 2), got float32(2, 2)",
       "missing: m.0.b.weight float32(1, 2)", "m.0.a.bias: expected float32(3,), got int64(3,)",
       "unexpected: m.0.c.weight float32(1, 2)"}));
  EXPECT_EQ(to.norm.weight.to_vector<float>(), before);
  write_safetensors(dir / "none.safetensors", {{"x", zeros({1})}});
  nn::Sequential many;
  for (int i = 0; i < 15; ++i) many.push<nn::Linear>(1, 1);
  EXPECT_TRUE(throws_error([&] { load_weights(dir / "none.safetensors", many); },
                           {"missing: 9.bias", "and 11 more"}));
}

TEST(WeightMap, RulesAreChecked) {
  EXPECT_TRUE(throws_error([] { WeightMap().rename("a.*.b", "c.d"); },
                           {"as many '*' in 'c.d' as in 'a.*.b'"}));
  EXPECT_TRUE(throws_error([] { WeightMap().split("a", {}); }, {"at least one piece of 'a'"}));
  EXPECT_TRUE(throws_error(
      [] {
        WeightMap().split("a", {{"b", 0}});
      },
      {"at least one row in the piece 'b', got 0"}));
  EXPECT_TRUE(throws_error(
      [] {
        WeightMap().split("a", {{"b", 1}, {"c", 2}}).parts("a", {4, 2});
      },
      {"pieces of 4 rows together for 'a', got 3"}));
  EXPECT_TRUE(throws_error([] { WeightMap().transpose("a", "b").parts("a", {4}); },
                           {"a matrix to transpose for 'a', got (4,)"}));
}

// ---- shards ------------------------------------------------------------------------------------

constexpr const char* kIndex = "model.safetensors.index.json";

/// Two shards, and an index that lists x and y in the first and z in the second.
void write_shards(const TempDir& dir) {
  write_safetensors(dir / "model-1.safetensors", {{"x", full({2}, 1)}, {"y", full({2}, 2)}});
  write_safetensors(dir / "model-2.safetensors", {{"z", full({3}, 3)}});
  spew(dir / kIndex, R"({"metadata": {"total_size": 28}, "weight_map": {"x": "model-1.safetensors",
       "y": "model-1.safetensors", "z": "model-2.safetensors"}})");
}

TEST(ShardedSafetensors, ReadsShardsByTheirIndex) {
  const TempDir dir;
  write_shards(dir);
  for (const auto& path : {dir.path(), dir / kIndex}) {
    const ShardedSafetensors file(path);
    EXPECT_EQ(file.names(), (std::vector<std::string>{"x", "y", "z"}));
    EXPECT_EQ(file.file_count(), 2);
    EXPECT_EQ(file.tensor("z").to_vector<float>(), (Values{3, 3, 3}));
    EXPECT_EQ(file.find("y")->shape, (Shape{2}));
    EXPECT_EQ(file.find("w"), nullptr);
    EXPECT_TRUE(throws_error([&] { (void)file.tensor("w"); }, {"expected a tensor 'w', got none"}));
  }
}

TEST(ShardedSafetensors, ReadsOneFileAndAFolderWithOne) {
  const TempDir dir;
  EXPECT_TRUE(throws_error([&] { ShardedSafetensors file(dir.path()); },
                           {"expected a folder with model.safetensors.index.json"}));
  write_safetensors(dir / "model.safetensors", {{"x", full({2}, 1)}});
  for (const auto& path : {dir.path(), dir / "model.safetensors"})
    EXPECT_EQ(ShardedSafetensors(path).tensor("x").to_vector<float>(), (Values{1, 1}));
}

TEST(ShardedSafetensors, IndexAndShardsMustAgree) {
  const TempDir dir;
  write_shards(dir);
  const auto fails = [&](const char* index, std::string_view text) {
    spew(dir / kIndex, index);
    return throws_error([&] { ShardedSafetensors file(dir.path()); }, {text});
  };
  EXPECT_TRUE(fails("[]", "expected an object 'weight_map'"));
  EXPECT_TRUE(fails(R"({"weight_map": {}})", "expected an object 'weight_map'"));
  EXPECT_TRUE(fails(R"({"weight_map": {"x": 1}})", "expected the name of a file for 'x'"));
  EXPECT_TRUE(fails(R"({"weight_map": {"x": "../model-1.safetensors"}})",
                    "expected a file beside the index for 'x'"));
  EXPECT_TRUE(fails(R"({"weight_map": {"x": "model-3.safetensors"}})", "model-3.safetensors"));
  EXPECT_TRUE(fails(R"({"weight_map": {"x": "model-1.safetensors"}})",
                    "expected the index to list 'y' in model-1.safetensors"));
  EXPECT_TRUE(fails(R"({"weight_map": {"z": "model-2.safetensors", "w": "model-2.safetensors"}})",
                    "expected 'w' in model-2.safetensors"));
  EXPECT_TRUE(fails(R"({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors",
                        "z": "model-2.safetensors"}})",
                    "expected the index to list 'y' in model-1.safetensors"));
  EXPECT_TRUE(fails("{", "expected valid JSON"));
}

}  // namespace
}  // namespace mixtape::io
