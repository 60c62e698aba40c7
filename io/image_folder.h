// A folder of images, one subfolder a class, as ImageNet is usually laid out:
//
//   data/train/cat/1.jpg  data/train/cat/2.png  data/train/dog/1.jpg
//
// Images are decoded when they are asked for, on the loader's threads. Training images are cropped
// and mirrored at random from the sample's own stream, so that an epoch repeats for any number of
// workers.
#pragma once

#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include "io/dataset.h"

namespace mixtape::io {

struct ImageFolderOptions {
  std::int64_t size = 224;  // of the square images that are given
  /// A random part of 8 % to 100 % of the area with an aspect ratio of 3/4 to 4/3, mirrored half
  /// the time (Szegedy et al. 2015); else the square in the middle, 7/8 of the shorter side.
  bool augment = false;
  std::array<float, 3> mean = {0.485f, 0.456f, 0.406f}, std = {0.229f, 0.224f, 0.225f};
};

/// x float32 (3, size, size), (value / 255 - mean) / std; y int64 (): the class.
class ImageFolder : public Dataset {
 public:
  /// Lists the images (.jpg, .jpeg, .png); classes are the subfolders in alphabetical order. Throws
  /// if there are none, or a class has no images.
  explicit ImageFolder(const std::filesystem::path& directory, ImageFolderOptions options = {});
  std::int64_t size() const override { return static_cast<std::int64_t>(files_.size()); }
  const std::vector<std::string>& class_names() const { return classes_; }
  /// Throws, naming the file, if it cannot be decoded.
  Example get(std::int64_t index, SampleRandom& random) const override;

 private:
  struct File {
    std::filesystem::path path;
    std::int64_t label;
  };
  ImageFolderOptions options_;
  std::vector<std::string> classes_;
  std::vector<File> files_;
};

}  // namespace mixtape::io
