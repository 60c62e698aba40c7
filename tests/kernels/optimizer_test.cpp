// Optimizer steps against float64 forms of PyTorch's rules and against values that PyTorch 2.11
// printed, with every combination of storage types, master copies and shadows.
#include "kernels/optimizer.h"

#include <memory>

#include "kernels/index.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/numbers.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

constexpr std::int64_t chunks_of(std::int64_t n) { return (n + kChunk - 1) / kChunk; }

struct ParameterSpec {
  std::int64_t n;
  Dtype dtype = Dtype::f32, gradient_dtype = Dtype::f32;
  bool master = false;
  int states = 2;
  bool shadow = false;
  Dtype shadow_dtype = Dtype::bf16;
  bool has_gradient = true;
};

/// A parameter with its optimizer state on one device.
struct Parameter {
  ParameterSpec spec;
  Buffer parameter, gradient, master, state0, state1, shadow, step;

  Parameter(Device d, const ParameterSpec& s, const Values& p, const Values& g)
      : spec(s),
        parameter(d, s.dtype, {s.n}, p),
        gradient(d, s.gradient_dtype, {s.n}, g),
        master(d, Dtype::f32, {s.n}, p),
        state0(d, Dtype::f32, {s.n}, Values(p.size(), 0.0)),
        state1(d, Dtype::f32, {s.n}, Values(p.size(), 0.0)),
        shadow(d, s.shadow_dtype, {s.n}),
        step(d, Dtype::f32, {1}, Values{0.0}) {}

  ParameterEntry entry(std::int64_t first_chunk) const {
    ParameterEntry e{};
    e.parameter = parameter.view().data;
    e.master = spec.master ? master.view().ptr<float>() : nullptr;
    e.gradient = spec.has_gradient ? gradient.view().data : nullptr;
    e.state[0] = spec.states > 0 ? state0.view().ptr<float>() : nullptr;
    e.state[1] = spec.states > 1 ? state1.view().ptr<float>() : nullptr;
    e.shadow = spec.shadow ? shadow.view().data : nullptr;
    e.step = step.view().ptr<float>();
    e.numel = spec.n;
    e.first_chunk = first_chunk;
    e.dtype = spec.dtype;
    e.gradient_dtype = spec.gradient_dtype;
    e.shadow_dtype = spec.shadow_dtype;
    return e;
  }
  Values best() { return spec.master ? master.get() : parameter.get(); }
  void check_guards() {
    for (Buffer* b : {&parameter, &gradient, &master, &state0, &state1, &shadow, &step})
      b->check_guards();
  }
};

/// The group under test: parameters, their table, and the device scalars of a step.
struct Group {
  Device device;
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::unique_ptr<DeviceArray<ParameterEntry>> on_device;
  std::vector<ParameterEntry> on_host;
  OptimizerScalars scalars{};
  OptimizerFlags flags;

  explicit Group(Device d) : device(d) {}
  Parameter& add(const ParameterSpec& s, const Values& p, const Values& g) {
    parameters.push_back(std::make_unique<Parameter>(device, s, p, g));
    return *parameters.back();
  }
  ParameterTable table() {
    on_host.clear();
    std::int64_t chunk = 0;
    for (auto& p : parameters) {
      on_host.push_back(p->entry(chunk));
      chunk += chunks_of(p->spec.n);
    }
    on_device = std::make_unique<DeviceArray<ParameterEntry>>(device, on_host);
    return {on_host.data(), device.is_cpu() ? on_host.data() : on_device->data(),
            static_cast<std::int64_t>(on_host.size()), chunk};
  }
  template <class Kernel>
  void step(const Kernel& kernel, const StepScalars& s = {}) {
    const DeviceArray<OptimizerScalars> values(device, {scalars});
    kernel(Stream::current(device), table(), values.data(), flags, s);
    Stream::current(device).synchronize();
  }
};

/// One parameter's update in float64.
struct Reference {
  Values p, s0, s1;
  double t = 0;
  explicit Reference(const Values& start) : p(start), s0(start.size()), s1(start.size()) {}

  void sgd(const Values& g, const OptimizerScalars& k, OptimizerFlags f, double factor) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      double d = (f.maximize ? -1 : 1) * g[i] * factor + k.weight_decay * p[i];
      if (k.momentum != 0) {
        s0[i] = t == 0 ? d : k.momentum * s0[i] + (1.0 - k.dampening) * d;
        d = f.nesterov ? d + k.momentum * s0[i] : s0[i];
      }
      p[i] -= k.lr * d;
    }
    ++t;
  }
  void adam(const Values& g, const OptimizerScalars& k, OptimizerFlags f, double factor) {
    ++t;
    const double c1 = 1 - std::pow(double{k.beta1}, t), c2 = 1 - std::pow(double{k.beta2}, t);
    for (std::size_t i = 0; i < p.size(); ++i) {
      double d = (f.maximize ? -1 : 1) * g[i] * factor;
      if (f.decoupled)
        p[i] *= 1 - double{k.lr} * k.weight_decay;
      else
        d += k.weight_decay * p[i];
      s0[i] = k.beta1 * s0[i] + (1 - double{k.beta1}) * d;
      s1[i] = k.beta2 * s1[i] + (1 - double{k.beta2}) * d * d;
      p[i] -= k.lr / c1 * s0[i] / (std::sqrt(s1[i] / c2) + k.eps);
    }
  }
};

/// A step makes at most this many roundings, each of a value no larger than those compared.
constexpr double kRoundingsPerStep = 12;
const double kStepTolerance = kRoundingsPerStep * 0x1p-24;

// ---- values printed by torch.optim in float64 -------------------------------------------------

const Values kStart = {1.0, -2.0, 0.5, 3.0, -0.25};
Values torch_gradient(int t) { return {0.1 * (t + 1), -0.3, 0.02 * t, 1.5, -4.0}; }

struct TorchCase {
  const char* name;
  bool adam;
  OptimizerScalars scalars;
  OptimizerFlags flags;
  Values parameter, state0, state1;
};

const TorchCase kTorchCases[] = {
    {"sgd",
     false,
     {.lr = 0.1f},
     {},
     {0.8999999999999999, -1.88, 0.488, 2.4000000000000004, 1.35},
     {},
     {}},
    {"sgd weight decay",
     false,
     {.lr = 0.1f, .weight_decay = 0.01f},
     {},
     {0.8961059460109999, -1.872191872032, 0.4860109960005, 2.3889173881529997, 1.34860010059975},
     {},
     {}},
    {"sgd momentum dampening",
     false,
     {.lr = 0.1f, .weight_decay = 0.01f, .momentum = 0.9f, .dampening = 0.25f},
     {},
     {0.8447002783765156, -1.7556150039135001, 0.48192300859239845, 1.8315342374614216,
      2.8067217088631766},
     {0.7235787793598438, -0.881741780865, 0.09787322376351562, 4.2158278897607815,
      -11.02866086847551},
     {}},
    {"sgd nesterov",
     false,
     {.lr = 0.1f, .weight_decay = 0.01f, .momentum = 0.9f},
     {.nesterov = true},
     {0.721377136562053, -1.612485891351427, 0.46486211433436603, 1.1471981680240109,
      4.596953812080978},
     {0.9369591775155102, -1.09608964804512, 0.129162072950705, 5.24067862971573,
      -13.709683800939352},
     {}},
    {"sgd maximize",
     false,
     {.lr = 0.1f, .weight_decay = 0.01f, .momentum = 0.9f},
     {.maximize = true},
     {1.176358600291, -2.252984947572, 0.5144908136505001, 4.328170974752999, -3.8618118854252503},
     {-0.8692179129100002, 0.96039319572, -0.094954141505, -5.04206427753, 13.7113278567525},
     {}},
    {"adam l2",
     true,
     {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.1f},
     {.decoupled = false},
     {0.9603311208135034, -1.9600045662071206, 0.4601431438573598, 2.9600012574507244,
      -0.21000056130181746},
     {0.12432194941429422, -0.1713890240713454, 0.027855384223112567, 0.6184590066329916,
      -1.383636502961233},
     {0.000534385429437475, 0.000992519237317786, 2.6432136683165793e-05, 0.012919001590755074,
      0.06465710746563667}},
    {"adamw",
     true,
     {.lr = 0.01f, .beta1 = 0.8f, .beta2 = 0.95f, .eps = 1e-6f, .weight_decay = 0.1f},
     {},
     {0.9565811892420376, -1.9520720851450228, 0.47232297983808147, 2.9480779746396752,
      -0.20906146899525743},
     {0.16383999999999999, -0.17711999999999997, 0.020959999999999996, 0.8855999999999998,
      -2.3615999999999997},
     {0.014508687500000015, 0.016694437500000013, 0.00027405000000000024, 0.41736093750000036,
      2.9679000000000024}},
    {"adamw maximize",
     true,
     {.lr = 0.01f, .beta1 = 0.8f, .beta2 = 0.95f, .eps = 1e-6f, .weight_decay = 0.1f},
     {.maximize = true},
     {1.0354308027599624, -2.031951898858977, 0.5236830161629186, 3.0279580013663243,
      -0.2889415290052425},
     {-0.16383999999999999, 0.17711999999999997, -0.020959999999999996, -0.8855999999999998,
      2.3615999999999997},
     {0.014508687500000015, 0.016694437500000013, 0.00027405000000000024, 0.41736093750000036,
      2.9679000000000024}},
};

TEST(Optimizer, MatchesTorchAfterFourSteps) {
  constexpr int kSteps = 4;
  on_each_device([&](Device d) {
    for (const TorchCase& c : kTorchCases) {
      SCOPED_TRACE(c.name);
      Group group(d);
      group.scalars = c.scalars;
      group.flags = c.flags;
      Parameter& p = group.add({.n = 5}, kStart, Values(5, 0.0));
      for (int t = 0; t < kSteps; ++t) {
        p.gradient.set(torch_gradient(t));
        c.adam ? group.step(adam_step) : group.step(sgd_step);
      }
      // float betas and rates add one more rounding of each product, hence twice.
      const double tolerance = 2 * kSteps * kStepTolerance;
      expect_close(p.parameter.get(), c.parameter, 4 * tolerance, tolerance);
      if (!c.state0.empty()) expect_close(p.state0.get(), c.state0, tolerance, tolerance);
      // 1 - 0.999f differs from 0.001 by 1.3e-5 of itself.
      if (!c.state1.empty()) expect_close(p.state1.get(), c.state1, 0, 2e-5);
      EXPECT_EQ(p.step.get()[0], kSteps);
      p.check_guards();
    }
  });
}

// ---- every storage type, odd sizes, several parameters in one table
// -------------------------------

struct Mix {
  Dtype dtype, gradient_dtype;
  bool master, shadow;
  Dtype shadow_dtype;
};
const Mix kMixes[] = {
    {Dtype::f32, Dtype::f32, false, false, Dtype::bf16},
    {Dtype::f32, Dtype::f32, false, true, Dtype::bf16},
    {Dtype::f32, Dtype::f16, false, true, Dtype::f16},
    {Dtype::f16, Dtype::f16, true, false, Dtype::bf16},
    {Dtype::f16, Dtype::f32, true, true, Dtype::f16},
    {Dtype::bf16, Dtype::bf16, true, false, Dtype::bf16},
    {Dtype::bf16, Dtype::f32, true, false, Dtype::bf16},
};
const std::int64_t kSizes[] = {0, 1, 7, 1023, kChunk, kChunk + 1, 3 * kChunk - 5};

void run_mix(Device d, const Mix& mix, bool adam) {
  constexpr int kSteps = 3;
  constexpr double kScale = 1024, kClip = 0.75;
  Group group(d);
  group.scalars = {.lr = 0.05f,
                   .beta1 = 0.9f,
                   .beta2 = 0.99f,
                   .eps = 1e-8f,
                   .weight_decay = 0.1f,
                   .momentum = 0.9f,
                   .dampening = 0.5f};
  group.flags = {.nesterov = true};
  std::vector<Reference> references;
  unsigned seed = 1;
  for (std::int64_t n : kSizes) {
    const Values start = normals(mix.dtype, n, seed++);
    group.add({.n = n,
               .dtype = mix.dtype,
               .gradient_dtype = mix.gradient_dtype,
               .master = mix.master,
               .shadow = mix.shadow,
               .shadow_dtype = mix.shadow_dtype},
              start, Values(start.size(), 0.0));
    references.emplace_back(start);
  }
  const DeviceArray<float> inv_scale(d, {static_cast<float>(1 / kScale)});
  const DeviceArray<float> clip(d, {static_cast<float>(kClip)}), found_inf(d, {0.0f});
  const StepScalars step{found_inf.data(), inv_scale.data(), clip.data(), device_error_slot(d)};
  for (int t = 0; t < kSteps; ++t) {
    for (std::size_t i = 0; i < references.size(); ++i) {
      Parameter& p = *group.parameters[i];
      const Values g = normals(mix.gradient_dtype, p.spec.n, seed++, kScale);
      p.gradient.set(g);
      adam ? references[i].adam(g, group.scalars, group.flags, kClip / kScale)
           : references[i].sgd(g, group.scalars, group.flags, kClip / kScale);
    }
    adam ? group.step(adam_step, step) : group.step(sgd_step, step);
  }
  for (std::size_t i = 0; i < references.size(); ++i) {
    Parameter& p = *group.parameters[i];
    SCOPED_TRACE(::testing::Message() << "n = " << p.spec.n);
    const double tolerance = kSteps * kStepTolerance;
    // An Adam step divides by sqrt(v): relative error of m near a cancellation is bounded by the
    // absolute error of m over sqrt(v) >= |g| sqrt(1 - beta2), a factor of 10 here.
    expect_close(p.best(), references[i].p, (adam ? 10 : 2) * tolerance, tolerance);
    expect_close(p.state0.get(), references[i].s0, 4 * tolerance, tolerance);
    if (adam) expect_close(p.state1.get(), references[i].s1, 0, 2 * tolerance);
    if (mix.master) expect_same(p.parameter.get(), rounded(mix.dtype, p.master.get()));
    if (mix.shadow) expect_same(p.shadow.get(), rounded(mix.shadow_dtype, p.best()));
    EXPECT_EQ(p.step.get()[0], kSteps);
    p.check_guards();
  }
}

TEST(Optimizer, SgdMatchesReferenceForEveryStorageType) {
  on_each_device([](Device d) {
    for (const Mix& mix : kMixes) run_mix(d, mix, false);
  });
}
TEST(Optimizer, AdamMatchesReferenceForEveryStorageType) {
  on_each_device([](Device d) {
    for (const Mix& mix : kMixes) run_mix(d, mix, true);
  });
}

TEST(Optimizer, TwoRunsAreBitEqual) {
  on_each_device([](Device d) {
    for (const bool adam : {false, true}) {
      Values first[2];
      for (Values& result : first) {
        Group group(d);
        group.scalars = {
            .lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .momentum = 0.9f};
        const std::int64_t n = 5 * kChunk + 17;
        group.add({.n = n}, normals(Dtype::f32, n, 1), normals(Dtype::f32, n, 2));
        adam ? group.step(adam_step) : group.step(sgd_step);
        result = group.parameters[0]->parameter.get();
      }
      expect_same(first[0], first[1]);
    }
  });
}

// ---- faults met elsewhere
// --------------------------------------------------------------------------

constexpr OptimizerScalars kAdamDefaults{
    .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0};

TEST(Optimizer, ZeroGradientLeavesHalfParametersAsTheyAre) {  // case 60
  on_each_device([](Device d) {
    for (const bool master : {false, true}) {
      Group group(d);
      group.scalars = kAdamDefaults;
      Parameter& p =
          group.add({.n = 3, .dtype = Dtype::f16, .gradient_dtype = Dtype::f16, .master = master},
                    {1, -2, 0.5}, {0, 0, 0});
      group.step(adam_step);
      expect_same(p.parameter.get(), {1, -2, 0.5});
    }
  });
}

TEST(Optimizer, WeightDecayIsL2InAdamAndDecoupledInAdamW) {  // case 61
  on_each_device([](Device d) {
    for (const bool decoupled : {false, true}) {
      Group group(d);
      group.scalars = kAdamDefaults;
      group.scalars.weight_decay = 0.1f;
      group.flags.decoupled = decoupled;
      Parameter& p = group.add({.n = 1}, {1}, {0});
      group.step(adam_step);
      EXPECT_NEAR(p.parameter.get()[0], decoupled ? 0.9999 : 0.999, 2 * 0x1p-24);
    }
  });
}

TEST(Optimizer, BiasCorrectionCountsEachParametersOwnSteps) {  // case 63
  on_each_device([](Device d) {
    Group group(d);
    group.scalars = kAdamDefaults;
    Parameter& a = group.add({.n = 1}, {1}, {1});
    Parameter& b = group.add({.n = 1}, {1}, {1});
    b.spec.has_gradient = false;
    group.step(adam_step);
    EXPECT_EQ(a.step.get()[0], 1);
    EXPECT_EQ(b.step.get()[0], 0);
    expect_same(b.parameter.get(), {1});
    b.spec.has_gradient = true;
    group.step(adam_step);
    EXPECT_NEAR(b.parameter.get()[0], 1 - 1e-3, 2 * 0x1p-24);
  });
}

TEST(Optimizer, MasterCopyKeepsUpdatesBelowHalfAnUlp) {  // case 65
  on_each_device([](Device d) {
    Group group(d);
    group.scalars = {.lr = 1};
    Parameter& p =
        group.add({.n = 1, .dtype = Dtype::bf16, .master = true, .states = 0}, {1}, {6e-4});
    for (int t = 0; t < 100; ++t) group.step(sgd_step);
    EXPECT_NEAR(p.master.get()[0], 0.94, 100 * 0x1p-24);
    EXPECT_EQ(p.parameter.get()[0], 0.94140625);
  });
}

TEST(Optimizer, FoundInfOrDeviceErrorSkipsEverything) {
  on_each_device([](Device d) {
    for (const bool adam : {false, true}) {
      for (const bool by_error : {false, true}) {
        Group group(d);
        group.scalars = {.lr = 0.1f,
                         .beta1 = 0.9f,
                         .beta2 = 0.999f,
                         .eps = 1e-8f,
                         .weight_decay = 0.1f,
                         .momentum = 0.9f};
        const std::int64_t n = kChunk + 3;
        const Values start = normals(Dtype::bf16, n, 3);
        Parameter& p = group.add({.n = n, .dtype = Dtype::bf16, .master = true, .shadow = true},
                                 start, Values(start.size(), kInfinity));
        const Values shadow(start.size(), 7.0);
        p.shadow.set(shadow);
        const DeviceArray<float> found_inf(d, {by_error ? 0.0f : 1.0f});
        const DeviceArray<DeviceError> error(d, {DeviceError{.reported = by_error ? 1u : 0u}});
        const StepScalars step{found_inf.data(), nullptr, nullptr, error.data()};
        adam ? group.step(adam_step, step) : group.step(sgd_step, step);
        expect_same(p.parameter.get(), start);
        expect_same(p.master.get(), start);
        expect_same(p.shadow.get(), shadow);
        expect_same(p.state0.get(), Values(start.size(), 0.0));
        expect_same(p.state1.get(), Values(start.size(), 0.0));
        EXPECT_EQ(p.step.get()[0], 0);
      }
    }
  });
}

/// One decision for several launches: what it was made of may change after it.
TEST(Optimizer, DecideStepSaysWhetherALaunchWouldBeSkipped) {
  on_each_device([](Device d) {
    for (const bool by_inf : {false, true}) {
      for (const bool by_error : {false, true}) {
        const DeviceArray<float> found_inf(d, {by_inf ? 1.0f : 0.0f}), skip(d, {7.0f});
        const DeviceArray<DeviceError> error(
            d, {DeviceError{.reported = by_error ? 2u : 1u, .taken = 1}});
        decide_step(Stream::current(d), skip.data(),
                    {found_inf.data(), nullptr, nullptr, error.data()});
        EXPECT_EQ(skip.get()[0], by_inf || by_error ? 1.0f : 0.0f);
      }
    }
    const DeviceArray<float> skip(d, {7.0f});
    decide_step(Stream::current(d), skip.data(), {});
    EXPECT_EQ(skip.get()[0], 0);
  });
}

// As in a training step: the kernel that finds the error, the update and the throw are in stream
// order. Many threads report at once, and each round needs the slot to be free again.
TEST(Optimizer, AnErrorFoundByAKernelSkipsTheStepUntilItIsThrown) {
  on_each_device([](Device d) {
    if (d.is_cpu()) return;  // CPU kernels throw at once
    const std::int64_t n = 70'000;
    Buffer x(d, Dtype::f32, {3}, Values(3, 1.0)), out(d, Dtype::f32, {n}),
        index(d, Dtype::i64, {n}, Values(static_cast<std::size_t>(n), 5.0));
    Group group(d);
    group.scalars = kAdamDefaults;
    for (int i = 0; i < 300; ++i) group.add({.n = 1}, {1}, {1});
    const StepScalars step{nullptr, nullptr, nullptr, device_error_slot(d)};
    for (int round = 1; round <= 3; ++round) {
      const DeviceArray<OptimizerScalars> values(d, {group.scalars});
      const ParameterTable table = group.table();
      const Stream stream = Stream::current(d);
      index_select(stream, "embedding", out.view(), x.view(), 0, index.view());
      adam_step(stream, table, values.data(), group.flags, step);
      expect_error([&] { stream.synchronize(); }, "embedding: expected an index in [0, 3), got 5");
      for (const auto& p : group.parameters) EXPECT_EQ(p->step.get()[0], round - 1);
      group.step(adam_step, step);
      for (const auto& p : group.parameters) EXPECT_EQ(p->step.get()[0], round);
    }
  });
}

TEST(Optimizer, MomentumWithoutBufferIsAnErrorOnTheCpu) {
  Group group(Device::cpu());
  group.scalars = {.lr = 0.1f, .momentum = 0.9f};
  group.add({.n = 2, .states = 0}, {1, 2}, {1, 1});
  EXPECT_THROW(group.step(sgd_step), Error);
}

TEST(Optimizer, SetScalarsWritesDeviceMemory) {
  on_each_device([](Device d) {
    const DeviceArray<OptimizerScalars> target(d, {OptimizerScalars{}});
    const OptimizerScalars values{1, 2, 3, 4, 5, 6, 7, 8};
    set_scalars(Stream::current(d), target.data(), values);
    const OptimizerScalars got = target.value();
    EXPECT_EQ(got.lr, 1);
    EXPECT_EQ(got.beta1, 2);
    EXPECT_EQ(got.beta2, 3);
    EXPECT_EQ(got.eps, 4);
    EXPECT_EQ(got.weight_decay, 5);
    EXPECT_EQ(got.momentum, 6);
    EXPECT_EQ(got.dampening, 7);
  });
}

}  // namespace
}  // namespace mixtape::testing
