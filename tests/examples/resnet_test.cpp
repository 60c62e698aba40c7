// The ResNets of examples/resnet50 against torchvision's structure in PyTorch: names, counts, and
// logits in training and evaluation from weights that both sides make by the same formula.
//
// resnet_golden.py makes the numbers below.
#include "examples/resnet50/resnet.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/examples/resnet_golden.h"
#include "tests/support/devices.h"

namespace mixtape::testing {
namespace {

/// Numbers without pattern between offset - scale and offset + scale, as resnet_golden.py's.
Tensor scattered(const Shape& shape, double scale, double offset = 0) {
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = scale * (static_cast<double>((31 * i * i + 17 * i) % 1009) / 504 - 1) + offset;
  return from_vector(values, shape).to(Dtype::f32);
}

void fill(nn::ModuleBase& net) {
  const NoGrad no_grad;
  for (auto& [name, tensor] : net.state_dict()) {
    Tensor t = tensor;
    if (t.dim() == 4)
      t.copy_(scattered(t.shape(), std::sqrt(6.0 / static_cast<double>(t.numel() / t.size(0)))));
    else if (name == "fc.weight")
      t.copy_(scattered(t.shape(), 0.05));
    else if (name.ends_with("running_var"))
      t.copy_(scattered(t.shape(), 0.1, 1));
    else if (t.dim() == 1)
      t.copy_(scattered(t.shape(), 0.1, name.ends_with("weight") ? 0.5 : 0));
  }
}

void expect_logits(const Tensor& got, const std::vector<double>& want) {
  const std::vector<double> values = got.detach().to_vector<double>();
  ASSERT_EQ(values.size(), want.size());
  double largest = 0;
  for (const double w : want) largest = std::max(largest, std::abs(w));
  // The float32 roundings of some fifty layers, each a sum of up to 4608 products.
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(values[i], want[i], 2e-3 * largest);
}

TEST(ResNet, MatchesPyTorch) {
  for (const Device device : test_devices()) {
    for (const resnet_golden::Logits& golden : resnet_golden::kLogits) {
      for (const bool last : {false, true}) {
        SCOPED_TRACE(detail::concat(golden.layers, " layers, channels-last ", last));
        resnet::ResNet net({.layers = golden.layers, .classes = 4});
        fill(net);
        net.to(device);
        Tensor x = scattered({2, 3, 64, 64}, 1).to(device);
        if (last) x = to_channels_last(x);
        net.eval();
        expect_logits(net(x), golden.evaluation);
        net.train();
        expect_logits(net(x), golden.training);
      }
    }
  }
}

TEST(ResNet, HasTorchvisionsNamesAndCounts) {
  const std::pair<std::int64_t, std::int64_t> counts[] = {
      {18, 11689512}, {34, 21797672}, {50, 25557032}};
  for (const auto& [layers, count] : counts) {
    resnet::ResNet net({.layers = layers});
    EXPECT_EQ(net.parameter_count(), count) << layers;
    std::vector<std::string> names;
    for (const nn::NamedTensor& t : net.state_dict()) names.push_back(t.name);
    for (const char* name :
         {"conv1.weight", "bn1.running_mean", "layer1.0.conv2.weight",
          "layer2.0.downsample.0.weight", "layer2.0.downsample.1.num_batches_tracked",
          "layer4.1.bn2.bias", "fc.bias"})
      EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
  EXPECT_THROW(resnet::ResNet({.layers = 19}), Error);
}

}  // namespace
}  // namespace mixtape::testing
