// What a profile says about ops: module, direction, FLOPs, bytes, shapes, memory, kernels.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "engine/allocator.h"
#include "engine/autocast.h"
#include "engine/caching_allocator.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "optim/clip.h"
#include "optim/grad_scaler.h"
#include "optim/optimizer.h"
#include "tests/engine/profile_once.h"
#include "tests/support/devices.h"

namespace mixtape {
namespace {

using testing::flops_of;
using testing::profile_once;
using testing::ranges_named;
using testing::test_devices;

struct Block : nn::Module<Block> {
  nn::Linear first{8, 16}, second{16, 4};
  Block() {
    add("first", first);
    add("second", second);
  }
  Tensor forward(const Tensor& x) { return second(relu(first(x))); }  // (B, 8) -> (B, 4)
};

struct Net : nn::Module<Net> {
  Block block;
  Net() { add("block", block); }
  Tensor forward(const Tensor& x) { return sum(block(x)); }
};

TEST(ProfileOps, forward_and_backward_carry_the_module_of_the_forward) {
  for (const Device device : test_devices()) {
    Net net;
    net.to(device);
    const Tensor x = ones({2, 8}, {.device = device});
    const ProfileResult result = profile_once([&] { net(x).backward(); });
    for (const bool backward : {false, true}) {
      const auto linear = ranges_named(result, "linear", backward);
      ASSERT_EQ(linear.size(), 2u);
      EXPECT_EQ(linear[0].module, backward ? "block.second" : "block.first");
      EXPECT_EQ(linear[1].module, backward ? "block.first" : "block.second");
      EXPECT_EQ(ranges_named(result, "relu", backward).at(0).module, "block");
      EXPECT_EQ(ranges_named(result, "sum", backward).at(0).module, "");
    }
    const auto forward = ranges_named(result, "linear"),
               backward = ranges_named(result, "linear", true);
    EXPECT_NE(forward[0].sequence, 0u);
    EXPECT_EQ(forward[0].sequence, backward[1].sequence);
    EXPECT_EQ(forward[1].sequence, backward[0].sequence);
  }
}

/// y = 2 x, with a backward made of ops.
struct Twice {
  static constexpr OpInfo info{.name = "twice"};
  Metas infer(Inputs in) const { return {meta_of(in[0])}; }
  void forward(Inputs in, Outputs out, Saved&) const { out[0] = mul(in[0], Scalar(2)); }
  void backward(const Saved&, Inputs dy, Grads dx) const { dx[0].set(mul(dy[0], Scalar(2))); }
};
struct TwiceModule : nn::Module<TwiceModule> {
  Tensor forward(const Tensor& x) { return mixtape::apply(Twice{}, {x}); }
};

TEST(ProfileOps, ops_within_a_backward_belong_to_it) {
  nn::Sequential net;
  net.push<TwiceModule>();
  const Tensor x = ones({3}).set_requires_grad();
  const ProfileResult result = profile_once([&] { sum(net(x)).backward(); });
  const auto forward = ranges_named(result, "mul"), backward = ranges_named(result, "mul", true);
  ASSERT_EQ(forward.size(), 1u);
  ASSERT_EQ(backward.size(), 1u);
  EXPECT_FALSE(forward[0].module.empty());
  EXPECT_EQ(backward[0].module, forward[0].module);
}

// ---- work --------------------------------------------------------------------------------------

TEST(ProfileOps, flops_of_known_shapes) {
  const auto leaf = [](const Shape& sizes) { return ones(sizes).set_requires_grad(); };
  const Tensor a = leaf({2, 3}), b = leaf({3, 5}), constant = ones({3, 5});
  ProfileResult r = profile_once([&] { sum(a.matmul(b)).backward(); });
  EXPECT_EQ(flops_of(r, "matmul"), 2 * 2 * 3 * 5);
  EXPECT_EQ(flops_of(r, "matmul", true), 2 * (2 * 2 * 3 * 5));
  r = profile_once([&] { sum(a.matmul(constant)).backward(); });
  EXPECT_EQ(flops_of(r, "matmul", true), 2 * 2 * 3 * 5);

  const Tensor x = leaf({4, 6}), w1 = leaf({7, 6}), b1 = leaf({7}), w2 = leaf({5, 7}),
               b2 = leaf({5});
  r = profile_once([&] { sum(linear(x, w1, b1)).backward(); });
  EXPECT_EQ(flops_of(r, "linear"), 2 * 4 * 6 * 7);
  EXPECT_EQ(flops_of(r, "linear", true), 2 * (2 * 4 * 6 * 7));
  r = profile_once([&] { sum(mlp(x, w1, b1, w2, b2)).backward(); });
  EXPECT_EQ(flops_of(r, "mlp"), 2 * 4 * 6 * 7 + 2 * 4 * 7 * 5);
  EXPECT_EQ(flops_of(r, "mlp", true), 2 * (2 * 4 * 6 * 7 + 2 * 4 * 7 * 5));

  const Tensor image = leaf({2, 4, 6, 6}), kernel = leaf({8, 2, 3, 3});
  r = profile_once([&] { sum(conv2d(image, kernel, {}, {.groups = 2})).backward(); });
  EXPECT_EQ(flops_of(r, "conv2d"), 2.0 * (2 * 8 * 4 * 4) * (2 * 3 * 3));
  EXPECT_EQ(flops_of(r, "conv2d", true), 2 * 2.0 * (2 * 8 * 4 * 4) * (2 * 3 * 3));

  const Tensor qkv = leaf({2, 5, 3 * 8});  // two heads of 4
  r = profile_once([&] { sum(self_attention(qkv, {.heads = 2, .causal = false})).backward(); });
  EXPECT_EQ(flops_of(r, "self_attention"), 2 * 2.0 * (2 * 2) * (5 * 5) * 4);
  EXPECT_EQ(flops_of(r, "self_attention", true), 5 * 2.0 * (2 * 2) * (5 * 5) * 4);
  r = profile_once([&] { self_attention(qkv, {.heads = 2, .causal = true}); });
  EXPECT_EQ(flops_of(r, "self_attention"), 2 * 2.0 * (2 * 2) * 15 * 4);  // 1 + 2 + .. + 5 pairs

  const Tensor target = zeros({4}, {.dtype = Dtype::i64});
  r = profile_once([&] { linear_cross_entropy(x, w1, target).backward(); });
  EXPECT_EQ(flops_of(r, "linear_cross_entropy"), 2 * 4 * 6 * 7);
  EXPECT_EQ(flops_of(r, "linear_cross_entropy", true), 3 * (2 * 4 * 6 * 7));
}

TEST(ProfileOps, a_recorded_backward_counts_its_products_once) {
  const Tensor a = ones({2, 3}).set_requires_grad(), b = ones({3, 5}).set_requires_grad();
  // grad() and not backward(): a leaf's own gradient with a history would be a cycle.
  const ProfileResult r = profile_once([&] {
    grad({sum(a.matmul(b))}, {a, b}, {}, {.create_graph = true});
  });
  EXPECT_EQ(flops_of(r, "matmul", true), 2 * (2 * 2 * 3 * 5));
}

TEST(ProfileOps, bytes_are_what_is_read_and_written) {
  const Tensor x = ones({10, 20}), row = ones({20}).expand({10, 20});
  ProfileResult r = profile_once([&] { x + row; });
  EXPECT_EQ(ranges_named(r, "add").at(0).bytes, 4.0 * (200 + 20 + 200));
  r = profile_once([&] { x.transpose(0, 1); });
  EXPECT_EQ(ranges_named(r, "transpose").size() + ranges_named(r, "permute").size(), 1u);
  EXPECT_EQ(r.ranges.at(0).bytes, 0);
  const Tensor table = ones({1000, 4}).set_requires_grad();
  const Tensor index = zeros({3}, {.dtype = Dtype::i64});
  r = profile_once([&] { embedding(table, index); });
  EXPECT_EQ(ranges_named(r, "embedding").at(0).bytes, 2 * 4.0 * 12 + 8 * 3);  // not the table
}

TEST(ProfileOps, shapes_are_recorded_when_asked_for) {
  const auto run = [] { ones({2, 3}).matmul(ones({3, 5})); };
  EXPECT_TRUE(ranges_named(profile_once(run), "matmul").at(0).inputs.empty());
  const ProfileResult r = profile_once(run, {.shapes = true});
  const std::vector<TypedShape> expected = {{{2, 3}, Dtype::f32}, {{3, 5}, Dtype::f32}};
  EXPECT_EQ(ranges_named(r, "matmul").at(0).inputs, expected);
  const auto rows = r.rows({.group_by = ProfileGroup::op_and_shapes});
  EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [](const ProfileRow& row) {
    return row.name == "matmul" && row.shapes == "float32(2, 3) float32(3, 5)";
  }));
}

TEST(ProfileOps, autocast_casts_are_ops_of_their_own) {
  const Tensor x = ones({4, 4}), w = ones({4, 4});
  const ProfileResult r = profile_once([&] {
    const Autocast amp(Dtype::bf16);
    linear(x, w, {});
  });
  EXPECT_GE(ranges_named(r, "cast").size(), 2u);
  EXPECT_EQ(flops_of(r, "linear"), 2 * 4 * 4 * 4);
}

TEST(ProfileOps, functions_of_a_training_step_have_ranges) {
  Net net;
  optim::AdamW opt(net.parameters());
  GradScaler scaler;
  const Tensor x = ones({2, 8});
  const ProfileResult r = profile_once([&] {
    const Tensor loss = net(x);
    scaler.scale(loss).backward();
    scaler.unscale(opt);
    optim::clip_grad_norm(net.parameters(), 1.0f);
    scaler.step(opt);
    scaler.update();
    loss.item<float>();
  });
  for (const char* name : {"GradScaler::unscale", "clip_grad_norm", "GradScaler::step", "adamw",
                           "GradScaler::update", "item"})
    EXPECT_EQ(ranges_named(r, name).size(), 1u) << name;
  EXPECT_EQ(ranges_named(r, "backward", true).size(), 1u);
  const double parameters = 8 * 16 + 16 + 16 * 4 + 4;
  EXPECT_EQ(ranges_named(r, "adamw")[0].bytes, parameters * (4 + 2 * 4 + 2 * 2 * 4));
}

// ---- memory ------------------------------------------------------------------------------------

TEST(ProfileMemory, changes_balance_and_belong_to_their_op) {
  for (const Device device : test_devices()) {
    const Tensor a = ones({64, 32}, {.device = device}), b = ones({32, 16}, {.device = device});
    const std::size_t before = memory_stats(device).allocated;
    std::size_t within = 0;
    const ProfileResult r = profile_once([&] {
      const Tensor y = a.matmul(b);
      within = memory_stats(device).allocated;
      relu(y);
    });
    std::int64_t live = 0, allocated = static_cast<std::int64_t>(before);
    for (const MemoryChange& m : r.memory) {
      if (!(m.device == device) || m.pinned) continue;
      live += m.bytes;
      allocated += m.bytes;
      EXPECT_EQ(m.allocated, allocated);
      EXPECT_GE(m.reserved, m.allocated);
    }
    EXPECT_EQ(live, 0);
    EXPECT_EQ(within - before, 64u * 16 * 4);
    const HostRange product = ranges_named(r, "matmul").at(0);
    EXPECT_EQ(product.allocated - product.freed, 64 * 16 * 4);
    const ProfileResult without = profile_once([&] { a.matmul(b); }, {.memory = false});
    EXPECT_TRUE(without.memory.empty());
  }
}

// ---- kernels -----------------------------------------------------------------------------------

TEST(ProfileKernels, belong_to_the_op_that_launched_them) {
  for (const Device device : test_devices()) {
    if (device.is_cpu()) continue;
    Net net;
    net.to(device);
    const Tensor x = ones({2, 8}, {.device = device});
    net(x).backward();
    const ProfileResult r = profile_once([&] { net(x).backward(); });
    if (r.activities.empty()) GTEST_SKIP() << r.notes.at(0);
    std::map<std::uint64_t, HostRange> ranges;
    for (const HostRange& range : r.ranges) ranges[range.id] = range;
    std::set<std::string> launching;
    for (const DeviceActivity& a : r.activities) {
      ASSERT_TRUE(ranges.contains(a.range)) << a.name;
      const HostRange& range = ranges[a.range];
      EXPECT_GE(a.begin_ns, range.begin_ns - 1'000'000) << a.name;  // both clocks are one
      EXPECT_GT(a.end_ns, a.begin_ns) << a.name;
      launching.insert(range.name + (range.backward ? " backward" : ""));
    }
    for (const char* name : {"linear", "linear backward", "relu", "relu backward", "sum"})
      EXPECT_TRUE(launching.contains(name)) << name;
    EXPECT_GT(r.bottlenecks().share("launch overhead"), 0);
    EXPECT_GT(r.copy_rate, 1e9);
  }
}

}  // namespace
}  // namespace mixtape
