// Type promotion against PyTorch's tables (torch.promote_types and torch.result_type of 2.11).
#include "engine/dtype.h"

#include <gtest/gtest.h>

#include <sstream>

#include "engine/device.h"
#include "engine/device_error.h"
#include "engine/scalar.h"

namespace mixtape {
namespace {

using enum Dtype;

constexpr Dtype kAll[kDtypeCount] = {f32, f16, bf16, f64, i64, i32, u8, b8};

// kPromoted[a][b], both in the order of kAll.
constexpr Dtype kPromoted[kDtypeCount][kDtypeCount] = {
    {f32, f32, f32, f64, f32, f32, f32, f32},       // f32
    {f32, f16, f32, f64, f16, f16, f16, f16},       // f16
    {f32, f32, bf16, f64, bf16, bf16, bf16, bf16},  // bf16
    {f64, f64, f64, f64, f64, f64, f64, f64},       // f64
    {f32, f16, bf16, f64, i64, i64, i64, i64},      // i64
    {f32, f16, bf16, f64, i64, i32, i32, i32},      // i32
    {f32, f16, bf16, f64, i64, i32, u8, u8},        // u8
    {f32, f16, bf16, f64, i64, i32, u8, b8},        // b8
};

// Result of a tensor of kAll[i] with True, 3 and 3.0.
constexpr Dtype kWithScalar[kDtypeCount][3] = {
    {f32, f32, f32}, {f16, f16, f16}, {bf16, bf16, bf16}, {f64, f64, f64},
    {i64, i64, f32}, {i32, i32, f32}, {u8, u8, f32},      {b8, i64, f32},
};

TEST(Dtype, PromotesAsPyTorch) {
  for (int a = 0; a < kDtypeCount; ++a) {
    for (int b = 0; b < kDtypeCount; ++b)
      EXPECT_EQ(promote_types(kAll[a], kAll[b]), kPromoted[a][b]) << kAll[a] << " with " << kAll[b];
    EXPECT_EQ(promote_scalar(kAll[a], true), kWithScalar[a][0]) << kAll[a];
    EXPECT_EQ(promote_scalar(kAll[a], 3), kWithScalar[a][1]) << kAll[a];
    EXPECT_EQ(promote_scalar(kAll[a], 3.0), kWithScalar[a][2]) << kAll[a];
  }
}

TEST(Dtype, SizesKindsAndNames) {
  constexpr std::size_t kSizes[kDtypeCount] = {4, 2, 2, 8, 8, 4, 1, 1};
  constexpr const char* kNames[kDtypeCount] = {"float32", "float16", "bfloat16", "float64",
                                               "int64",   "int32",   "uint8",    "bool"};
  for (int i = 0; i < kDtypeCount; ++i) {
    const Dtype t = kAll[i];
    EXPECT_EQ(size_of(t), kSizes[i]);
    EXPECT_EQ(name_of(t), kNames[i]);
    EXPECT_EQ(is_floating(t), i < 4) << t;
    EXPECT_EQ(is_integral(t), i >= 4 && t != b8) << t;
    EXPECT_EQ(is_low_precision(t), t == f16 || t == bf16) << t;
    dispatch_dtype(t, [&](auto tag) {
      using T = typename decltype(tag)::type;
      EXPECT_EQ(dtype_of<T>, t);
      EXPECT_EQ(sizeof(T), size_of(t));
    });
  }
  EXPECT_EQ(name_of(static_cast<Dtype>(99)), "invalid");
  EXPECT_THROW(dispatch_dtype(static_cast<Dtype>(99), [](auto) {}), Error);
  EXPECT_THROW(dispatch_floating("exp", i64, [](auto) {}), Error);
}

TEST(Dtype, UnitRoundoffIsHalfAnUlpOfOne) {
  for (const Dtype t : {f32, f16, bf16, f64}) {
    dispatch_floating("test", t, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const double u = unit_roundoff(t);
      const auto round = [](double x) -> double {
        if constexpr (sizeof(T) == 2) return static_cast<float>(T(static_cast<float>(x)));
        return static_cast<double>(static_cast<T>(x));
      };
      EXPECT_EQ(round(1 + u), 1.0) << t;  // a tie, to even
      EXPECT_EQ(round(1 + 2 * u), 1 + 2 * u) << t;
      EXPECT_NE(round(1 + 2 * u), 1.0) << t;
    });
  }
  EXPECT_THROW(unit_roundoff(i32), Error);
}

TEST(Scalar, KeepsHowItWasWritten) {
  EXPECT_EQ(Scalar(true).kind(), b8);
  EXPECT_EQ(Scalar(3).kind(), i64);
  EXPECT_EQ(Scalar(3.5f).kind(), f64);
  EXPECT_EQ(Scalar((std::int64_t{1} << 53) + 1).to<std::int64_t>(), (std::int64_t{1} << 53) + 1);
  EXPECT_EQ(Scalar(2.5).to<float>(), 2.5f);
  EXPECT_EQ(Scalar(-7.9).to<std::int64_t>(), -7);
  std::ostringstream out;
  out << Scalar(true) << ' ' << Scalar(3) << ' ' << Scalar(2.5);
  EXPECT_EQ(out.str(), "true 3 2.5");
}

TEST(Device, ParsesPrintsAndRefuses) {
  for (const char* good : {"cpu", "cuda:0", "cuda:7"}) {
    std::ostringstream out;
    out << Device::parse(good);
    EXPECT_EQ(out.str(), good);
  }
  EXPECT_EQ(Device::parse("cuda"), Device::cuda(0));
  for (const char* bad : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda:99999", "CPU"})
    EXPECT_THROW(Device::parse(bad), Error) << bad;
}

TEST(Device, ChecksSayWhatThisMachineHas) {
  EXPECT_NO_THROW(check_device("zeros", Device::cpu()));
  try {
    check_device("zeros", Device::cuda(cuda_device_count()));
    FAIL() << "a device past the last one was accepted";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_TRUE(what.starts_with("zeros: cannot use cuda:")) << what;
    EXPECT_TRUE(what.find("this machine") != std::string::npos ||
                what.find("this build has no CUDA") != std::string::npos)
        << what;
  }
  EXPECT_THROW(check_device("zeros", Device::cuda(-1)), Error);
  EXPECT_EQ(Device::best().is_cuda(), cuda_device_count() > 0);
}

TEST(DeviceError, OpIdsAreStableAndTheCpuHasNoSlot) {
  const std::int32_t a = device_error_op_id("leaf_test_a"), b = device_error_op_id("leaf_test_b");
  EXPECT_NE(a, b);
  EXPECT_GT(a, 0);
  EXPECT_EQ(device_error_op_id(std::string("leaf_test_a").c_str()), a);
  EXPECT_EQ(device_error_slot(Device::cpu()), nullptr);
  EXPECT_NO_THROW(throw_device_error(Device::cpu()));
}

}  // namespace
}  // namespace mixtape
