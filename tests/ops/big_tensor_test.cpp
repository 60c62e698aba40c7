// Tensors of more than 2^31 elements (CASES 16): correct at the first, the last and the 2^31-th
// element. Needs tens of gigabytes, so it runs on GPUs that have them.
#include <gtest/gtest.h>

#include "engine/allocator.h"

#include <functional>
#include "engine/autocast.h"
#include "engine/grad_mode.h"
#include "ops/ops.h"
#include "tests/support/devices.h"

namespace mixtape {
namespace {

constexpr std::int64_t kRows = 65536, kColumns = 32769;  // 2^31 + 65536 elements
constexpr std::int64_t kCount = kRows * kColumns, kBoundary = std::int64_t{1} << 31;

class BigTensor : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::chosen_device() == "cpu" || cuda_device_count() == 0)
      GTEST_SKIP() << "needs a GPU of 40 GiB";
    device = Device::cuda();
    try {
      const Tensor room = empty({10 * kBoundary}, {.dtype = Dtype::f16, .device = device});
    } catch (const OutOfMemory&) {
      GTEST_SKIP() << "needs a GPU with 40 GiB free";
    }
    empty_cache(device);
  }
  /// Elements at the places where an index might wrap.
  static void expect_at(const Tensor& t, const std::function<double(std::int64_t)>& value) {
    const Tensor flat = t.reshape({-1});
    for (const std::int64_t i :
         {std::int64_t{0}, kBoundary - 1, kBoundary, kBoundary + 1, kCount - 1})
      EXPECT_EQ(flat.slice(0, i, i + 1).item<double>(), value(i)) << "element " << i;
  }
  static double row_value(std::int64_t row) { return static_cast<double>(row % 64); }
  static double column_value(std::int64_t column) { return static_cast<double>(column % 32) / 32; }
  Tensor rows() const { return arange_mod(kRows, 64).reshape({kRows, 1}); }
  Tensor columns() const { return (arange_mod(kColumns, 32) / 32.0f).reshape({1, kColumns}); }
  Tensor arange_mod(std::int64_t n, std::int64_t m) const {
    std::vector<float> v(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) v[static_cast<std::size_t>(i)] = static_cast<float>(i % m);
    return from_vector(v, {n}).to(device, Dtype::f16);
  }
  NoGrad no_grad;
  Device device;
};

TEST_F(BigTensor, Broadcast) {
  const Tensor y = rows() + columns();
  ASSERT_EQ(y.numel(), kCount);
  expect_at(y, [](std::int64_t i) { return row_value(i / kColumns) + column_value(i % kColumns); });
}

TEST_F(BigTensor, UnaryBinaryAndCast) {
  const Tensor y = rows() + columns();
  expect_at(neg(y),
            [](std::int64_t i) { return -(row_value(i / kColumns) + column_value(i % kColumns)); });
  expect_at(sub(y, y), [](std::int64_t) { return 0.0; });
  expect_at(cast(y, Dtype::bf16), [](std::int64_t i) {
    return static_cast<double>(static_cast<float>(
        BFloat16(static_cast<float>(row_value(i / kColumns) + column_value(i % kColumns)))));
  });
}

TEST_F(BigTensor, FillAndSum) {
  const Tensor y = ones({kRows, kColumns}, {.dtype = Dtype::f16, .device = device});
  const Autocast wide(Dtype::f16);  // sums in float32
  EXPECT_NEAR(y.sum().item<double>() / static_cast<double>(kCount), 1.0, 1e-6);
  const Tensor by_row = y.sum({1}), by_column = y.sum({0});
  EXPECT_EQ(by_row.slice(0, kRows - 1).item<double>(), static_cast<double>(kColumns));
  EXPECT_EQ(by_column.slice(0, kColumns - 1).item<double>(), static_cast<double>(kRows));
}

TEST_F(BigTensor, LayerNormAndSoftmax) {
  const Tensor y = rows() * 0.0f + columns();
  const Tensor n = layer_norm(y, {kColumns});
  const Tensor first = n.slice(0, 0, 1), last = n.slice(0, kRows - 1, kRows);
  EXPECT_EQ(first.to_vector<float>(), last.to_vector<float>());
  EXPECT_NEAR(first.to_vector<float>()[0], -1.6782, 2e-3);  // (0 - 31/64) / (sqrt(1023/12) / 32)
  const Tensor p = softmax(y);
  EXPECT_EQ(p.slice(0, 0, 1).to_vector<float>(), p.slice(0, kRows - 1, kRows).to_vector<float>());
}

TEST_F(BigTensor, SliceAndTranspose) {
  const Tensor y = rows() + columns();
  const Tensor last = y.slice(0, kRows - 2, kRows).transpose(0, 1).contiguous();
  EXPECT_EQ((last[{kColumns - 1, 1}].item<double>()),
            row_value(kRows - 1) + column_value(kColumns - 1));
}

}  // namespace
}  // namespace mixtape
