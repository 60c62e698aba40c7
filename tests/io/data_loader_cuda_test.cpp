// The loader with a GPU: batches arrive whole on the consumer's stream, whatever it is, and their
// memory is not reused while work on them is queued. CASES 92, 94.
#include "engine/stream.h"
#include "io/data_loader.h"
#include "ops/ops.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

constexpr std::int64_t kSamples = 640, kFeatures = 20000;  // 5 MB a batch of 64

/// Row i holds the number i.
const TensorDataset& rows() {
  static const TensorDataset data(
      arange(0, kSamples).to(Dtype::f32).reshape({kSamples, 1}).expand({kSamples, kFeatures}),
      arange(0, kSamples));
  return data;
}

TEST(DataLoaderCuda, BatchesEqualThoseOnTheCpu) {
  for (const int workers : {0, 1, 3})
    for (const bool pin : {false, true}) {
      const DataLoaderOptions options{.batch_size = 64,
                                      .shuffle = true,
                                      .workers = workers,
                                      .pin_memory = pin,
                                      .device = Device::cuda()};
      DataLoaderOptions host = options;
      host.device = Device::cpu();
      DataLoader there(rows(), options), here(rows(), host);
      auto expected = here.begin();
      for (auto& [x, y] : there) {
        ASSERT_EQ(x.device(), Device::cuda());
        ASSERT_EQ(y.to_vector<std::int64_t>(), expected->y.to_vector<std::int64_t>());
        ASSERT_EQ(x.to_vector<float>(), expected->x.to_vector<float>());
        ++expected;
      }
      EXPECT_TRUE(expected == here.end());
    }
}

// No host synchronisation between batches: sums queued on the consumer's stream must see each
// batch whole, and later batches must not overwrite earlier ones.
TEST(DataLoaderCuda, AsynchronousConsumerSeesEveryBatchWhole) {
  for (const bool side_stream : {false, true}) {
    const Stream stream =
        side_stream ? Stream::create(Device::cuda()) : Stream::default_stream(Device::cuda());
    const StreamGuard guard(stream);
    DataLoader loader(rows(),
                      {.batch_size = 64, .shuffle = true, .workers = 2, .device = Device::cuda()});
    std::vector<Tensor> differences;
    for (int epoch = 0; epoch < 20; ++epoch)
      for (auto& [x, y] : loader) {
        Tensor busy = x;
        for (int k = 0; k < 8; ++k) busy = busy + x;  // 9 x, slowly
        const Tensor per_row = busy.mean({1}) - y.to(Dtype::f32) * 9.0;
        differences.push_back(abs(per_row).max());
      }
    // Sums of integers below 9 * 640 are exact; a mean of 20000 equal numbers rounds at most once
    // for each of log2(20000) levels of a tree of sums and once in the division.
    for (const Tensor& d : differences) ASSERT_LE(d.item<float>(), 9 * kSamples * 16 * 0x1p-24f);
  }
}

TEST(DataLoaderCuda, MemoryDoesNotGrow) {
  DataLoader loader(rows(), {.batch_size = 64, .device = Device::cuda()});
  const auto epoch = [&] {
    for (auto& batch : loader) batch.x.mul_(2.0f);
    synchronize(Device::cuda());
  };
  epoch();
  epoch();
  const std::size_t device = memory_stats(Device::cuda()).reserved;
  const std::size_t pinned = pinned_memory_stats().reserved;
  for (int i = 0; i < 20; ++i) epoch();
  // Timing decides how many batches are in flight: at most prefetch + 2 more of either kind.
  constexpr std::size_t kBatch = 64 * kFeatures * 4;
  EXPECT_LE(memory_stats(Device::cuda()).reserved, device + 4 * 2 * kBatch);
  EXPECT_LE(pinned_memory_stats().reserved, pinned + 4 * 2 * kBatch);
}

TEST(DataLoaderCuda, Case111EndingEarlyIsPrompt) {
  for (int i = 0; i < 20; ++i) {
    DataLoader loader(rows(),
                      {.batch_size = 8, .shuffle = true, .workers = 2, .device = Device::cuda()});
    for ([[maybe_unused]] auto& batch : loader) break;
  }
  synchronize(Device::cuda());
}

}  // namespace
}  // namespace mixtape::io
