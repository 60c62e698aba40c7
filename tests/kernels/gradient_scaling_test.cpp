// Unscaling, gradient norms, clipping and the loss-scale state machine.
#include <memory>

#include "kernels/optimizer.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/numbers.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

/// Gradient ranges on one device and their table.
struct Gradients {
  Device device;
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<GradientRange> host;
  std::unique_ptr<DeviceArray<GradientRange>> on_device;
  std::int64_t chunks = 0;

  explicit Gradients(Device d) : device(d) {}
  Buffer& add(Dtype dtype, const Values& values) {
    const auto n = static_cast<std::int64_t>(values.size());
    buffers.push_back(std::make_unique<Buffer>(device, dtype, Shape{n}, values));
    host.push_back({buffers.back()->view().data, n, chunks, dtype});
    chunks += (n + kChunk - 1) / kChunk;
    return *buffers.back();
  }
  GradientTable table() {
    on_device = std::make_unique<DeviceArray<GradientRange>>(device, host);
    return {host.data(), device.is_cpu() ? host.data() : on_device->data(),
            static_cast<std::int64_t>(host.size()), chunks};
  }
  float norm(const float* inv_scale = nullptr) {
    const DeviceArray<float> out(device, {std::nanf("")});
    const TestWorkspace workspace(device, gradient_norm_workspace_bytes(device, chunks));
    gradient_norm(Stream::current(device), table(), out.data(), inv_scale, workspace);
    return out.value();
  }
};

TEST(GradientUnscale, MultipliesOnceAndRoundsOnce) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      Gradients gradients(d);
      std::vector<Values> starts;
      unsigned seed = 1;
      for (std::int64_t n : {0, 1, 33, 1000, 8192, 8193, 20001}) {
        starts.push_back(normals(dtype, n, seed++, 100));
        gradients.add(dtype, starts.back());
      }
      const float inv = 1.0f / 65536;  // a power of two: exact but for subnormal results
      const DeviceArray<float> found_inf(d, {0.0f}), inv_scale(d, {inv}),
          per_range(d, {9.0f, 9.0f, 9.0f, 9.0f, 9.0f, 9.0f, 9.0f});
      gradient_unscale(Stream::current(d), gradients.table(), found_inf.data(), inv_scale.data(),
                       per_range.data());
      EXPECT_EQ(found_inf.value(), 0.0f);
      EXPECT_EQ(per_range.get(), std::vector<float>(7, 0.0f));
      for (std::size_t i = 0; i < starts.size(); ++i) {
        for (double& v : starts[i]) v = rounded(dtype, v * inv);
        expect_same(gradients.buffers[i]->get(), starts[i]);
        gradients.buffers[i]->check_guards();
      }
    }
  });
}

TEST(GradientUnscale, FindsInfAndNanAndNamesTheRange) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      for (double bad : {kInfinity, -kInfinity, kNaN}) {
        for (std::int64_t where : {0, 8191, 8192, 16999}) {
          Gradients gradients(d);
          gradients.add(dtype, Values(10, 1.0));
          Values values(17000, 2.0);
          values[static_cast<std::size_t>(where)] = bad;
          Buffer& b = gradients.add(dtype, values);
          gradients.add(dtype, Values(1, 3.0));
          const DeviceArray<float> found_inf(d, {0.0f}), per_range(d, {9.0f, 9.0f, 9.0f});
          gradient_unscale(Stream::current(d), gradients.table(), found_inf.data(), nullptr,
                           per_range.data());
          EXPECT_EQ(found_inf.value(), 1.0f);
          EXPECT_EQ(per_range.get(), (std::vector<float>{0, 1, 0}));
          expect_same(b.get(), values);
        }
      }
    }
  });
}

TEST(GradientUnscale, NeverClearsFoundInf) {
  on_each_device([](Device d) {
    Gradients gradients(d);
    gradients.add(Dtype::f32, Values(10, 1.0));
    const DeviceArray<float> found_inf(d, {1.0f}), inv_scale(d, {0.5f});
    gradient_unscale(Stream::current(d), gradients.table(), found_inf.data(), inv_scale.data(),
                     nullptr);
    EXPECT_EQ(found_inf.value(), 1.0f);
  });
}

TEST(GradientNorm, OfLargeHalfGradientIsFinite) {  // case 56
  on_each_device([](Device d) {
    Gradients gradients(d);
    gradients.add(Dtype::f16, {5000});
    EXPECT_EQ(gradients.norm(), 5000.0f);
  });
}

TEST(GradientNorm, OfNothingIsZero) {
  on_each_device([](Device d) {
    Gradients gradients(d);
    EXPECT_EQ(gradients.norm(), 0.0f);
    gradients.add(Dtype::f32, {});
    EXPECT_EQ(gradients.norm(), 0.0f);
  });
}

TEST(GradientNorm, MatchesReferenceOverRangesOfMixedTypes) {
  on_each_device([](Device d) {
    Gradients gradients(d);
    double squares = 0;
    unsigned seed = 5;
    for (Dtype dtype : kFloatingDtypes) {
      for (std::int64_t n : {1, 31, 8192, 30001}) {
        const Values values = normals(dtype, n, seed++);
        gradients.add(dtype, values);
        for (double v : values) squares += v * v;
      }
    }
    const DeviceArray<float> inv_scale(d, {0.25f});
    // fp32 sums of a chunk in at least 32 lanes: chunk / 32 roundings, then a tree.
    const double rtol = (8192.0 / 32 + 16) * 0x1p-24;
    EXPECT_NEAR(gradients.norm(), std::sqrt(squares), rtol * std::sqrt(squares));
    EXPECT_NEAR(gradients.norm(inv_scale.data()), std::sqrt(squares) / 4,
                rtol * std::sqrt(squares) / 4);
    const float first = gradients.norm();
    EXPECT_EQ(first, gradients.norm());
  });
}

TEST(GradientNorm, StaysAccurateForManyElements) {
  // 2^26 equal elements: a running fp32 sum would stop growing at 2^24 of them.
  on_each_device([](Device d) {
    constexpr std::int64_t n = std::int64_t{1} << 26;
    const Block block =
        allocator_of(d).allocate(static_cast<std::size_t>(n) * 2, Stream::current(d));
    set_bytes(block.data, 0x3C, static_cast<std::size_t>(n) * 2, Stream::current(d));
    Gradients gradients(d);
    gradients.host.push_back({block.data, n, 0, Dtype::f16});
    gradients.chunks = n / kChunk;
    const double value = static_cast<float>(Half::from_bits(0x3C3C));
    const double want = value * 8192;  // sqrt(2^26)
    EXPECT_NEAR(gradients.norm(), want, (8192.0 / 32 + 16) * 0x1p-24 * want);
    allocator_of(d).release(block);
  });
}

TEST(ClipFactor, FollowsTorchWithNanAndInfAsTheyAre) {
  on_each_device([](Device d) {
    const struct {
      float norm, max_norm, want;
    } cases[] = {{0.5f, 1, 1},
                 {0, 1, 1},
                 {4, 1, 1 / (4 + 1e-6f)},
                 {1, 1, 1 / (1 + 1e-6f)},
                 {std::numeric_limits<float>::infinity(), 1, 0},
                 {std::nanf(""), 1, std::nanf("")}};
    for (const auto& c : cases) {
      const DeviceArray<float> factor(d, {-1.0f}), norm(d, {c.norm});
      clip_factor(Stream::current(d), factor.data(), norm.data(), c.max_norm);
      const float got = factor.value();
      if (std::isnan(c.want))
        EXPECT_TRUE(std::isnan(got));
      else
        EXPECT_NEAR(got, c.want, 0x1p-23 * c.want) << "norm " << c.norm;
    }
  });
}

TEST(GradientScale, MultipliesInPlace) {
  on_each_device([](Device d) {
    for (Dtype dtype : kFloatingDtypes) {
      Gradients gradients(d);
      Values values = normals(dtype, 9001, 3);
      Buffer& b = gradients.add(dtype, values);
      const DeviceArray<float> factor(d, {0.3f});
      gradient_scale(Stream::current(d), gradients.table(), factor.data());
      for (double& v : values)
        v = dtype == Dtype::f64 ? v * 0.3f : rounded(dtype, static_cast<float>(v) * 0.3f);
      expect_same(b.get(), values);
      b.check_guards();
    }
  });
}

// ---- the loss scale -----------------------------------------------------------------------------

struct Scaler {
  Device device;
  DeviceArray<ScalerState> state;
  ScalerPolicy policy;
  explicit Scaler(Device d, float scale)
      : device(d), state(d, {ScalerState{scale, 1 / scale, 0, 0, 0}}) {}
  ScalerState update(bool found_inf) {
    ScalerState s = state.value();
    s.found_inf = found_inf ? 1.0f : 0.0f;
    state.set({s});
    scaler_update(Stream::current(device), state.data(), policy);
    s = state.value();
    EXPECT_EQ(s.found_inf, 0.0f);
    EXPECT_EQ(s.inv_scale, 1 / s.scale);
    return s;
  }
};

TEST(ScalerUpdate, GrowsAfterTheIntervalAndBacksOff) {
  on_each_device([](Device d) {
    Scaler scaler(d, 65536);
    scaler.policy.growth_interval = 3;
    EXPECT_EQ(scaler.update(false).growth_tracker, 1.0f);
    EXPECT_EQ(scaler.update(false).growth_tracker, 2.0f);
    ScalerState s = scaler.update(false);
    EXPECT_EQ(s.scale, 131072.0f);
    EXPECT_EQ(s.growth_tracker, 0.0f);
    scaler.update(false);
    s = scaler.update(true);
    EXPECT_EQ(s.scale, 65536.0f);
    EXPECT_EQ(s.growth_tracker, 0.0f);
    EXPECT_EQ(s.skipped_in_a_row, 1.0f);
    EXPECT_EQ(scaler.update(true).skipped_in_a_row, 2.0f);
    EXPECT_EQ(scaler.update(false).skipped_in_a_row, 0.0f);
  });
}

TEST(ScalerUpdate, NeverReachesZeroAndRecovers) {  // case 46
  on_each_device([](Device d) {
    Scaler scaler(d, 65536);
    ScalerState s{};
    for (int i = 0; i < 300; ++i) {
      s = scaler.update(true);
      ASSERT_GT(s.scale, 0.0f);
      ASSERT_TRUE(std::isfinite(s.inv_scale));
    }
    EXPECT_EQ(s.skipped_in_a_row, 300.0f);
    scaler.policy.growth_interval = 1;
    EXPECT_EQ(scaler.update(false).scale, 2 * s.scale);
  });
}

TEST(ScalerUpdate, FloorMayLieBelowOne) {  // case 47
  on_each_device([](Device d) {
    Scaler scaler(d, 1);
    EXPECT_EQ(scaler.update(true).scale, 0.5f);
    scaler.policy.min_scale = 0.25f;
    EXPECT_EQ(scaler.update(true).scale, 0.25f);
    EXPECT_EQ(scaler.update(true).scale, 0.25f);
  });
}

TEST(ScalerUpdate, CeilingHolds) {
  on_each_device([](Device d) {
    Scaler scaler(d, 0x1p126f);
    scaler.policy.growth_interval = 1;
    EXPECT_EQ(scaler.update(false).scale, 0x1p127f);
    EXPECT_EQ(scaler.update(false).scale, 0x1p127f);
  });
}

TEST(ScalerUpdate, SetScalerWritesDeviceMemory) {
  on_each_device([](Device d) {
    const DeviceArray<ScalerState> target(d, {ScalerState{}});
    set_scaler(Stream::current(d), target.data(), ScalerState{8192, 1.0f / 8192, 37, 0, 2});
    const ScalerState s = target.value();
    EXPECT_EQ(s.scale, 8192.0f);
    EXPECT_EQ(s.inv_scale, 1.0f / 8192);
    EXPECT_EQ(s.growth_tracker, 37.0f);
    EXPECT_EQ(s.skipped_in_a_row, 2.0f);
  });
}

}  // namespace
}  // namespace mixtape::testing
