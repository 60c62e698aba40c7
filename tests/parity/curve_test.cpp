// A small GPT-2 trained for 100 steps against PyTorch's losses from the same weights and tokens
// (curves.safetensors, from make_goldens.py): fp32 within 1e-3 at every step, 16 bits as close to
// PyTorch's fp32 as PyTorch's own autocast run is (parity.py says why the ratio of the distances
// may be 1.5); and two runs are bit-identical.
#include <gtest/gtest.h>

#include "examples/gpt2/weights.h"
#include "tests/parity/formula.h"
#include "tests/parity/stored.h"
#include "tests/parity/train.h"
#include "tests/support/devices.h"

namespace mixtape::testing {
namespace {

// SMALL in parity.py.
constexpr gpt2::Config kConfig{
    .layers = 2, .heads = 4, .channels = 64, .context = 64, .vocabulary = 128};
constexpr std::int64_t kBatch = 8;

std::vector<float> losses(const std::string& precision, std::int64_t steps, Device device,
                          bool captured = false) {
  gpt2::Gpt2 net(kConfig);
  const io::WeightMap map = hugging_face_map(kConfig);
  const NoGrad no_grad;
  for (const nn::NamedTensor& n : io::mapped_weights(net, map))  // views of the parameters
    Tensor(n.tensor).copy_(formula_weight(n.name, n.tensor.shape(), 0.035f, 0));
  net.to(device);
  const EnableGrad grad;
  const std::int64_t count = 100 * kBatch * (kConfig.context + 1);
  const Tensor text =
      formula_tokens("text", count, kConfig.vocabulary).reshape({100, kBatch, kConfig.context + 1});
  return train(net, text.slice(0, 0, steps),
               {.precision = precision, .lr = 2e-3f, .captured = captured});
}

std::vector<double> relative(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<double> all;
  for (std::size_t i = 0; i < a.size(); ++i)
    all.push_back(std::abs(static_cast<double>(a[i]) - b[i]) / std::abs(b[i]));
  return all;
}

double rms(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

TEST(LossCurve, InFloat32IsPyTorchs) {
  const std::vector<float> want = stored_results("curves").tensor("fp32").to_vector<float>();
  for (const Device device : test_devices()) {
    for (const bool captured : {false, true}) {
      if (captured && device.is_cpu()) continue;  // the same step there
      const std::vector<float> got = losses("fp32", 100, device, captured);
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t i = 0; i < got.size(); ++i)
        ASSERT_NEAR(got[i], want[i], 1e-3 * want[i]) << "step " << i << " on " << device;
    }
  }
}

TEST(LossCurve, InSixteenBitsIsAsCloseAsPyTorchsOwn) {
  const io::SafetensorsFile stored = stored_results("curves");
  const std::vector<float> reference = stored.tensor("fp32").to_vector<float>();
  for (const Device device : test_devices()) {
    for (const char* precision : {"bf16", "fp16"}) {
      const double theirs = rms(relative(stored.tensor(precision).to_vector<float>(), reference));
      const double got = rms(relative(losses(precision, 100, device), reference));
      EXPECT_LE(got, 1.5 * theirs) << precision << " on " << device;
    }
  }
}

TEST(LossCurve, IsTheSameInEveryBitWhenRunAgain) {
  for (const Device device : test_devices())
    for (const char* precision : {"fp32", "bf16", "fp16"})
      EXPECT_EQ(losses(precision, 20, device), losses(precision, 20, device)) << precision;
}

}  // namespace
}  // namespace mixtape::testing
