#include "io/fashion_mnist.h"

#include "engine/check.h"
#include "io/text.h"
#include "ops/ops.h"

namespace mixtape::io {
namespace {

std::filesystem::path find(const std::filesystem::path& directory, std::string_view name) {
  const std::filesystem::path plain = directory / name;
  const std::filesystem::path zipped = plain.string() + ".gz";
  std::error_code ignored;
  if (std::filesystem::exists(plain, ignored)) return plain;
  MT_CHECK(std::filesystem::exists(zipped, ignored), "FashionMnist: expected ", plain.string(),
           " or ", zipped.string(), ", got neither; Debian's package dataset-fashion-mnist puts ",
           "them into /usr/share/datasets/fashion-mnist");
  return zipped;
}

const char* prefix(Split split) { return split == Split::train ? "train" : "t10k"; }

}  // namespace

IdxImageDataset::IdxImageDataset(const std::filesystem::path& images,
                                 const std::filesystem::path& labels, int classes,
                                 PixelNormalisation normalisation)
    : data_(read_idx_pair(images, labels)) {
  MT_CHECK(normalisation.std > 0, "IdxImageDataset: expected a positive std, got ",
           normalisation.std);
  const auto y = data_.labels.values<std::uint8_t>();
  for (std::size_t i = 0; i < y.size(); ++i)
    MT_CHECK(y[i] < classes, "IdxImageDataset: ", data_.labels.path, ": expected labels in [0, ",
             classes, "), got ", int{y[i]}, " for image ", i);
  for (std::size_t p = 0; p < value_of_pixel_.size(); ++p)
    value_of_pixel_[p] = (static_cast<float>(p) / 255.0f - normalisation.mean) / normalisation.std;
}

void IdxImageDataset::fill(float* to, std::int64_t index) const {
  MT_CHECK(index >= 0 && index < size(), "IdxImageDataset: expected a sample index in [0, ", size(),
           "), got ", index);
  const auto pixels = static_cast<std::size_t>(height() * width());
  const std::uint8_t* from =
      data_.images.values<std::uint8_t>().data() + static_cast<std::size_t>(index) * pixels;
  for (std::size_t k = 0; k < pixels; ++k) to[k] = value_of_pixel_[from[k]];
}

Example IdxImageDataset::get(std::int64_t index, SampleRandom&) const {
  const Tensor x = empty({1, height(), width()}), y = empty({}, {.dtype = Dtype::i64});
  fill(x.data<float>().data(), index);
  y.data<std::int64_t>()[0] = data_.labels.values<std::uint8_t>()[static_cast<std::size_t>(index)];
  return {x, y};
}

Batch IdxImageDataset::collate(std::span<const std::int64_t> indices,
                               const CollateContext& context) const {
  const auto n = static_cast<std::int64_t>(indices.size());
  Batch batch{context.empty({n, 1, height(), width()}, Dtype::f32), context.empty({n}, Dtype::i64)};
  float* x = batch.x.data<float>().data();
  const auto y = batch.y.data<std::int64_t>();
  const auto labels = data_.labels.values<std::uint8_t>();
  for (std::size_t i = 0; i < indices.size(); ++i) {
    fill(x + static_cast<std::int64_t>(i) * height() * width(), indices[i]);
    y[i] = labels[static_cast<std::size_t>(indices[i])];
  }
  return batch;
}

FashionMnist::FashionMnist(const std::filesystem::path& directory, Split split,
                           PixelNormalisation normalisation)
    : FashionMnist(Files{find(directory, join({prefix(split), "-images-idx3-ubyte"})),
                         find(directory, join({prefix(split), "-labels-idx1-ubyte"}))},
                   normalisation) {}

FashionMnist::FashionMnist(const Files& files, PixelNormalisation normalisation)
    : IdxImageDataset(files.images, files.labels, static_cast<int>(kClassNames.size()),
                      normalisation) {}

}  // namespace mixtape::io
