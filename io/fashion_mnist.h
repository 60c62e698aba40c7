// Labelled images in MNIST's file format, kept as the bytes of the file and normalised as batches
// are made: 47 MB for Fashion-MNIST's training images instead of 188 MB as float32.
// Data: Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv:1708.07747 (Debian: dataset-fashion-mnist).
#pragma once

#include <array>
#include <filesystem>
#include <string_view>

#include "io/dataset.h"
#include "io/idx.h"

namespace mixtape::io {

/// x = (pixel / 255 - mean) / std.
struct PixelNormalisation {
  float mean = 0.0f, std = 1.0f;
};

/// x float32 (1, H, W), y int64 () in [0, classes).
class IdxImageDataset : public Dataset {
 public:
  /// Reads both files; besides read_idx_pair's errors, throws on a label that is not a class.
  IdxImageDataset(const std::filesystem::path& images, const std::filesystem::path& labels,
                  int classes, PixelNormalisation normalisation);
  std::int64_t size() const override { return data_.labels.shape[0]; }
  std::int64_t height() const { return data_.images.shape[1]; }
  std::int64_t width() const { return data_.images.shape[2]; }
  Example get(std::int64_t index, SampleRandom& random) const override;
  Batch collate(std::span<const std::int64_t> indices,
                const CollateContext& context) const override;

 private:
  void fill(float* to, std::int64_t index) const;

  IdxPair data_;
  std::array<float, 256> value_of_pixel_;
};

enum class Split : std::uint8_t { train, test };

class FashionMnist : public IdxImageDataset {
 public:
  /// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or with .gz, from `directory`.
  /// Throws with what is missing and where to get it.
  FashionMnist(const std::filesystem::path& directory, Split split,
               PixelNormalisation normalisation = {.mean = 0.2860f, .std = 0.3530f});
  static constexpr std::array<std::string_view, 10> kClassNames = {
      "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
      "Sandal",      "Shirt",   "Sneaker",  "Bag",   "Ankle boot"};

 private:
  struct Files {
    std::filesystem::path images, labels;
  };
  FashionMnist(const Files& files, PixelNormalisation normalisation);
};

}  // namespace mixtape::io
