// The safetensors reader and writer: round trips, ties, and every way a header can lie.
// CASES 101, 102, 103, 105.
#include "io/safetensors.h"

#include <cstring>

#include "io/file.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "optim/optimizer.h"
#include "tests/io/io_test_util.h"

namespace mixtape::io {
namespace {

using mixtape::testing::slurp;
using mixtape::testing::spew;
using mixtape::testing::TempDir;
using mixtape::testing::throws_error;

std::string length_bytes(std::uint64_t n) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &n, sizeof n);
  return bytes;
}

/// A file of a header and `payload` bytes.
std::string file_bytes(const std::string& header, std::size_t payload) {
  return length_bytes(header.size()) + header + std::string(payload, '\0');
}

::testing::AssertionResult open_fails(const std::string& bytes,
                                      std::initializer_list<std::string_view> fragments) {
  const TempDir dir;
  spew(dir / "f.safetensors", bytes);
  return throws_error([&] { SafetensorsFile file(dir / "f.safetensors"); }, fragments);
}

::testing::AssertionResult header_fails(const std::string& header, std::size_t payload,
                                        std::initializer_list<std::string_view> fragments) {
  return open_fails(file_bytes(header, payload), fragments);
}

std::string f32_entry(const std::string& name, int n, int begin, int end) {
  return "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[" + std::to_string(n) +
         "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// ---- files as others write them ----------------------------------------------------------------

TEST(Safetensors, ReadsAFileMadeByHand) {
  const TempDir dir;
  // Keys in no order, spaces behind the header, values 1.5 (F32), 1 and -2 (BF16), true (BOOL).
  std::string header = R"({"z":{"data_offsets":[0,4],"shape":[],"dtype":"F32"},)"
                       R"("b":{"dtype":"BOOL","shape":[1],"data_offsets":[8,9]},)"
                       R"("__metadata__":{"format":"pt","note":"\u00fc"},)"
                       R"("a":{"dtype":"BF16","shape":[2,1],"data_offsets":[4,8]}}   )";
  spew(dir / "f", length_bytes(header.size()) + header +
                      std::string("\x00\x00\xC0\x3F\x80\x3F\x00\xC0\x01", 9));
  const SafetensorsFile file(dir / "f");
  ASSERT_EQ(file.entries().size(), 3u);
  EXPECT_EQ(file.entries()[0].name, "z");
  EXPECT_EQ(file.tensor("z").shape(), Shape{});
  EXPECT_EQ(file.tensor("z").item<float>(), 1.5f);
  EXPECT_EQ(file.tensor("a").dtype(), Dtype::bf16);
  EXPECT_EQ(file.tensor("a").shape(), (Shape{2, 1}));
  EXPECT_EQ(file.tensor("a").to_vector<float>(), (std::vector<float>{1, -2}));
  EXPECT_EQ(file.tensor("b").to_vector<std::int64_t>(), std::vector<std::int64_t>{1});
  EXPECT_EQ(file.metadata(), (StringMap{{"format", "pt"}, {"note", "\xC3\xBC"}}));
  EXPECT_FALSE(file.contains("c"));
  EXPECT_TRUE(throws_error([&] { (void)file.at("c"); }, {"'c'", "got none"}));
  EXPECT_TRUE(throws_error([&] { (void)file.view<double>("z"); }, {"float32", "float64"}));
}

TEST(Safetensors, ViewsLieInTheFileAndUnalignedOnesAreRefused) {
  const TempDir dir;
  const std::string odd = "{" + f32_entry("x", 1, 0, 4) + "}";
  ASSERT_NE((8 + odd.size()) % 4, 0u);
  spew(dir / "odd", file_bytes(odd, 4));
  const SafetensorsFile file(dir / "odd");
  EXPECT_TRUE(throws_error([&] { (void)file.view<float>("x"); }, {"'x'", "aligned to 4"}));
  EXPECT_EQ(file.tensor("x").item<float>(), 0);

  write_safetensors(dir / "even", {{"b", ones({3}, {.dtype = Dtype::u8})},
                                   {"x", tensor({1.0f, 2.0f})},
                                   {"d", zeros({1}, {.dtype = Dtype::f64})}});
  const SafetensorsFile even(dir / "even");
  EXPECT_EQ(even.view<float>("x")[1], 2.0f);
  EXPECT_EQ(even.view<double>("d").size(), 1u);
  EXPECT_EQ(static_cast<const void*>(even.view<float>("x").data()),
            static_cast<const void*>(even.at("x").bytes.data()));
}

TEST(Safetensors, EveryDtypeAndShapeComesBack) {
  const TempDir dir;
  std::vector<nn::NamedTensor> tensors;
  for (const Dtype t : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::i64, Dtype::i32,
                        Dtype::u8, Dtype::b8}) {
    const Tensor values = tensor({0.0f, 1.0f, 1.0f, 0.0f, 1.0f, 0.0f}).reshape({2, 3}).to(t);
    tensors.push_back({"x." + std::string(name_of(t)), values});
    tensors.push_back({"scalar." + std::string(name_of(t)), ones({}, {.dtype = t})});
    tensors.push_back({"none." + std::string(name_of(t)), zeros({2, 0, 3}, {.dtype = t})});
  }
  write_safetensors(dir / "f", tensors, {{"step", "12"}, {"quote\"\n", "\\\xC3\xA9"}});
  const SafetensorsFile file(dir / "f");
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata(), (StringMap{{"step", "12"}, {"quote\"\n", "\\\xC3\xA9"}}));
  for (const nn::NamedTensor& n : tensors) {
    const Tensor back = file.tensor(n.name);
    EXPECT_EQ(back.describe(), n.tensor.describe()) << n.name;
    EXPECT_EQ(back.to_vector<double>(), n.tensor.to_vector<double>()) << n.name;
  }
  EXPECT_EQ(file.at("x.bool").dtype, Dtype::b8);
  write_safetensors(dir / "empty", {});
  EXPECT_TRUE(SafetensorsFile(dir / "empty").entries().empty());
}

// ---- headers that lie --------------------------------------------------------------------------

TEST(Safetensors, Case101ShapeAgainstOffsets) {
  EXPECT_TRUE(
      header_fails(R"({"w":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}})", 4,
                   {"SafetensorsFile", "'w'", "expected 4000000 bytes", "(1000, 1000)", "got 4"}));
  EXPECT_TRUE(
      header_fails(R"({"w":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4000000]}})", 4,
                   {"'w'", "within the 4 bytes", "4000000"}));
  EXPECT_TRUE(
      header_fails(R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
                   0, {"'w'", "2^60"}));
  EXPECT_TRUE(
      header_fails(R"({"w":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,0]}})", 0,
                   {"'w'", "shape", "9223372036854775808"}));
}

TEST(Safetensors, Case102HeaderLength) {
  EXPECT_TRUE(open_fails("", {"at least 8 bytes", "got 0"}));
  EXPECT_TRUE(open_fails("1234567", {"at least 8 bytes", "got 7"}));
  EXPECT_TRUE(open_fails(length_bytes(0), {"an empty one"}));
  EXPECT_TRUE(open_fails(length_bytes(1) + "x", {"no safetensors file"}));
  for (const std::uint64_t n :
       {~std::uint64_t{0}, ~std::uint64_t{0} - 7, std::uint64_t{1} << 63, std::uint64_t{3}})
    EXPECT_TRUE(open_fails(length_bytes(n) + "{}", {"at most 2", std::to_string(n)}));
  // A length that the file could hold but that is past the cap; the file is sparse.
  const TempDir dir;
  spew(dir / "f", length_bytes(100'000'001) + "{");
  std::filesystem::resize_file(dir / "f", 200'000'000);
  EXPECT_TRUE(throws_error([&] { SafetensorsFile f(dir / "f"); }, {"100000000", "100000001"}));
}

TEST(Safetensors, Case103OffsetsThatOverlapOrLeaveGaps) {
  const auto two = [](int a, int b, int c, int d) {
    return "{" + f32_entry("p", (b - a) / 4, a, b) + "," + f32_entry("q", (d - c) / 4, c, d) + "}";
  };
  EXPECT_TRUE(header_fails(two(0, 8, 4, 12), 12, {"'q'", "begin at 8", "got 4", "overlap"}));
  EXPECT_TRUE(header_fails(two(0, 8, 0, 8), 8, {"overlap"}));
  EXPECT_TRUE(header_fails(two(0, 4, 8, 12), 12, {"'q'", "begin at 4", "got 8", "gap"}));
  EXPECT_TRUE(header_fails("{" + f32_entry("p", 1, 4, 8) + "}", 8, {"'p'", "gap"}));
  EXPECT_TRUE(header_fails("{" + f32_entry("p", 1, -4, 0) + "}", 4, {"'p'", "got -4"}));
  EXPECT_TRUE(header_fails("{" + f32_entry("p", 1, 8, 4) + "}", 8, {"'p'", "in order", "[8,4]"}));
  EXPECT_TRUE(header_fails("{" + f32_entry("p", 1, 0, 4) + "}", 5, {"trailing bytes", "got 5"}));
  EXPECT_TRUE(header_fails("{}", 1, {"trailing bytes"}));
  // Keys in another order than the bytes are fine.
  const TempDir dir;
  spew(dir / "f",
       file_bytes("{" + f32_entry("q", 1, 4, 8) + "," + f32_entry("p", 1, 0, 4) + "}", 8));
  EXPECT_EQ(SafetensorsFile(dir / "f").entries()[0].name, "p");
}

TEST(Safetensors, HeadersThatAreNotWhatTheFormatSays) {
  EXPECT_TRUE(header_fails("{\"a\":", 0, {"valid JSON"}));
  EXPECT_TRUE(header_fails("{\"\xFF\":{}}", 0, {"valid JSON"}));
  EXPECT_TRUE(header_fails("{" + f32_entry("p", 1, 0, 4) + "," + f32_entry("p", 1, 4, 8) + "}", 8,
                           {"'p' twice"}));
  EXPECT_TRUE(header_fails(R"({"p":[]})", 0, {"'p'", "an object", "array"}));
  EXPECT_TRUE(header_fails(R"({"p":{"shape":[],"data_offsets":[0,4]}})", 4, {"'p'", "'dtype'"}));
  EXPECT_TRUE(header_fails(R"({"p":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}})", 4,
                           {"'p'", "F8_E4M3", "BOOL"}));
  EXPECT_TRUE(header_fails(R"({"p":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4,
                           {"'p'", "integers", "1.0"}));
  EXPECT_TRUE(
      header_fails(R"({"p":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, {"'p'", "-1"}));
  EXPECT_TRUE(header_fails(R"({"p":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", 4,
                           {"'p'", "[begin, end]"}));
  EXPECT_TRUE(
      header_fails(R"({"p":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1,
                   {"'p'", "at most 8"}));
  EXPECT_TRUE(header_fails(R"({"__metadata__":{"a":1}})", 0, {"'a'", "text"}));
  EXPECT_TRUE(header_fails(R"({"__metadata__":[]})", 0, {"__metadata__", "object"}));
  const TempDir dir;
  spew(dir / "f",
       file_bytes(R"({"p":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})", 0) + "\x02");
  const SafetensorsFile file(dir / "f");
  EXPECT_TRUE(throws_error([&] { (void)file.tensor("p"); }, {"'p'", "0 and 1", "got 2"}));
  EXPECT_TRUE(throws_error([&] { SafetensorsFile f(dir / "none"); }, {"No such file"}));
  EXPECT_TRUE(throws_error([&] { SafetensorsFile f(dir.path()); }, {"a directory"}));
}

// Every truncation and many single-byte changes either open and load or throw mixtape::Error.
TEST(Safetensors, DamagedFilesNeverCrash) {
  const TempDir dir;
  const Tensor a = tensor({1.0f, 2.0f, 3.0f, 4.0f});
  write_safetensors(dir / "f", {{"a", a}, {"b", a.slice(0, 1, 3)}}, {{"k", "v"}});
  const std::string bytes = slurp(dir / "f");
  int refused = 0;
  const auto load = [&](const std::string& damaged) {
    spew(dir / "d", damaged);
    try {
      const SafetensorsFile file(dir / "d");
      for (const nn::NamedTensor& n : file.tensors()) (void)n.tensor.to_vector<double>();
    } catch (const Error&) {
      ++refused;
    }
  };
  for (std::size_t n = 0; n < bytes.size(); ++n) load(bytes.substr(0, n));
  EXPECT_EQ(refused, static_cast<int>(bytes.size()));
  for (std::size_t i = 0; i < bytes.size() - 16; ++i) {
    for (const char c : {'0', '9', '-', '"', '\0', '\x80'}) {
      std::string damaged = bytes;
      damaged[i] = c;
      load(damaged);
    }
  }
  EXPECT_GT(refused, static_cast<int>(bytes.size()) * 2);
}

// ---- memory that tensors share (CASES 105) -----------------------------------------------------

TEST(Safetensors, Case105ValuesByLogicalOrder) {
  const TempDir dir;
  const Tensor m = tensor({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f}).reshape({2, 3});
  write_safetensors(dir / "f", {{"t", m.t()}, {"wide", m.slice(0, 0, 1).clone().expand({2, 3})}});
  const SafetensorsFile file(dir / "f");
  EXPECT_EQ(file.tensor("t").shape(), (Shape{3, 2}));
  EXPECT_EQ(file.tensor("t").to_vector<float>(), (std::vector<float>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(file.tensor("wide").to_vector<float>(), (std::vector<float>{1, 2, 3, 1, 2, 3}));
}

TEST(Safetensors, Case105ViewsAreTiedAgain) {
  const TempDir dir;
  const Tensor a = tensor({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f}).reshape({2, 3});
  write_safetensors(
      dir / "f",
      {{"row", a.slice(0, 0, 1)}, {"a", a}, {"t", a.t()}, {"same", a}, {"alone", tensor({7.0f})}});
  const SafetensorsFile file(dir / "f");
  EXPECT_EQ(file.at("a").owner, -1);
  std::size_t stored = 0;
  for (const SafetensorsEntry& e : file.entries()) stored += e.owner < 0 ? e.bytes.size() : 0;
  EXPECT_EQ(stored, 7 * sizeof(float));

  std::map<std::string, Tensor> loaded;
  for (const nn::NamedTensor& n : file.tensors()) loaded[n.name] = n.tensor;
  EXPECT_TRUE(loaded.at("same").same(loaded.at("a")));
  EXPECT_EQ(loaded.at("t").to_vector<float>(), (std::vector<float>{1, 4, 2, 5, 3, 6}));
  loaded.at("a").fill_(9);
  EXPECT_EQ(loaded.at("row").to_vector<float>(), (std::vector<float>{9, 9, 9}));
  EXPECT_EQ(loaded.at("t").to_vector<float>(), std::vector<float>(6, 9));
  EXPECT_EQ(loaded.at("alone").to_vector<float>(), std::vector<float>{7});
  // One at a time, a tied name is a copy of its own; adjacent ones can be seen in the file.
  EXPECT_EQ(file.tensor("t").to_vector<float>(), (std::vector<float>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(file.view<float>("row")[2], 3);
  EXPECT_TRUE(throws_error([&] { (void)file.view<float>("t"); }, {"'t'", "'a'", "strided"}));
}

TEST(Safetensors, SharingThatCannotBeRecordedIsRefused) {
  const TempDir dir;
  const Tensor s = arange(0, 5);
  EXPECT_TRUE(throws_error(
      [&] {
        write_safetensors(dir / "f", {{"p", s.slice(0, 0, 3)}, {"q", s.slice(0, 2, 5)}});
      },
      {"write_safetensors", "'p'", "'q'", "clone"}));
  EXPECT_FALSE(std::filesystem::exists(dir / "f"));
  // Interleaved columns share a storage but no element; two halves too.
  const Tensor m = arange(0, 6).reshape({3, 2});
  write_safetensors(dir / "f", {{"c0", m.slice(1, 0, 1)}, {"c1", m.slice(1, 1, 2)}});
  EXPECT_EQ(SafetensorsFile(dir / "f").tensor("c1").to_vector<float>(),
            (std::vector<float>{1, 3, 5}));
  write_safetensors(dir / "f", {{"h0", s.slice(0, 0, 2)}, {"h1", s.slice(0, 2, 5)}});
  EXPECT_EQ(SafetensorsFile(dir / "f").at("h1").owner, -1);
}

TEST(Safetensors, TieRecordsAreChecked) {
  const auto with_tie = [](const std::string& tie) {
    std::string quoted;
    for (const char c : tie) quoted += c == '"' ? std::string("\\\"") : std::string(1, c);
    return "{\"__metadata__\":{\"mixtape.tied\":\"" + quoted + "\"}," + f32_entry("a", 4, 0, 16) +
           "}";
  };
  const auto tie = [&](const std::string& owner, const std::string& numbers) {
    return with_tie("{\"b\":{\"owner\":\"" + owner + "\"," + numbers + "}}");
  };
  const std::string good = R"("offset":1,"shape":[2],"strides":[1])";
  const TempDir dir;
  spew(dir / "f", file_bytes(tie("a", good), 16));
  EXPECT_EQ(SafetensorsFile(dir / "f").at("b").shape, Shape{2});
  EXPECT_TRUE(header_fails(tie("c", good), 16, {"'b'", "owner", "'c'"}));
  EXPECT_TRUE(
      header_fails(with_tie(R"({"a":{"owner":"a",)" + good + "}}"), 16, {"'a'", "no bytes"}));
  EXPECT_TRUE(header_fails(with_tie("[1]"), 16, {"object"}));
  EXPECT_TRUE(header_fails(with_tie("{"), 16, {"valid JSON"}));
  for (const char* numbers :
       {R"("offset":3,"shape":[2],"strides":[1])", R"("offset":4,"shape":[1],"strides":[1])",
        R"("offset":0,"shape":[2],"strides":[4])",
        R"("offset":0,"shape":[3],"strides":[9223372036854775807])",
        R"("offset":0,"shape":[2,2],"strides":[1])",
        R"("offset":0,"shape":[1152921504606846976],"strides":[1])"})
    EXPECT_TRUE(header_fails(tie("a", numbers), 16, {"'b'", "within the 4 elements"})) << numbers;
  EXPECT_TRUE(
      header_fails(tie("a", R"("offset":-1,"shape":[2],"strides":[1])"), 16, {"'b'", "-1"}));
}

TEST(Safetensors, NamesAreCheckedBeforeAnythingIsWritten) {
  const TempDir dir;
  const auto fails = [&](const std::vector<nn::NamedTensor>& tensors, const StringMap& metadata,
                         std::initializer_list<std::string_view> fragments) {
    const auto result =
        throws_error([&] { write_safetensors(dir / "f", tensors, metadata); }, fragments);
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
    return result;
  };
  const Tensor x = ones({1});
  EXPECT_TRUE(fails({{"", x}}, {}, {"not empty"}));
  EXPECT_TRUE(fails({{"__metadata__", x}}, {}, {"__metadata__"}));
  EXPECT_TRUE(fails({{"x", x}, {"x", x}}, {}, {"'x' twice"}));
  EXPECT_TRUE(fails({{"x", Tensor()}}, {}, {"'x'", "undefined"}));
  EXPECT_TRUE(fails({{"x", x}}, {{"mixtape.tied", ""}}, {"reserved"}));
  EXPECT_TRUE(fails({{"\xFF", x}}, {}, {"UTF-8"}));
}

/// An embedding whose weight is also the output projection's.
struct TiedModel : nn::Module<TiedModel> {
  nn::Embedding embedding{5, 4};
  nn::Linear head{4, 5, {.bias = false}};
  TiedModel() {
    head.weight = embedding.weight;
    add("embedding", embedding);
    add("head", head);
  }
  Tensor forward(const Tensor& x) { return head(embedding(x)); }
};

// Reload and train one step: still one tensor, and the same step as without the reload.
TEST(Safetensors, Case105TiedEmbeddingAndHead) {
  const TempDir dir;
  const Tensor x = tensor({0.0f, 3.0f, 4.0f}).to(Dtype::i64);
  const auto step = [&](TiedModel& net) {
    optim::Sgd opt(net.parameters(), {.lr = 0.5f});
    cross_entropy(net(x), x).backward();
    opt.step();
    return net.embedding.weight.to_vector<float>();
  };
  TiedModel net, other;
  write_safetensors(dir / "f", net.state_dict());
  const SafetensorsFile file(dir / "f");
  EXPECT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.at("head.weight").owner, 0);
  other.load_state_dict(file.tensors());
  ASSERT_TRUE(other.head.weight.same(other.embedding.weight));
  const std::vector<float> expected = step(net);
  EXPECT_EQ(step(other), expected);
  EXPECT_EQ(other.head.weight.to_vector<float>(), expected);
}

}  // namespace
}  // namespace mixtape::io
