// libjpeg reports an error by a callback that must not return: it jumps back to decode_jpeg, which
// has no local that needs a destructor. libpng's simplified interface returns.
#include "io/image_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "engine/check.h"

#if defined(MIXTAPE_WITH_JPEG)
#include <csetjmp>
// After cstdio, which it needs.
#include <jpeglib.h>
#endif
#if defined(MIXTAPE_WITH_PNG)
#include <png.h>
#endif

namespace mixtape::io {
namespace {

constexpr std::int64_t kMostPixels = std::int64_t{1} << 28;

struct CloseFile {
  void operator()(std::FILE* f) const { std::fclose(f); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

[[maybe_unused]] Image make_image(const std::string& path, std::int64_t height,
                                  std::int64_t width) {
  MT_CHECK(height > 0 && width > 0 && height <= kMostPixels / width, "read_image: ", path,
           ": expected 1 to 2^28 pixels, got ", height, " x ", width);
  Image image{height, width, {}};
  image.pixels.resize(static_cast<std::size_t>(height * width * 3));
  return image;
}

#if defined(MIXTAPE_WITH_JPEG)
struct JpegErrors {
  jpeg_error_mgr manager;
  std::jmp_buf back;
  char text[JMSG_LENGTH_MAX];
};
[[noreturn]] void on_jpeg_error(j_common_ptr info) {
  auto* const errors = reinterpret_cast<JpegErrors*>(info->err);
  (*info->err->format_message)(info, errors->text);
  std::longjmp(errors->back, 1);
}
/// A warning is damaged data that libjpeg would fill in; here it is an error too.
void on_jpeg_message(j_common_ptr info, int level) {
  if (level < 0) on_jpeg_error(info);
}

void decode_jpeg(const std::string& path, std::FILE* file, Image& image) {
  JpegErrors errors;
  jpeg_decompress_struct jpeg;
  jpeg.err = jpeg_std_error(&errors.manager);
  errors.manager.error_exit = on_jpeg_error;
  errors.manager.emit_message = on_jpeg_message;
  if (setjmp(errors.back) != 0) {
    jpeg_destroy_decompress(&jpeg);
    MT_THROW("read_image: ", path, ": ", errors.text);
  }
  jpeg_create_decompress(&jpeg);
  jpeg_stdio_src(&jpeg, file);
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = JCS_RGB;
  jpeg_start_decompress(&jpeg);
  try {
    image = make_image(path, jpeg.output_height, jpeg.output_width);
  } catch (...) {
    jpeg_destroy_decompress(&jpeg);
    throw;
  }
  while (jpeg.output_scanline < jpeg.output_height) {
    JSAMPROW row = image.pixels.data() + std::size_t{jpeg.output_scanline} * jpeg.output_width * 3;
    jpeg_read_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
}
Image read_jpeg(const std::string& path, std::FILE* file) {
  Image image;
  decode_jpeg(path, file, image);
  return image;
}
#else
Image read_jpeg(const std::string& path, std::FILE*) {
  MT_THROW("read_image: ", path, ": this build of Mixtape reads no JPEG (Debian: libjpeg-dev)");
}
#endif

#if defined(MIXTAPE_WITH_PNG)
struct FreePng {
  void operator()(png_image* png) const { png_image_free(png); }
};

Image read_png(const std::string& path, std::FILE* file) {
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  const std::unique_ptr<png_image, FreePng> owner(&png);
  MT_CHECK(png_image_begin_read_from_stdio(&png, file) != 0, "read_image: ", path, ": ",
           png.message);
  png.format = PNG_FORMAT_RGB;
  Image image = make_image(path, png.height, png.width);
  const png_color black{0, 0, 0};
  const int read = png_image_finish_read(&png, &black, image.pixels.data(), 0, nullptr);
  MT_CHECK(read != 0 && png.warning_or_error == 0, "read_image: ", path, ": ", png.message);
  return image;
}
#else
Image read_png(const std::string& path, std::FILE*) {
  MT_THROW("read_image: ", path, ": this build of Mixtape reads no PNG (Debian: libpng-dev)");
}
#endif

/// Weights of input pixels for one output pixel.
struct Taps {
  std::int64_t first = 0;
  std::vector<float> weights;
};

/// For `size` outputs over [begin, begin + length) of `limit` inputs.
std::vector<Taps> taps_of(double begin, double length, std::int64_t size, std::int64_t limit) {
  const double scale = length / static_cast<double>(size), reach = std::max(scale, 1.0);
  std::vector<Taps> all(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    Taps& taps = all[static_cast<std::size_t>(i)];
    const double centre = begin + (static_cast<double>(i) + 0.5) * scale;
    const auto inside = [&](double at) {
      return std::clamp(static_cast<std::int64_t>(std::floor(at)), std::int64_t{0}, limit - 1);
    };
    taps.first = inside(centre - reach);
    double total = 0;
    for (std::int64_t k = taps.first; k <= inside(centre + reach); ++k) {
      const double distance = std::abs(static_cast<double>(k) + 0.5 - centre) / reach;
      taps.weights.push_back(static_cast<float>(std::max(0.0, 1 - distance)));
      total += static_cast<double>(taps.weights.back());
    }
    for (float& w : taps.weights) w = static_cast<float>(static_cast<double>(w) / total);
  }
  return all;
}

}  // namespace

Image read_image(const std::filesystem::path& path) {
  const std::string name = path.string();
  const File file(std::fopen(name.c_str(), "rb"));
  MT_CHECK(file != nullptr, "read_image: ", name, ": ", std::strerror(errno));
  std::array<unsigned char, 8> magic{};
  const std::size_t got = std::fread(magic.data(), 1, magic.size(), file.get());
  std::rewind(file.get());
  constexpr std::array<unsigned char, 8> kPng = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};
  if (got == magic.size() && magic == kPng) return read_png(name, file.get());
  if (got >= 3 && magic[0] == 0xFF && magic[1] == 0xD8 && magic[2] == 0xFF)
    return read_jpeg(name, file.get());
  MT_THROW("read_image: ", name, ": expected a JPEG or PNG file, got ",
           got == 0 ? "an empty one" : "something else");
}

void resample(const Image& image, const Box& box, std::int64_t size, bool flip, float* to) {
  const std::vector<Taps> columns = taps_of(box.left, box.width, size, image.width);
  const std::vector<Taps> rows = taps_of(box.top, box.height, size, image.height);
  const std::int64_t first = rows.front().first;
  const std::int64_t count =
      rows.back().first + static_cast<std::int64_t>(rows.back().weights.size()) - first;
  std::vector<float> narrow(static_cast<std::size_t>(count * size * 3));  // (rows used, size, 3)
  for (std::int64_t r = 0; r < count; ++r) {
    const std::uint8_t* const from = image.pixels.data() + (first + r) * image.width * 3;
    for (std::int64_t x = 0; x < size; ++x) {
      const Taps& taps = columns[static_cast<std::size_t>(flip ? size - 1 - x : x)];
      float sum[3] = {};
      for (std::size_t k = 0; k < taps.weights.size(); ++k) {
        const std::uint8_t* const p = from + (taps.first + static_cast<std::int64_t>(k)) * 3;
        for (int c = 0; c < 3; ++c) sum[c] += taps.weights[k] * static_cast<float>(p[c]);
      }
      std::copy(sum, sum + 3, narrow.data() + (r * size + x) * 3);
    }
  }
  for (std::int64_t y = 0; y < size; ++y) {
    const Taps& taps = rows[static_cast<std::size_t>(y)];
    for (std::int64_t x = 0; x < size; ++x)
      for (std::int64_t c = 0; c < 3; ++c) {
        float sum = 0;
        for (std::size_t k = 0; k < taps.weights.size(); ++k) {
          const std::int64_t r = taps.first - first + static_cast<std::int64_t>(k);
          sum += taps.weights[k] * narrow[static_cast<std::size_t>((r * size + x) * 3 + c)];
        }
        to[(c * size + y) * size + x] = sum;
      }
  }
}

}  // namespace mixtape::io
