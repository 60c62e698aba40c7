// Replays what PyTorch computed on a CUDA GPU (make_goldens.py): values and gradients of every op,
// in float32 and under autocast, on every device of the machine.
//
// Tolerance of an element e of an array with `length` additions behind each element:
//
//   u (2 |e| + r s)  +  2^-24 (16 + 4 sqrt(length)) s
//
// u     unit roundoff of the coarsest dtype that either side rounds to on the way: that of the
//       output for a value; of outputs and gradient for a gradient
// 2 |e| each side rounds its result once
// r     further tensors that only one side rounds to 16 bits (kRoundings); 2 more for a gradient: a
//       saved result and an inner gradient
// s     the array's largest element, at least 1; with one addition the element itself, at least 1
// 16    units in the last place of exp, erf, tanh and so on; the square root is the random walk of
//       the rounding errors of a sum (4 standard deviations)
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "engine/autocast.h"
#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "ops/ops.h"
#include "tests/goldens/golden_runs.h"
#include "tests/support/devices.h"

namespace mixtape::testing {
namespace {

struct Run {
  const char* name;
  Dtype autocast;   // f32: none
  bool low_inputs;  // the inputs that the case lists as `low` are 16-bit already
};
constexpr Run kRuns[] = {{"f32", Dtype::f32, false},
                         {"amp_f16", Dtype::f16, false},
                         {"amp_bf16", Dtype::bf16, false},
                         {"amp_f16_low", Dtype::f16, true},
                         {"amp_bf16_low", Dtype::bf16, true}};

/// Where Mixtape's autocast policy gives another dtype than PyTorch's, on 16-bit inputs. Values are
/// compared all the same, at the tolerance of the coarser dtype.
struct Deviation {
  const char* op;
  const char* only_case;  // nullptr: all
  bool wider;             // Mixtape gives float32 and PyTorch 16 bits, or the other way round
  const char* reason;
};
constexpr const char* kKeeps =
    "the kernel works in float32 whatever it reads and writes; a 16-bit result halves the traffic";
constexpr Deviation kDeviations[] = {
    {"softmax", nullptr, false, kKeeps},
    {"log_softmax", nullptr, false, kKeeps},
    {"layer_norm", nullptr, false, kKeeps},
    {"add_layer_norm", nullptr, false, kKeeps},
    {"sum_to", nullptr, false,
     "the gradient of broadcasting: it has the dtype of the tensor that was broadcast"},
    {"mean", nullptr, true, "a long reduction, treated as sum is"},
    {"var", nullptr, true, "a long reduction, treated as sum is"},
    {"div", "number_left", false,
     "PyTorch divides a number by a tensor through reciprocal(), which is on its float32 list"},
};

/// Tensors rounded to 16 bits on one side only, besides the result.
int roundings(const std::string& op) {
  if (op == "linear" || op == "conv2d") return 2;  // PyTorch: product, then bias, then activation
  if (op == "add_layer_norm") return 1;            // PyTorch: the sum
  return 0;
}

class Golden : public ::testing::TestWithParam<GoldenOp> {};

Tensor make_input(const GoldenCase& c, std::size_t i, const Run& run, Device device) {
  const NoGrad no_grad;
  const StoredArray& stored = c.array(detail::concat("in", i));
  Tensor t = from_vector(stored.values, stored.shape, {.dtype = stored.dtype, .device = device});
  const Shape low = c.list("low");
  if (run.low_inputs &&
      std::find(low.begin(), low.end(), static_cast<std::int64_t>(i)) != low.end())
    t = t.to(run.autocast);
  const std::string order_name = detail::concat("order", i);
  if (c.has_attr(order_name)) {
    const Shape order = c.list(order_name);
    Shape inverse = order;
    for (int d = 0; d < order.size(); ++d) inverse[static_cast<int>(order[d])] = d;
    t = t.permute(order).contiguous().permute(inverse);
  }
  t = t.detach();
  if (is_floating(t.dtype())) t.set_requires_grad();
  return t;
}

double coarser(Dtype a, Dtype b) {
  const auto u = [](Dtype t) { return is_floating(t) ? unit_roundoff(t) : 0; };
  return std::max(u(a), u(b));
}

struct Bound {
  double u, roundings, length;
  bool half;  // float16 on either side: subnormals have an absolute error
};

void expect_close(const std::vector<double>& got, const std::vector<double>& expected,
                  const Bound& bound, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double largest = 1;
  for (const double e : expected) largest = std::max(largest, std::isfinite(e) ? std::fabs(e) : 0);
  int shown = 0;
  for (std::size_t i = 0; i < got.size() && shown < 4; ++i) {
    const double e = expected[i], g = got[i];
    if (e == g || (std::isnan(e) && std::isnan(g))) continue;
    const double s = bound.length > 1 ? largest : std::max(1.0, std::fabs(e));
    const double tolerance = bound.u * (2 * std::fabs(e) + bound.roundings * s) +
                             0x1p-24 * (16 + 4 * std::sqrt(bound.length)) * s +
                             (bound.half ? 0x1p-24 : 0);
    if (std::isfinite(e) && std::fabs(g - e) <= tolerance) continue;
    ADD_FAILURE() << what << " [" << i << "]: expected " << e << ", got " << g << ", tolerance "
                  << tolerance;
    ++shown;
  }
}

const Deviation* find_deviation(const std::string& op, const std::string& case_name, bool wider) {
  for (const Deviation& d : kDeviations) {
    if (op == d.op && wider == d.wider && (d.only_case == nullptr || case_name == d.only_case))
      return &d;
  }
  return nullptr;
}

/// Each element is 0, in value and gradient alike, or what PyTorch gives for one that is kept.
void expect_dropped_or_kept(const GoldenCase& c, std::vector<double>& y, std::vector<double>& dx,
                            const StoredArray& kept_y, const StoredArray& kept_dx,
                            const std::string& what) {
  const double n = static_cast<double>(y.size()), p = c.number("p");
  double kept = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    ASSERT_EQ(y[i] == 0, dx[i] == 0) << what << " [" << i << "]";
    kept += y[i] != 0;
    if (y[i] != 0) continue;
    y[i] = kept_y.values[i];
    dx[i] = kept_dx.values[i];
  }
  EXPECT_NEAR(kept, n * (1 - p), 5 * std::sqrt(n * p * (1 - p))) << what << ": elements kept";
}

void replay(const GoldenOp& op, const GoldenCase& c, const Run& run, Device device) {
  const std::string what = detail::concat(op.name, " ", c.name, " ", run.name, " on ", device);
  const auto stored = [&](const char* kind, std::size_t i) {
    return detail::concat(run.name, ".", kind, i);
  };
  Call call{c, {}};
  while (c.has(detail::concat("in", call.in.size())))
    call.in.push_back(make_input(c, call.in.size(), run, device));
  const bool autocast = run.autocast != Dtype::f32;
  Results out;
  {
    const Autocast amp(autocast ? run.autocast : Dtype::bf16, autocast);
    out = op.run(call);
  }

  const double length = c.number("length");
  const bool mask = c.has_attr("mask") && c.integer("mask") != 0;
  double u = 0;
  bool half = false;
  std::vector<Tensor> outputs, cotangents;
  std::vector<std::vector<double>> values;
  ASSERT_FALSE(c.has(stored("out", out.size()))) << what << ": PyTorch has more outputs";
  for (std::size_t i = 0; i < out.size(); ++i) {
    const StoredArray& expected = c.array(stored("out", i));
    ASSERT_EQ(out[i].shape(), expected.shape) << what << " output " << i;
    values.push_back(out[i].to_vector<double>());
    if (out[i].dtype() != expected.dtype) {
      const bool wider = out[i].dtype() == Dtype::f32;
      EXPECT_TRUE(run.low_inputs && find_deviation(op.name, c.name, wider) != nullptr)
          << what << " output " << i << ": expected " << expected.dtype << ", got "
          << out[i].dtype() << ", which is not in the table of deviations";
    }
    u = std::max(u, coarser(out[i].dtype(), expected.dtype));
    half |= out[i].dtype() == Dtype::f16 || expected.dtype == Dtype::f16;
    if (!is_floating(out[i].dtype())) continue;
    const StoredArray& dy = c.array(detail::concat("dy", cotangents.size()));
    outputs.push_back(out[i]);
    cotangents.push_back(
        from_vector(dy.values, dy.shape, {.dtype = out[i].dtype(), .device = device}));
  }

  // Gradients of one output go through backward(), into the leaves, as in training.
  std::vector<Tensor> leaves, gradients;
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < call.in.size(); ++i) {
    if (!c.has(stored("grad", i))) continue;
    leaves.push_back(call.in[i]);
    numbers.push_back(i);
  }
  if (leaves.empty()) {
    for (const Tensor& y : out) EXPECT_FALSE(y.requires_grad()) << what;
  } else if (outputs.size() == 1) {
    outputs[0].backward(cotangents[0]);
    for (const Tensor& leaf : leaves) gradients.push_back(leaf.grad());
  } else {
    gradients = grad(outputs, leaves, cotangents);
  }

  std::vector<std::vector<double>> gradient_values;
  for (std::size_t k = 0; k < leaves.size(); ++k) {
    const StoredArray& expected = c.array(stored("grad", numbers[k]));
    ASSERT_TRUE(gradients[k].defined()) << what << " gradient " << numbers[k];
    ASSERT_EQ(gradients[k].shape(), expected.shape) << what << " gradient " << numbers[k];
    EXPECT_EQ(gradients[k].dtype(), expected.dtype) << what << " gradient " << numbers[k];
    gradient_values.push_back(gradients[k].to_vector<double>());
  }
  if (mask)
    expect_dropped_or_kept(c, values[0], gradient_values[0], c.array(stored("out", 0)),
                           c.array(stored("grad", 0)), what);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const StoredArray& expected = c.array(stored("out", i));
    if (!is_floating(expected.dtype)) {
      EXPECT_EQ(values[i], expected.values) << what << " output " << i;
      continue;
    }
    const bool output_half = out[i].dtype() == Dtype::f16 || expected.dtype == Dtype::f16;
    expect_close(
        values[i], expected.values,
        {coarser(out[i].dtype(), expected.dtype), 1.0 * roundings(op.name), length, output_half},
        what + detail::concat(" output ", i));
  }
  for (std::size_t k = 0; k < leaves.size(); ++k) {
    const Dtype dtype = gradients[k].dtype();
    expect_close(gradient_values[k], c.array(stored("grad", numbers[k])).values,
                 {std::max(u, unit_roundoff(dtype)), 2.0 + roundings(op.name), length,
                  half || dtype == Dtype::f16},
                 what + detail::concat(" gradient ", numbers[k]));
  }
}

TEST_P(Golden, MatchesPyTorch) {
  const GoldenFile file = read_golden(GetParam().name);
  EXPECT_FALSE(file.cases.empty());
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const GoldenCase& c : file.cases) {
      for (const Run& run : kRuns) replay(GetParam(), c, run, device);
    }
  }
}

TEST_P(Golden, FileIsSmallAndComesFromCuda) {
  const GoldenFile file = read_golden(GetParam().name);
  EXPECT_LE(file.bytes, std::size_t{64 * 1024});
  EXPECT_EQ(file.device.substr(0, 4), "cuda") << "made by torch " << file.torch;
}

INSTANTIATE_TEST_SUITE_P(Ops, Golden, ::testing::ValuesIn(golden_ops()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Goldens, EveryFileHasAnOp) {
  std::set<std::string> names;
  for (const GoldenOp& op : golden_ops()) names.insert(op.name);
  for (const auto& entry : std::filesystem::directory_iterator(goldens_folder()))
    EXPECT_EQ(names.count(entry.path().stem().string()), 1u) << entry.path();
}

TEST(Goldens, EveryDeviationOccurs) {
  for (const Deviation& d : kDeviations) {
    bool seen = false;
    for (const GoldenOp& op : golden_ops()) {
      if (std::string(op.name) != d.op) continue;
      for (const GoldenCase& c : read_golden(op.name).cases) {
        if (d.only_case != nullptr && c.name != d.only_case) continue;
        for (const Run& run : kRuns) {
          if (!run.low_inputs) continue;
          Call call{c, {}};
          while (c.has(detail::concat("in", call.in.size())))
            call.in.push_back(make_input(c, call.in.size(), run, Device::cpu()));
          const Autocast amp(run.autocast);
          const Results out = op.run(call);
          for (std::size_t i = 0; i < out.size(); ++i) {
            const Dtype theirs = c.array(detail::concat(run.name, ".out", i)).dtype;
            seen |= out[i].dtype() != theirs && (out[i].dtype() == Dtype::f32) == d.wider;
          }
        }
      }
    }
    EXPECT_TRUE(seen) << d.op << ": " << d.reason;
  }
}

}  // namespace
}  // namespace mixtape::testing
