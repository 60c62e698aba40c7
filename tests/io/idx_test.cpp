// IDX files: every type and encoding reads back, and every fault of CASES 109 and its kin is named.
#include "io/idx.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/io/idx_bytes.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::be32;
using mixtape::testing::gzip;
using mixtape::testing::idx_header;
using mixtape::testing::idx_u8;
using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

template <class T>
std::string big_endian(const std::vector<T>& values) {
  std::string out;
  for (const T v : values) {
    const auto bytes = std::bit_cast<std::array<char, sizeof(T)>>(v);
    if (std::endian::native == std::endian::little)
      out.append(bytes.rbegin(), bytes.rend());
    else
      out.append(bytes.begin(), bytes.end());
  }
  return out;
}

class IdxTest : public ::testing::Test {
 protected:
  std::filesystem::path file(std::string_view bytes, std::string_view name = "a.idx") {
    spew(dir_ / name, bytes);
    return dir_ / name;
  }
  template <class T>
  void round_trip(std::uint8_t code, const std::vector<T>& values) {
    const auto n = static_cast<std::uint32_t>(values.size());
    const std::string bytes = idx_header(code, {n / 2, 2}) + big_endian(values);
    for (const std::string& stored : {bytes, gzip(bytes)}) {
      const IdxArray a = read_idx(file(stored));
      EXPECT_EQ(a.type, static_cast<IdxType>(code));
      EXPECT_EQ(a.shape, (std::vector<std::int64_t>{n / 2, 2}));
      ASSERT_EQ(a.numel(), n);
      const auto read = a.values<T>();
      EXPECT_EQ(std::memcmp(read.data(), values.data(), sizeof(T) * n), 0) << name_of(a.type);
    }
  }
  TempDir dir_;
};

TEST_F(IdxTest, EveryTypeReadsBackInHostOrder) {
  round_trip<std::uint8_t>(0x08, {0, 1, 128, 255});
  round_trip<std::int8_t>(0x09, {-128, -1, 0, 127});
  round_trip<std::int16_t>(0x0B, {-32768, -2, 258, 32767});
  round_trip<std::int32_t>(0x0C, {std::numeric_limits<std::int32_t>::min(), -2, 0x01020304, 7});
  round_trip<float>(0x0D, {1.5f, -0.0f, std::numeric_limits<float>::infinity(), 1e-42f});
  round_trip<double>(0x0E, {1.5, -0.0, std::numeric_limits<double>::denorm_min(), 1e300});
}

TEST_F(IdxTest, WrongValueTypeIsRefused) {
  const IdxArray a = read_idx(file(idx_u8({3})));
  EXPECT_TRUE(throws_error([&] { a.values<float>(); }, {"a.idx", "uint8", "float32"}));
}

TEST_F(IdxTest, EmptyArrayIsLegal) {
  for (const std::string& bytes : {idx_u8({0, 28, 28}), gzip(idx_u8({0, 28, 28}))}) {
    const IdxArray a = read_idx(file(bytes));
    EXPECT_EQ(a.numel(), 0);
    EXPECT_EQ(a.shape, (std::vector<std::int64_t>{0, 28, 28}));
  }
}

TEST_F(IdxTest, ConcatenatedGzipMembersAreOneFile) {
  const std::string bytes = idx_u8({4, 5});
  const IdxArray a = read_idx(file(gzip(bytes.substr(0, 7)) + gzip(bytes.substr(7))));
  EXPECT_EQ(a.numel(), 20);
  EXPECT_EQ(a.values<std::uint8_t>()[19], 19);
}

TEST_F(IdxTest, Case109GzipReadAsPlainLooksLikeGzip) {
  const auto path = file(gzip(idx_u8({2, 3, 3})));
  EXPECT_TRUE(throws_error(
      [&] { read_idx(path, IdxEncoding::plain); },
      {"a.idx", "expected the magic number", "529205256", "0x1F8B0808", "looks like gzip"}));
}

TEST_F(IdxTest, PlainReadAsGzipIsNamed) {
  const auto path = file(idx_u8({2, 3, 3}));
  EXPECT_TRUE(throws_error([&] { read_idx(path, IdxEncoding::gzip); },
                           {"a.idx", "expected gzip", "34 bytes"}));
}

TEST_F(IdxTest, DoublyCompressedFileIsNamed) {
  const auto path = file(gzip(gzip(idx_u8({2}))));
  EXPECT_TRUE(throws_error([&] { read_idx(path); }, {"a.idx", "gzip inside gzip"}));
}

TEST_F(IdxTest, Case109EveryTruncationOfAPlainFile) {
  const std::string bytes = idx_u8({2, 3, 3});
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    const auto path = file(bytes.substr(0, n));
    const std::string got = "got " + std::to_string(n < 16 ? n : n - 16);
    EXPECT_TRUE(throws_error([&] { read_idx(path); }, {"a.idx", "cut short", "expected", got}))
        << n;
  }
}

TEST_F(IdxTest, Case109EveryTruncationOfAGzipFile) {
  const std::string bytes = gzip(idx_u8({2, 3, 3}));
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    const auto path = file(bytes.substr(0, n));
    EXPECT_TRUE(throws_error([&] { read_idx(path); }, {"a.idx", "cut short"})) << n;
  }
}

TEST_F(IdxTest, Case109TruncatedInsideTheCompressedData) {
  const std::string plain = idx_u8({2, 3, 3});
  const auto path = file(gzip(plain.substr(0, 20)));
  EXPECT_TRUE(throws_error([&] { read_idx(path); },
                           {"expected 18 bytes", "uint8 (2, 3, 3)", "got 4", "cut short"}));
}

TEST_F(IdxTest, CorruptGzipNeverReadsAsOtherValues) {
  const std::string plain = idx_u8({3, 7, 7}, 13);
  const std::string good = gzip(plain);
  int refused = 0;
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    try {
      const IdxArray a = read_idx(file(bad));  // time stamp and name are free to differ
      ASSERT_EQ(std::memcmp(a.bytes.data(), plain.data() + 16, a.bytes.size()), 0) << i;
    } catch (const Error& e) {
      ++refused;
      EXPECT_NE(std::string(e.what()).find("a.idx"), std::string::npos);
    }
  }
  EXPECT_GT(refused, static_cast<int>(good.size()) / 2);
}

TEST_F(IdxTest, TrailingBytes) {
  const std::string bytes = idx_u8({2, 3, 3});
  const auto is_refused = [&](const std::string& stored) {
    return throws_error([&] { read_idx(file(stored)); }, {"a.idx", "expected", "got", "bytes"});
  };
  EXPECT_TRUE(is_refused(bytes + "x"));
  EXPECT_TRUE(is_refused(gzip(bytes + "x")));
  EXPECT_TRUE(is_refused(gzip(bytes) + "x"));
  EXPECT_TRUE(is_refused(gzip(bytes) + std::string(1, '\0')));
}

TEST_F(IdxTest, Case109LittleEndianHeader) {
  std::string bytes = idx_u8({2, 3, 3});
  std::swap(bytes[0], bytes[3]);
  std::swap(bytes[1], bytes[2]);
  EXPECT_TRUE(
      throws_error([&] { read_idx(file(bytes)); }, {"a.idx", "0x03080000", "looks byte-swapped"}));
  std::string sizes =
      idx_header(0x08, {0x02000000, 0x03000000, 0x03000000}) + idx_u8({2, 3, 3}).substr(16);
  EXPECT_TRUE(throws_error([&] { read_idx(file(sizes)); }, {"a.idx", "sizes look byte-swapped"}));
}

TEST_F(IdxTest, WrongMagic) {
  EXPECT_TRUE(throws_error([&] { read_idx(file("\x89PNG\r\n\x1a\n")); },
                           {"a.idx", "expected the magic number", "0x89504E47", "no IDX file"}));
  for (const int code : {0x00, 0x07, 0x0A, 0x0F, 0xFF})
    EXPECT_TRUE(throws_error(
        [&] { read_idx(file(idx_header(static_cast<std::uint8_t>(code), {1}) + "x")); },
        {"a.idx", "type code"}));
  EXPECT_TRUE(
      throws_error([&] { read_idx(file(idx_header(0x08, {}))); }, {"at least one dimension"}));
}

TEST_F(IdxTest, SizesThatOverflowOrPassTheFileAllocateNothing) {
  const std::string huge = idx_header(0x0E, {~0u, ~0u, ~0u});
  EXPECT_TRUE(throws_error([&] { read_idx(file(huge)); }, {"a.idx", "2^63"}));
  EXPECT_TRUE(throws_error([&] { read_idx(file(gzip(huge))); }, {"a.idx", "2^63"}));
  // 2^62 bytes: representable, not allocatable.
  const std::string large = idx_header(0x08, {1u << 31, 1u << 31});
  EXPECT_TRUE(throws_error([&] { read_idx(file(large)); }, {"4611686018427387904", "cut short"}));
  EXPECT_TRUE(throws_error([&] { read_idx(file(gzip(large))); }, {"at most", "cut short"}));
}

TEST_F(IdxTest, MissingFileAndDirectory) {
  EXPECT_TRUE(
      throws_error([&] { read_idx(dir_ / "none.gz"); }, {"none.gz", "No such file or directory"}));
  EXPECT_TRUE(throws_error([&] { read_idx(dir_.path()); }, {"regular file", "a directory"}));
}

TEST_F(IdxTest, Case109ImageAndLabelFiles) {
  const auto images = file(idx_u8({10, 3, 3}), "images");
  const auto labels = file(gzip(idx_u8({10})), "labels");
  const IdxPair pair = read_idx_pair(images, labels);
  EXPECT_EQ(pair.images.shape[0], pair.labels.shape[0]);
  EXPECT_TRUE(throws_error([&] { read_idx_pair(labels, images); },
                           {"labels", "expected images", "(10,)", "look swapped"}));
  const auto nine = file(idx_u8({9}), "nine");
  EXPECT_TRUE(throws_error([&] { read_idx_pair(images, nine); },
                           {"10 images", "images and", "9 labels", "nine"}));
  EXPECT_TRUE(throws_error([&] { read_idx_pair(images, images); }, {"expected labels"}));
  const auto wide = file(idx_header(0x0B, {10}) + std::string(20, '\0'), "wide");
  EXPECT_TRUE(throws_error([&] { read_idx_pair(images, wide); }, {"expected labels", "int16"}));
}

TEST(FashionMnistFiles, RealFilesHaveTheKnownStatistics) {
  const std::filesystem::path dir = "/usr/share/datasets/fashion-mnist";
  if (!std::filesystem::exists(dir / "train-images-idx3-ubyte.gz"))
    GTEST_SKIP() << "no Fashion-MNIST in " << dir << " (Debian: dataset-fashion-mnist)";
  const IdxPair train =
      read_idx_pair(dir / "train-images-idx3-ubyte.gz", dir / "train-labels-idx1-ubyte.gz");
  EXPECT_EQ(train.images.shape, (std::vector<std::int64_t>{60000, 28, 28}));
  double sum = 0, squares = 0;
  for (const std::uint8_t p : train.images.values<std::uint8_t>())
    sum += p / 255.0, squares += p / 255.0 * p / 255.0;
  const double n = static_cast<double>(train.images.numel()), mean = sum / n;
  EXPECT_NEAR(mean, 0.2860, 5e-5);
  EXPECT_NEAR(std::sqrt(squares / n - mean * mean), 0.3530, 5e-5);
  std::array<int, 10> counts{};
  for (const std::uint8_t y : train.labels.values<std::uint8_t>()) ++counts.at(y);
  for (const int c : counts) EXPECT_EQ(c, 6000);
}

}  // namespace
}  // namespace mixtape::io
