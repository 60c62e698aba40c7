// Data sets: stacking and its faults, tensors as data sets, and images in MNIST's format.
#include "io/dataset.h"

#include <cmath>
#include <functional>
#include <numeric>

#include "io/data_loader.h"
#include "io/fashion_mnist.h"
#include "ops/ops.h"
#include "tests/io/idx_bytes.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::gzip;
using mixtape::testing::idx_header;
using mixtape::testing::idx_u8;
using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

class Made : public Dataset {
 public:
  explicit Made(std::function<Example(std::int64_t)> make) : make_(std::move(make)) {}
  std::int64_t size() const override { return 100; }
  Example get(std::int64_t i, SampleRandom&) const override { return make_(i); }

 private:
  std::function<Example(std::int64_t)> make_;
};

const CollateContext kContext{RandomStreams(0, 0), false};

Batch collate(const Dataset& data, std::vector<std::int64_t> indices) {
  return data.collate(indices, kContext);
}

TEST(Collate, StacksAlongANewFirstDimension) {
  const Made data([](std::int64_t i) {
    const Tensor wide = arange(i, i + 6).reshape({2, 3});
    return Example{wide.transpose(0, 1),
                   scalar_tensor(i, {.dtype = Dtype::i32}),
                   {zeros({0, 2}), full({1}, i)}};
  });
  const Batch batch = collate(data, {4, 0});
  EXPECT_EQ(batch.x.shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(batch.x.to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{4, 7, 5, 8, 6, 9, 0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(batch.y.to_vector<std::int32_t>(), (std::vector<std::int32_t>{4, 0}));
  ASSERT_EQ(batch.more.size(), 2u);
  EXPECT_EQ(batch.more[0].shape(), (Shape{2, 0, 2}));
  EXPECT_EQ(batch.more[1].to_vector<float>(), (std::vector<float>{4, 0}));
}

TEST(Collate, SamplesWithoutTargets) {
  const Made data([](std::int64_t i) { return Example{full({2}, i)}; });
  const Batch batch = collate(data, {1, 2});
  EXPECT_FALSE(batch.y.defined());
  EXPECT_EQ(batch.x.to_vector<float>(), (std::vector<float>{1, 1, 2, 2}));
}

TEST(Collate, UnequalSamplesAreNamed) {
  const auto refused = [](std::function<Example(std::int64_t)> make,
                          std::initializer_list<std::string_view> what) {
    const Made data(std::move(make));
    return throws_error([&] { collate(data, {0, 1, 7}); }, what);
  };
  EXPECT_TRUE(refused([](std::int64_t i) { return Example{zeros({i == 7 ? 4 : 3})}; },
                      {"sample 7", "expected x", "float32(3,)", "got float32(4,)"}));
  EXPECT_TRUE(refused(
      [](std::int64_t i) {
        return Example{zeros({1}), zeros({1}, {.dtype = i == 7 ? Dtype::f64 : Dtype::f32})};
      },
      {"sample 7", "expected y", "float32", "got float64"}));
  EXPECT_TRUE(refused(
      [](std::int64_t i) {
        return Example{zeros({1}), i == 7 ? Tensor() : zeros({1})};
      },
      {"sample 7", "expected y", "undefined tensor"}));
  EXPECT_TRUE(refused(
      [](std::int64_t i) {
        return Example{zeros({1}), {}, std::vector<Tensor>(i == 7 ? 2 : 1, zeros({1}))};
      },
      {"sample 7", "expected 1 further", "got 2"}));
}

TEST(TensorDataset, GathersRows) {
  const Tensor x = arange(0, 20).reshape({5, 2, 2});
  const Tensor columns = arange(0, 10).reshape({2, 5}).transpose(0, 1);  // not contiguous
  const TensorDataset data(x, arange(0, 5), {columns});
  EXPECT_EQ(data.size(), 5);
  const Batch batch = collate(data, {3, 3, 0});
  EXPECT_EQ(batch.x.to_vector<std::int64_t>(),
            (std::vector<std::int64_t>{12, 13, 14, 15, 12, 13, 14, 15, 0, 1, 2, 3}));
  EXPECT_EQ(batch.y.to_vector<std::int64_t>(), (std::vector<std::int64_t>{3, 3, 0}));
  EXPECT_EQ(batch.more[0].to_vector<std::int64_t>(), (std::vector<std::int64_t>{3, 8, 3, 8, 0, 5}));
  SampleRandom random = RandomStreams(0, 0).sample(0);
  const Example e = data.get(3, random);
  EXPECT_EQ(e.x.to_vector<std::int64_t>(), (std::vector<std::int64_t>{12, 13, 14, 15}));
  EXPECT_EQ(e.y.dim(), 0);
  EXPECT_EQ(e.y.item<std::int64_t>(), 3);
  EXPECT_TRUE(throws_error([&] { collate(data, {5}); }, {"[0, 5)", "got 5"}));
  EXPECT_TRUE(throws_error([&] { data.get(-1, random); }, {"[0, 5)", "got -1"}));
}

TEST(TensorDataset, FaultsAreNamed) {
  EXPECT_TRUE(throws_error(
      [] {
        TensorDataset data(zeros({3, 2}), zeros({4}));
      },
      {"expected 3 samples in y", "float32(4,)"}));
  EXPECT_TRUE(throws_error([] { TensorDataset data{Tensor()}; }, {"expected x", "undefined"}));
  EXPECT_TRUE(throws_error([] { TensorDataset data(zeros({})); }, {"expected x", "float32()"}));
}

class FashionMnistTest : public ::testing::Test {
 protected:
  void write(const char* prefix, std::uint32_t n, bool zipped, unsigned classes = 10) {
    const std::string stem = prefix, end = zipped ? ".gz" : "";
    const std::string images = idx_u8({n, 28, 28}, 256), labels = idx_u8({n}, classes);
    spew(dir_ / (stem + "-images-idx3-ubyte" + end), zipped ? gzip(images) : images);
    spew(dir_ / (stem + "-labels-idx1-ubyte" + end), zipped ? gzip(labels) : labels);
  }
  TempDir dir_;
};

TEST_F(FashionMnistTest, NormalisesAndBatches) {
  write("train", 12, true);
  write("t10k", 5, false);
  const FashionMnist train(dir_.path(), Split::train), test(dir_.path(), Split::test);
  EXPECT_EQ(train.size(), 12);
  EXPECT_EQ(test.size(), 5);
  const Batch batch = collate(train, {11, 2});
  EXPECT_EQ(batch.x.shape(), (Shape{2, 1, 28, 28}));
  EXPECT_EQ(batch.y.to_vector<std::int64_t>(), (std::vector<std::int64_t>{1, 2}));
  const auto x = batch.x.to_vector<float>();
  for (std::size_t k = 0; k < 784; ++k) {
    const double pixel = static_cast<double>((11 * 784 + k) % 256);
    const double expected = (pixel / 255 - 0.2860) / 0.3530;  // below 3: four roundings of 2^-24
    ASSERT_NEAR(x[k], expected, 3 * 4 * std::ldexp(1.0, -24)) << k;
  }
  SampleRandom random = RandomStreams(0, 0).sample(0);
  const Example e = train.get(2, random);
  EXPECT_EQ(e.x.shape(), (Shape{1, 28, 28}));
  EXPECT_EQ(e.x.to_vector<float>(), std::vector<float>(x.begin() + 784, x.end()));
  EXPECT_EQ(e.y.item<std::int64_t>(), 2);
  EXPECT_TRUE(throws_error([&] { train.get(12, random); }, {"[0, 12)", "got 12"}));
}

TEST_F(FashionMnistTest, FaultsOfTheFilesAreNamed) {
  EXPECT_TRUE(throws_error([&] { FashionMnist data(dir_.path(), Split::train); },
                           {"train-images-idx3-ubyte", ".gz", "dataset-fashion-mnist"}));
  write("train", 12, false, 11);
  EXPECT_TRUE(throws_error([&] { FashionMnist data(dir_.path(), Split::train); },
                           {"labels-idx1", "[0, 10)", "got 10 for image 10"}));
  std::filesystem::rename(dir_ / "train-images-idx3-ubyte", dir_ / "x");
  std::filesystem::rename(dir_ / "train-labels-idx1-ubyte", dir_ / "train-images-idx3-ubyte");
  std::filesystem::rename(dir_ / "x", dir_ / "train-labels-idx1-ubyte");
  EXPECT_TRUE(throws_error([&] { FashionMnist data(dir_.path(), Split::train); },
                           {"train-images", "look swapped"}));
}

TEST(FashionMnistFiles, EpochOfTheRealDataIsStandardised) {
  const std::filesystem::path dir = "/usr/share/datasets/fashion-mnist";
  if (!std::filesystem::exists(dir / "train-images-idx3-ubyte.gz"))
    GTEST_SKIP() << "no Fashion-MNIST in " << dir << " (Debian: dataset-fashion-mnist)";
  const FashionMnist data(dir, Split::train);
  DataLoader loader(data, {.batch_size = 256, .shuffle = true, .workers = 2});
  double sum = 0, squares = 0;
  std::array<int, 10> counts{};
  for (auto& [x, y] : loader) {
    for (const float v : x.data<float>()) sum += v, squares += double{v} * v;
    for (const std::int64_t label : y.data<std::int64_t>())
      ++counts.at(static_cast<std::size_t>(label));
  }
  const double n = 60000.0 * 784;
  EXPECT_NEAR(sum / n, 0, 5e-4);  // the constants have four digits
  EXPECT_NEAR(squares / n, 1, 1e-3);
  for (const int c : counts) EXPECT_EQ(c, 6000);
  SampleRandom random = RandomStreams(0, 0).sample(0);
  EXPECT_EQ(FashionMnist::kClassNames[data.get(0, random).y.item<std::size_t>()], "Ankle boot");
}

}  // namespace
}  // namespace mixtape::io
