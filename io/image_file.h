// JPEG and PNG files as 8-bit RGB. libjpeg and libpng are optional when the library is built; a
// build without one refuses its files with an error that says so.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace mixtape::io {

struct Image {
  std::int64_t height = 0, width = 0;
  std::vector<std::uint8_t> pixels;  // (H, W, 3), red first
};

/// Reads a JPEG or PNG file, told apart by its first bytes; grey and palette images become RGB, and
/// transparency is composed onto black. Throws, naming the file, on what cannot be read or is
/// damaged, on other formats and on more than 2^28 pixels.
Image read_image(const std::filesystem::path& path);

/// A part of an image in pixels of it; its edges may lie between pixels.
struct Box {
  double top = 0, left = 0, height = 0, width = 0;
};

/// The box resampled to size x size with a triangle filter that is widened when shrinking (so that
/// nothing is skipped), channels first: `to` is (3, size, size), 0 to 255. `flip` mirrors it.
void resample(const Image& image, const Box& box, std::int64_t size, bool flip, float* to);

}  // namespace mixtape::io
