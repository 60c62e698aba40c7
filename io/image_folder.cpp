#include "io/image_folder.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "engine/check.h"
#include "io/image_file.h"
#include "ops/ops.h"

namespace mixtape::io {
namespace {

bool is_image(const std::filesystem::path& path) {
  std::string extension = path.extension().string();
  for (char& c : extension) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return extension == ".jpg" || extension == ".jpeg" || extension == ".png";
}

/// Entries of a folder for which `keep` holds, by name.
template <class Keep>
std::vector<std::filesystem::path> sorted_entries(const std::filesystem::path& folder,
                                                  Keep&& keep) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error))
    if (keep(*it)) found.push_back(it->path());
  MT_CHECK(!error, "ImageFolder: ", folder.string(), ": ", error.message());
  std::sort(found.begin(), found.end());
  return found;
}

Box centre_box(const Image& image) {
  const double side = 0.875 * static_cast<double>(std::min(image.height, image.width));
  return {(static_cast<double>(image.height) - side) / 2,
          (static_cast<double>(image.width) - side) / 2, side, side};
}

/// Ten tries at a box that fits, then the largest one in the middle.
Box random_box(const Image& image, SampleRandom& random) {
  const double h = static_cast<double>(image.height), w = static_cast<double>(image.width);
  const float widest = std::log(4.0f / 3);
  for (int i = 0; i < 10; ++i) {
    const double area = h * w * static_cast<double>(random.uniform(0.08f, 1.0f));
    const double ratio = static_cast<double>(std::exp(random.uniform(-widest, widest)));
    const double width = std::round(std::sqrt(area * ratio)),
                 height = std::round(std::sqrt(area / ratio));
    const float top = random.uniform(), left = random.uniform();
    if (width < 1 || height < 1 || width > w || height > h) continue;
    return {std::floor(static_cast<double>(top) * (h - height + 1)),
            std::floor(static_cast<double>(left) * (w - width + 1)), height, width};
  }
  const double side = std::min(h, w);
  return {(h - side) / 2, (w - side) / 2, side, side};
}

}  // namespace

ImageFolder::ImageFolder(const std::filesystem::path& directory, ImageFolderOptions options)
    : options_(options) {
  MT_CHECK(options.size >= 1, "ImageFolder: expected a size of at least 1, got ", options.size);
  for (const auto& folder :
       sorted_entries(directory, [](const auto& entry) { return entry.is_directory(); })) {
    const auto label = static_cast<std::int64_t>(classes_.size());
    classes_.push_back(folder.filename().string());
    const std::size_t before = files_.size();
    for (const auto& path : sorted_entries(folder, [](const auto& entry) {
           return entry.is_regular_file() && is_image(entry.path());
         }))
      files_.push_back({path, label});
    MT_CHECK(files_.size() > before, "ImageFolder: ", folder.string(),
             ": expected .jpg, .jpeg or .png files, got none");
  }
  MT_CHECK(!classes_.empty(), "ImageFolder: ", directory.string(),
           ": expected one subfolder for each class, got none");
}

Example ImageFolder::get(std::int64_t index, SampleRandom& random) const {
  const File& file = files_.at(static_cast<std::size_t>(index));
  const Image image = read_image(file.path);
  const Box box = options_.augment ? random_box(image, random) : centre_box(image);
  const bool flip = options_.augment && random.coin();
  const std::int64_t plane = options_.size * options_.size;
  Tensor x = Tensor::empty({3, options_.size, options_.size}, Dtype::f32, Device::cpu());
  float* const to = x.data<float>().data();
  resample(image, box, options_.size, flip, to);
  for (std::size_t c = 0; c < 3; ++c) {
    const float scale = 1 / (255 * options_.std[c]), shift = options_.mean[c] / options_.std[c];
    float* const channel = to + static_cast<std::int64_t>(c) * plane;
    for (std::int64_t i = 0; i < plane; ++i) channel[i] = channel[i] * scale - shift;
  }
  return {x, scalar_tensor(file.label, {.dtype = Dtype::i64})};
}

}  // namespace mixtape::io
