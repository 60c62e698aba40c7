// Memory of a training step does not grow: after 100 steps and after 1,000 the allocator, the
// host's heap and the tape hold the same (case 14: a result that its own node keeps alive would
// show here, as would a gradient, a cast copy or a table that is made anew each step).
#include <gtest/gtest.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "engine/allocator.h"
#include "engine/autocast.h"
#include "engine/thread_pool.h"
#include "nn/layers.h"
#include "ops/ops.h"
#include "optim/grad_scaler.h"
#include "optim/optimizer.h"
#include "tests/support/devices.h"

namespace mixtape {
namespace {

using testing::test_devices;

/// y = x. Its node holds a copy of the op, so that living copies are living nodes.
struct Counted {
  static inline int living = 0;
  Counted() { ++living; }
  Counted(const Counted&) { ++living; }
  ~Counted() { --living; }
  static constexpr OpInfo info{.name = "counted"};
  Metas infer(Inputs in) const { return {meta_of(in[0])}; }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    out[0].copy_(in[0].detach());
    saved.value(out[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    dx[0].set(add(dy[0], mul(saved[0], 0)));
  }
};

struct Mlp : nn::Module<Mlp> {
  nn::Linear hidden{48, 64, {.act = Act::gelu_tanh}}, out{64, 10};
  Mlp() {
    add("hidden", hidden);
    add("out", out);
  }
  Tensor forward(const Tensor& x) {  // (B, 48) -> (B, 10)
    return out(dropout(mixtape::apply(Counted{}, {hidden(x)}), 0.1));
  }
};

struct Cnn : nn::Module<Cnn> {
  nn::Conv2d conv{3, 8, {.padding = {1, 1}, .act = Act::relu}};
  nn::Linear out{8 * 2 * 2, 10};
  Cnn() {
    add("conv", conv);
    add("out", out);
  }
  Tensor forward(const Tensor& x) {  // (B, 48) -> (B, 10)
    const Tensor images = x.reshape({x.size(0), 3, 4, 4});
    return out(mixtape::apply(Counted{}, {max_pool2d(conv(images)).flatten(1)}));
  }
};

struct Held {
  std::size_t allocated, reserved;
  std::uint64_t blocks;  // storages that live
  int nodes;
  std::size_t heap;  // bytes in use of the C heap: nodes, tensors and all else on the host
};

Held held(Device device) {
  const MemoryStats m = memory_stats(device);
  std::size_t heap = 0;
#if defined(__GLIBC__)
  heap = mallinfo2().uordblks;
#endif
  return {m.allocated, m.reserved, m.allocations - m.frees, Counted::living, heap};
}

template <class Net>
void train_and_compare(Device device) {
  constexpr int kSettled = 100, kSteps = 1000;
  set_num_threads(1);  // a worker makes its scratch memory with its first task, which may be late
  Net net;
  net.to(device);
  optim::AdamW opt(net.parameters(), {.lr = 1e-3f, .weight_decay = 0.01f});
  GradScaler scaler;
  const Tensor x = randn({8, 48}, {.device = device}),
               y = randint(0, 10, {8}, {.dtype = Dtype::i64, .device = device});
  Held settled{};
  for (int step = 1; step <= kSteps; ++step) {
    {
      Tensor loss;
      {
        const Autocast amp(Dtype::f16);
        loss = cross_entropy(net(x), y);
      }
      scaler.scale(loss).backward();
    }
    scaler.step(opt);
    scaler.update();
    opt.zero_grad();
    if (step == kSettled) settled = held(device);
  }
  const Held now = held(device);
  EXPECT_EQ(now.allocated, settled.allocated) << device;
  EXPECT_EQ(now.reserved, settled.reserved) << device;
  EXPECT_EQ(now.blocks, settled.blocks) << device;
  EXPECT_EQ(now.nodes, settled.nodes) << device;
  EXPECT_EQ(now.nodes, 0) << device;
  // The smallest object of the tape is 64 bytes: one left behind each step makes 57,600.
  constexpr std::size_t kSlack = 48 * 1024;
  EXPECT_LE(now.heap, settled.heap + kSlack) << device;
}

TEST(StepMemory, IsTheSameAfterThousandStepsOfAnMlp) {
  for (const Device device : test_devices()) train_and_compare<Mlp>(device);
}
TEST(StepMemory, IsTheSameAfterThousandStepsOfACnn) {
  for (const Device device : test_devices()) train_and_compare<Cnn>(device);
}

}  // namespace
}  // namespace mixtape
