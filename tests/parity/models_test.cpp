// The models of examples/gpt2 from weights in Hugging Face's layout against PyTorch (data from
// make_goldens.py), and that these weights come back out as they went in.
#include <gtest/gtest.h>

#include "examples/gpt2/weights.h"
#include "tests/io/io_test_util.h"
#include "tests/parity/formula.h"
#include "tests/parity/stored.h"
#include "tests/support/devices.h"

namespace mixtape::testing {
namespace {

constexpr gpt2::Config kGpt2{
    .layers = 2, .heads = 2, .channels = 16, .context = 8, .vocabulary = 24};
constexpr llama::Config kLlama{.layers = 2,
                               .heads = 4,
                               .kv_heads = 2,
                               .channels = 16,
                               .hidden = 24,
                               .context = 8,
                               .vocabulary = 24};

/// The file's tensors: every name with its shape there, and values by formula.
std::vector<nn::NamedTensor> by_formula(const nn::ModuleBase& net, const io::WeightMap& map) {
  std::vector<nn::NamedTensor> all;
  for (const nn::NamedTensor& n : io::mapped_weights(net, map))
    all.push_back({n.name, formula_weight(n.name, n.tensor.shape(), 0.5f, 0.25f)});
  return all;
}

/// Gradients by the file's names and in its layout.
std::vector<nn::NamedTensor> mapped_gradients(const nn::ModuleBase& net, const io::WeightMap& map) {
  std::vector<nn::NamedTensor> all;
  for (const nn::NamedTensor& n : net.named_parameters())
    for (const io::WeightPart& part : map.parts(n.name, n.tensor.shape()))
      all.push_back(
          {part.name, n.tensor.grad().slice(0, part.first_row, part.first_row + part.rows)});
  return all;
}

template <class Model, class Config>
void compare(const std::string& name, const Config& config, Device device) {
  const io::SafetensorsFile stored = stored_results("models");
  const io::WeightMap map = hugging_face_map(config);
  const TempDir dir;
  Model net(config);
  io::write_safetensors(dir / "w.safetensors", by_formula(net, map));
  io::load_weights(dir / "w.safetensors", net, map);
  net.to(device);
  const Tensor text = formula_tokens(name, 16, 24).reshape({2, 8}).to(device);
  const Tensor x = text.slice(1, 0, 7).contiguous(), y = text.slice(1, 1).contiguous();
  expect_close(net(x), stored.tensor(name + ".logits"), 2e-5, "logits");
  const Tensor loss = net.loss(x, y);
  expect_close(loss, stored.tensor(name + ".loss"), 2e-5, "loss");
  loss.backward();
  for (const nn::NamedTensor& g : mapped_gradients(net, map))
    expect_close(sqrt(sum(g.tensor * g.tensor)), stored.tensor(name + ".norm." + g.name), 1e-4,
                 g.name);

  io::save_weights(dir / "out.safetensors", net, map);
  const io::SafetensorsFile in(dir / "w.safetensors"), out(dir / "out.safetensors");
  ASSERT_EQ(in.entries().size(), out.entries().size());
  for (const io::SafetensorsEntry& e : in.entries()) {
    EXPECT_EQ(out.at(e.name).shape, e.shape);
    EXPECT_EQ(out.tensor(e.name).to_vector<float>(), in.tensor(e.name).to_vector<float>())
        << e.name;
  }
}

TEST(HuggingFace, Gpt2ComputesWhatPyTorchDoes) {
  for (const Device device : test_devices()) compare<gpt2::Gpt2>("gpt2", kGpt2, device);
}

TEST(HuggingFace, LlamaComputesWhatPyTorchDoes) {
  for (const Device device : test_devices()) compare<llama::Llama>("llama", kLlama, device);
}

// Files of the bare model have no prefix, old ones hold masks, and some the head as well.
TEST(HuggingFace, Gpt2FilesComeInSeveralForms) {
  const TempDir dir;
  const io::WeightMap map = hugging_face_map(kGpt2);
  gpt2::Gpt2 net(kGpt2);
  std::vector<nn::NamedTensor> bare, full = by_formula(net, map);
  for (const nn::NamedTensor& n : full) bare.push_back({n.name.substr(12), n.tensor});
  const Tensor mask = ones({1, 1, 8, 8});
  bare.push_back({"h.0.attn.bias", mask});
  full.push_back({"transformer.h.1.attn.bias", mask});
  full.push_back({"transformer.h.1.attn.masked_bias", full[0].tensor.sum().detach()});
  const auto embedding = [&]() -> const Tensor& {
    for (const nn::NamedTensor& n : full)
      if (n.name == "transformer.wte.weight") return n.tensor;
    MT_THROW("no embedding");
  };
  full.push_back({"lm_head.weight", embedding().clone()});
  for (const auto& tensors : {bare, full}) {
    {
      const NoGrad no_grad;
      net.wte.weight.zero_();
    }
    io::write_safetensors(dir / "w.safetensors", tensors);
    gpt2::Config sizes{.heads = 2};
    take_sizes(sizes, io::ShardedSafetensors(dir / "w.safetensors"));
    EXPECT_EQ(sizes.layers, 2);
    EXPECT_EQ(sizes.channels, 16);
    EXPECT_EQ(sizes.context, 8);
    EXPECT_EQ(sizes.vocabulary, 24);
    io::load_weights(dir / "w.safetensors", net, map);
    EXPECT_EQ(net.wte.weight.to_vector<float>(), embedding().to_vector<float>());
  }
  full.back().tensor = zeros({24, 16});
  io::write_safetensors(dir / "w.safetensors", full);
  EXPECT_TRUE(throws_error([&] { io::load_weights(dir / "w.safetensors", net, map); },
                           {"lm_head.weight", "transformer.wte.weight, to which it is tied"}));
}

TEST(HuggingFace, LlamaSizesAreTheFiles) {
  const TempDir dir;
  const llama::Llama net(kLlama);
  io::save_weights(dir / "w.safetensors", net, hugging_face_map(kLlama));
  const io::ShardedSafetensors file(dir / "w.safetensors");
  llama::Config sizes{.heads = 4, .context = 8};
  take_sizes(sizes, file);
  EXPECT_EQ(sizes.layers, 2);
  EXPECT_EQ(sizes.kv_heads, 2);
  EXPECT_EQ(sizes.channels, 16);
  EXPECT_EQ(sizes.hidden, 24);
  EXPECT_EQ(sizes.vocabulary, 24);
  sizes.heads = 5;
  EXPECT_TRUE(throws_error([&] { take_sizes(sizes, file); }, {"expected heads that divide 16"}));
  EXPECT_TRUE(throws_error(
      [&] {
        gpt2::Config c;
        take_sizes(c, file);
      },
      {"expected a matrix 'transformer.wte.weight', got none"}));
}

}  // namespace
}  // namespace mixtape::testing
