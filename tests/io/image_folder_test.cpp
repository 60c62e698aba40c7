// Image files and folders: what is decoded, how it is cropped and resampled, that augmentation
// repeats, and errors that name the file. JPEG files are made here by libjpeg; PNG files by libpng.
#include "io/image_folder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
// After cstdio, which it needs.
#include <jpeglib.h>
#include <png.h>

#include "io/image_file.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

/// Left half red, right half blue.
Image two_halves(std::int64_t height, std::int64_t width) {
  Image image{height, width,
              std::vector<std::uint8_t>(static_cast<std::size_t>(height * width * 3))};
  for (std::int64_t i = 0; i < height * width; ++i)
    image.pixels[static_cast<std::size_t>(3 * i + (i % width < width / 2 ? 0 : 2))] = 255;
  return image;
}

void write_png(const std::filesystem::path& path, const Image& image, std::uint32_t format) {
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(image.width);
  png.height = static_cast<png_uint_32>(image.height);
  png.format = format;
  ASSERT_NE(png_image_write_to_file(&png, path.c_str(), 0, image.pixels.data(), 0, nullptr), 0);
}

void write_jpeg(const std::filesystem::path& path, const Image& image) {
  jpeg_compress_struct jpeg;
  jpeg_error_mgr errors;
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_compress(&jpeg);
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  ASSERT_NE(file, nullptr);
  jpeg_stdio_dest(&jpeg, file);
  jpeg.image_width = static_cast<JDIMENSION>(image.width);
  jpeg.image_height = static_cast<JDIMENSION>(image.height);
  jpeg.input_components = 3;
  jpeg.in_color_space = JCS_RGB;
  jpeg_set_defaults(&jpeg);
  jpeg_set_quality(&jpeg, 95, TRUE);
  jpeg_start_compress(&jpeg, TRUE);
  while (jpeg.next_scanline < jpeg.image_height) {
    JSAMPROW row = const_cast<JSAMPROW>(image.pixels.data()) +
                   std::size_t{jpeg.next_scanline} * jpeg.image_width * 3;
    jpeg_write_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_compress(&jpeg);
  jpeg_destroy_compress(&jpeg);
  std::fclose(file);
}

TEST(ReadImage, PngIsExactAndJpegIsNear) {
  const TempDir dir;
  const Image image = two_halves(16, 32);
  write_png(dir / "a.png", image, PNG_FORMAT_RGB);
  write_jpeg(dir / "a.jpg", image);
  const Image png = read_image(dir / "a.png"), jpeg = read_image(dir / "a.jpg");
  EXPECT_EQ(png.height, 16);
  EXPECT_EQ(png.width, 32);
  EXPECT_EQ(png.pixels, image.pixels);
  ASSERT_EQ(jpeg.pixels.size(), image.pixels.size());
  for (const std::int64_t column : {2, 29}) {  // away from the edge
    const auto at = static_cast<std::size_t>((5 * 32 + column) * 3);
    for (std::size_t c = 0; c < 3; ++c) EXPECT_NEAR(jpeg.pixels[at + c], image.pixels[at + c], 8);
  }
}

TEST(ReadImage, GreyBecomesRgb) {
  const TempDir dir;
  write_png(dir / "grey.png", {1, 2, {10, 200}}, PNG_FORMAT_GRAY);
  EXPECT_EQ(read_image(dir / "grey.png").pixels,
            (std::vector<std::uint8_t>{10, 10, 10, 200, 200, 200}));
}

TEST(ReadImage, DamagedFilesAreNamed) {
  const TempDir dir;
  write_jpeg(dir / "cut.jpg", two_halves(64, 64));
  write_png(dir / "cut.png", two_halves(64, 64), PNG_FORMAT_RGB);
  for (const char* name : {"cut.jpg", "cut.png"}) {
    const std::string whole = mixtape::testing::slurp(dir / name);
    for (const std::size_t bytes : {std::size_t{20}, whole.size() / 2}) {
      mixtape::testing::spew(dir / name, whole.substr(0, bytes));
      EXPECT_TRUE(throws_error([&] { read_image(dir / name); }, {name})) << name << " " << bytes;
    }
  }
  mixtape::testing::spew(dir / "text.png", "no image");
  EXPECT_TRUE(throws_error([&] { read_image(dir / "text.png"); }, {"text.png", "JPEG or PNG"}));
  mixtape::testing::spew(dir / "empty.jpg", "");
  EXPECT_TRUE(throws_error([&] { read_image(dir / "empty.jpg"); }, {"empty.jpg", "empty"}));
  EXPECT_TRUE(throws_error([&] { read_image(dir / "none.jpg"); }, {"none.jpg", "No such file"}));
}

TEST(Resample, KeepsConstantsAndShrinksByAverages) {
  const Image image = two_halves(8, 8);
  std::vector<float> out(3 * 2 * 2);
  resample(image, {0, 0, 8, 8}, 2, false, out.data());
  // Red on the left falls off to the right, and red and blue always add up to 255.
  EXPECT_GT(out[0], 200);
  EXPECT_LT(out[1], 55);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(out[i] + out[8 + i], 255, 1e-3);
  std::vector<float> mirrored(out.size());
  resample(image, {0, 0, 8, 8}, 2, true, mirrored.data());
  EXPECT_EQ(mirrored[0], out[1]);
  std::vector<float> same(3 * 8 * 8);
  resample(image, {0, 0, 8, 8}, 8, false, same.data());
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(same[i], static_cast<float>(image.pixels[3 * i]));
}

TEST(ImageFolder, ListsClassesAndGivesNormalisedSquares) {
  const TempDir dir;
  for (const char* name : {"zebra", "ant"}) std::filesystem::create_directory(dir / name);
  write_png(dir.path() / "zebra" / "1.PNG", two_halves(20, 30), PNG_FORMAT_RGB);
  write_jpeg(dir.path() / "ant" / "1.jpg", two_halves(40, 30));
  write_png(dir.path() / "ant" / "2.png", two_halves(9, 9), PNG_FORMAT_RGB);
  mixtape::testing::spew(dir.path() / "ant" / "notes.txt", "not an image");
  const ImageFolder images(dir.path(), {.size = 8, .mean = {0, 0, 0}, .std = {1, 1, 1}});
  EXPECT_EQ(images.class_names(), (std::vector<std::string>{"ant", "zebra"}));
  ASSERT_EQ(images.size(), 3);
  SampleRandom random({1, 0});
  const Example last = images.get(2, random);
  EXPECT_EQ(last.y.item<std::int64_t>(), 1);
  EXPECT_EQ(last.x.shape(), (Shape{3, 8, 8}));
  EXPECT_NEAR(last.x.to_vector<float>()[0], 1, 1e-5);
}

TEST(ImageFolder, AugmentationFollowsTheSamplesStream) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "a");
  write_png(dir.path() / "a" / "1.png", two_halves(40, 60), PNG_FORMAT_RGB);
  const ImageFolder images(dir.path(), {.size = 16, .augment = true});
  const auto values = [&](std::uint64_t seed) {
    SampleRandom random = RandomStreams(seed, 0).sample(0);
    return images.get(0, random).x.to_vector<float>();
  };
  EXPECT_EQ(values(1), values(1));
  int different = 0;
  for (std::uint64_t seed = 2; seed < 6; ++seed) different += values(seed) != values(1);
  EXPECT_GE(different, 3);
}

TEST(ImageFolder, FoldersWithoutImagesAreErrors) {
  const TempDir dir;
  EXPECT_TRUE(throws_error([&] { ImageFolder(dir.path()); }, {"one subfolder for each class"}));
  std::filesystem::create_directory(dir / "bare");
  EXPECT_TRUE(throws_error([&] { ImageFolder(dir.path()); }, {"bare", ".png files, got none"}));
  EXPECT_TRUE(throws_error([&] { ImageFolder(dir / "missing"); }, {"missing"}));
}

}  // namespace
}  // namespace mixtape::io
