// nn::MultiheadAttention against torch.nn.MultiheadAttention (models.safetensors, from
// make_goldens.py): values and every gradient, with weights by PyTorch's names.
#include "nn/attention.h"

#include <gtest/gtest.h>

#include "tests/parity/formula.h"
#include "tests/parity/stored.h"
#include "tests/support/devices.h"

namespace mixtape::testing {
namespace {

/// One case of make_goldens.py: inputs by formula from names and shapes, results as stored.
struct Case {
  std::string name;
  std::int64_t channels;
  nn::MultiheadAttentionConfig config;
  Shape q, k, v;
  Tensor mask = {};
};

Tensor formula_tensor(const std::string& name, const Shape& shape, Device device) {
  return from_vector(uniform(name, shape.numel()), shape).to(device);
}

void compare(const Case& c, Device device) {
  const io::SafetensorsFile stored = stored_results("models");
  nn::MultiheadAttention attention(c.channels, c.config);
  std::vector<nn::NamedTensor> weights;
  for (const nn::NamedTensor& n : attention.state_dict())
    weights.push_back(
        {n.name, formula_weight(c.name + "." + n.name, n.tensor.shape(), 0.5f, 0.25f)});
  attention.load_state_dict(weights);
  attention.to(device);
  const bool self = c.name == "self";
  const auto input = [&](const char* name, const Shape& shape) {
    return formula_tensor(c.name + "." + (self ? "x" : name), shape, device).set_requires_grad();
  };
  // PyTorch's key and value are equal in "memory" too.
  const Tensor q = input("q", c.q), k = input("k", c.k),
               v = input(c.name == "memory" ? "k" : "v", c.v);
  const Tensor mask = c.mask ? c.mask.to(device) : c.mask;
  const Tensor y = attention(q, k, v, mask);
  expect_close(y, stored.tensor(c.name + ".y"), 1e-5, c.name);
  sum(y * formula_tensor(c.name + ".dy", y.shape(), device)).backward();
  expect_close(q.grad(), stored.tensor(c.name + ".dq"), 1e-5, c.name + ".dq");
  expect_close(k.grad(), stored.tensor(c.name + ".dk"), 1e-5, c.name + ".dk");
  expect_close(v.grad(), stored.tensor(c.name + ".dv"), 1e-5, c.name + ".dv");
  for (const nn::NamedTensor& p : attention.named_parameters())
    expect_close(p.tensor.grad(), stored.tensor(c.name + ".d" + p.name), 1e-5, p.name);
}

TEST(MultiheadAttention, ComputesWhatPyTorchDoes) {
  for (const Device device : test_devices()) {
    compare({.name = "self",
             .channels = 8,
             .config = {.heads = 2, .causal = true},
             .q = {2, 5, 8},
             .k = {2, 5, 8},
             .v = {2, 5, 8}},
            device);
    compare({.name = "cross",
             .channels = 8,
             .config = {.heads = 4, .key_channels = 6, .value_channels = 10},
             .q = {2, 3, 8},
             .k = {2, 4, 6},
             .v = {2, 4, 10},
             .mask = formula_tensor("cross.mask", {3, 4}, Device::cpu())},
            device);
    compare({.name = "memory",
             .channels = 8,
             .config = {.heads = 2, .bias = false},
             .q = {2, 3, 8},
             .k = {2, 6, 8},
             .v = {2, 6, 8}},
            device);
  }
}

}  // namespace
}  // namespace mixtape::testing
