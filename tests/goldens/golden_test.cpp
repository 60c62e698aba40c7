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

#include <algorithm>
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

struct Mode {
  const char* name;
  Dtype autocast;   // f32: none
  bool low_inputs;  // the inputs that the case lists as `low` are 16-bit already
};
constexpr Mode kModes[] = {{"f32", Dtype::f32, false},
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
    {"add_rms_norm", "residual_f32", false, kKeeps},
    {"group_norm", nullptr, false, kKeeps},
    {"sum_to", nullptr, false,
     "the gradient of broadcasting: it has the dtype of the tensor that was broadcast"},
    {"mean", nullptr, true, "a long reduction, treated as sum is"},
    {"var", nullptr, true, "a long reduction, treated as sum is"},
    {"div", "number_left", false,
     "PyTorch divides a number by a tensor through reciprocal(), which is on its float32 list"},
};

/// Tensors rounded to 16 bits on one side only, besides the result.
int roundings(const std::string& op, const GoldenCase& c) {
  if (op == "linear" || op == "conv2d") return 2;  // PyTorch: product, then bias, then activation
  if (op == "mlp") return 3;                       // and the hidden layer's gradient
  if (op == "add_layer_norm") return 1;            // PyTorch: the sum
  if (op == "rms_norm") return 2;                  // PyTorch: x rstd, and the weight's product
  if (op == "add_rms_norm") return 3;              // and the sum
  if (op == "batch_norm") return 1;                // PyTorch: before the residual and the ReLU
  if (op == "swiglu") return 1;                    // PyTorch: silu(gate)
  if (op == "linear_cross_entropy") return 1;      // logits, which may round either way
  if (op == "cross_entropy") return 1;             // PyTorch: log-probabilities of 16-bit logits
  if (op.find("attention") != std::string::npos) return 3;  // scores, probabilities, their gradient
  if (c.name == "mixed_0-d") return 2;  // PyTorch: the float32 operand, which is up to 2 in size
  return 0;
}
/// Ops with a float32 result that multiply in 16 bits under autocast.
/// Unit roundoff of 16-bit values inside an op whose result is float32.
double roundoff_inside(const std::string& op, const Mode& mode) {
  const bool rounds = op == "linear_cross_entropy" || (op == "cross_entropy" && mode.low_inputs);
  return rounds ? unit_roundoff(mode.autocast) : 0;
}

class Golden : public ::testing::TestWithParam<GoldenOp> {};

Tensor make_input(const GoldenCase& c, std::size_t i, const Mode& mode, Device device) {
  const NoGrad no_grad;
  const StoredArray& stored = c.array(detail::concat("in", i));
  Tensor t = from_vector(stored.values, stored.shape, {.dtype = stored.dtype, .device = device});
  const Shape low = c.list("low");
  if (mode.low_inputs &&
      std::find(low.begin(), low.end(), static_cast<std::int64_t>(i)) != low.end())
    t = t.to(mode.autocast);
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

Call make_call(const GoldenCase& c, const Mode& mode, Device device) {
  Call call{c, {}};
  while (c.has(detail::concat("in", call.in.size())))
    call.in.push_back(make_input(c, call.in.size(), mode, device));
  return call;
}

Results forward(const GoldenOp& op, const Call& call, const Mode& mode) {
  const bool autocast = mode.autocast != Dtype::f32;
  const Autocast amp(autocast ? mode.autocast : Dtype::bf16, autocast);
  return op.run(call);
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

bool is_listed_deviation(const std::string& op, const std::string& case_name, bool wider) {
  for (const Deviation& d : kDeviations) {
    if (op == d.op && wider == d.wider && (d.only_case == nullptr || case_name == d.only_case))
      return true;
  }
  return false;
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

struct Replayed {
  Results out;
  std::vector<std::size_t> inputs;  // those with a gradient
  std::vector<Tensor> gradients;
};

Replayed run_both_ways(const GoldenOp& op, const GoldenCase& c, const Mode& mode, Device device) {
  const Call call = make_call(c, mode, device);
  Replayed r{forward(op, call, mode), {}, {}};
  std::vector<Tensor> outputs, cotangents, leaves;
  for (const Tensor& y : r.out) {
    if (!is_floating(y.dtype())) continue;
    const StoredArray& dy = c.array(detail::concat("dy", outputs.size()));
    outputs.push_back(y);
    cotangents.push_back(from_vector(dy.values, dy.shape, {.dtype = y.dtype(), .device = device}));
  }
  for (std::size_t i = 0; i < call.in.size(); ++i) {
    if (!c.has(detail::concat(mode.name, ".grad", i))) continue;
    leaves.push_back(call.in[i]);
    r.inputs.push_back(i);
  }
  if (leaves.empty()) {
    for (const Tensor& y : r.out) EXPECT_FALSE(y.requires_grad()) << op.name << " " << c.name;
  } else if (outputs.size() == 1) {  // into the leaves, as in training
    outputs[0].backward(cotangents[0]);
    for (const Tensor& leaf : leaves) r.gradients.push_back(leaf.grad());
  } else {
    r.gradients = grad(outputs, leaves, cotangents);
  }
  return r;
}

bool is_half(Dtype a, Dtype b) { return a == Dtype::f16 || b == Dtype::f16; }

void replay(const GoldenOp& op, const GoldenCase& c, const Mode& mode, Device device) {
  const std::string what = detail::concat(op.name, " ", c.name, " ", mode.name, " on ", device);
  const Replayed r = run_both_ways(op, c, mode, device);
  std::vector<const StoredArray*> out, gradients;
  for (std::size_t i = 0; i < r.out.size(); ++i)
    out.push_back(&c.array(detail::concat(mode.name, ".out", i)));
  ASSERT_FALSE(c.has(detail::concat(mode.name, ".out", out.size()))) << what;
  for (const std::size_t i : r.inputs)
    gradients.push_back(&c.array(detail::concat(mode.name, ".grad", i)));

  std::vector<std::vector<double>> values, gradient_values;
  for (const Tensor& y : r.out) values.push_back(y.to_vector<double>());
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const std::string name = what + detail::concat(" gradient ", r.inputs[k]);
    ASSERT_TRUE(r.gradients[k].defined()) << name;
    ASSERT_EQ(r.gradients[k].shape(), gradients[k]->shape) << name;
    EXPECT_EQ(r.gradients[k].dtype(), gradients[k]->dtype) << name;
    gradient_values.push_back(r.gradients[k].to_vector<double>());
  }
  if (c.has_attr("mask") && c.integer("mask") != 0)
    expect_dropped_or_kept(c, values[0], gradient_values[0], *out[0], *gradients[0], what);

  const double length = c.number("length"), extra = roundings(op.name, c);
  const double u_inside = roundoff_inside(op.name, mode);
  double u = u_inside;
  bool half = false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::string name = what + detail::concat(" output ", i);
    const Dtype ours = r.out[i].dtype(), theirs = out[i]->dtype;
    ASSERT_EQ(r.out[i].shape(), out[i]->shape) << name;
    EXPECT_TRUE(ours == theirs ||
                (mode.low_inputs && is_listed_deviation(op.name, c.name, ours == Dtype::f32)))
        << name << ": expected " << theirs << ", got " << ours
        << ", which is not in the table of deviations";
    if (!is_floating(theirs)) {
      EXPECT_EQ(values[i], out[i]->values) << name;
      continue;
    }
    const double u_out = std::max(u_inside, coarser(ours, theirs));
    expect_close(values[i], out[i]->values, {u_out, extra, length, is_half(ours, theirs)}, name);
    u = std::max(u, u_out);
    half |= is_half(ours, theirs);
  }
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const Dtype dtype = r.gradients[k].dtype();
    expect_close(
        gradient_values[k], gradients[k]->values,
        {std::max(u, unit_roundoff(dtype)), 2 + extra, length, half || dtype == Dtype::f16},
        what + detail::concat(" gradient ", r.inputs[k]));
  }
}

/// Files are made where there is a GPU and PyTorch; an op without one shows as skipped.
bool has_golden(const char* op) {
  return std::filesystem::exists(std::filesystem::path(goldens_folder()) /
                                 (std::string(op) + ".golden"));
}
#define MT_SKIP_WITHOUT_GOLDEN(op)                                                             \
  if (!has_golden(op))                                                                         \
  GTEST_SKIP() << op << " has no golden yet: run tests/goldens/make_goldens.py --device cuda " \
               << "--only " << op << " where there is a GPU"

TEST_P(Golden, MatchesPyTorch) {
  MT_SKIP_WITHOUT_GOLDEN(GetParam().name);
  const GoldenFile file = read_golden(GetParam().name);
  EXPECT_FALSE(file.cases.empty());
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const GoldenCase& c : file.cases) {
      for (const Mode& mode : kModes) replay(GetParam(), c, mode, device);
    }
  }
}

TEST_P(Golden, FileIsSmallAndComesFromCuda) {
  MT_SKIP_WITHOUT_GOLDEN(GetParam().name);
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

/// Mixtape's dtype of some output of the case differs from PyTorch's as `d` says.
bool occurs(const Deviation& d, const GoldenOp& op, const GoldenCase& c, const Mode& mode) {
  if (!mode.low_inputs || (d.only_case != nullptr && c.name != d.only_case)) return false;
  const Results out = forward(op, make_call(c, mode, Device::cpu()), mode);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const Dtype theirs = c.array(detail::concat(mode.name, ".out", i)).dtype;
    if (out[i].dtype() != theirs && (out[i].dtype() == Dtype::f32) == d.wider) return true;
  }
  return false;
}

TEST(Goldens, EveryDeviationOccurs) {
  for (const Deviation& d : kDeviations) {
    if (!has_golden(d.op)) continue;  // shown as skipped above
    bool seen = false;
    for (const GoldenOp& op : golden_ops()) {
      if (std::string(op.name) != d.op) continue;
      for (const GoldenCase& c : read_golden(op.name).cases) {
        for (const Mode& mode : kModes) seen |= occurs(d, op, c, mode);
      }
    }
    EXPECT_TRUE(seen) << d.op << ": " << d.reason;
  }
}

}  // namespace
}  // namespace mixtape::testing
