// Rates of the CPU's kernels at the shapes of the MLP 784-1024-1024-10 and the small CNN of
// examples/fashion_mnist, B = 128: products and convolutions in FLOP/s, the rest in bytes/s, each
// byte counted once. tests/benchmarks/cpu_kernels_peer.py gives PyTorch's.
#include <benchmark/benchmark.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/allocator.h"
#include "engine/transfer.h"
#include "kernels/conv.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/softmax.h"

namespace mixtape {
namespace {

using namespace kernels;

/// An uninitialised tensor's memory, zeroed.
class Data {
 public:
  Data(Dtype dtype, const Shape& sizes)
      : bytes_(static_cast<std::size_t>(sizes.numel()) * size_of(dtype)),
        block_(allocator_of(Device::cpu()).allocate(bytes_, Stream())) {
    set_bytes(block_.data, 0, bytes_, Stream());
    view.data = block_.data;
    view.sizes = sizes;
    view.strides = contiguous_strides(sizes);
    view.dtype = dtype;
    view.defined = true;
  }
  ~Data() { allocator_of(Device::cpu()).release(block_); }
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;
  Workspace workspace() const { return {block_.data, bytes_}; }
  double bytes() const { return static_cast<double>(bytes_); }
  View view;

 private:
  std::size_t bytes_;
  Block block_;
};

void rate(benchmark::State& state, const char* unit, double each) {
  state.counters[unit] = benchmark::Counter(each, benchmark::Counter::kIsIterationInvariantRate,
                                            benchmark::Counter::kIs1000);
}

struct Product {
  const char* name;
  std::int64_t m, n, k;
  bool a_transposed, b_transposed;
};
const Product kProducts[] = {
    {"layer1_y", 128, 1024, 784, false, true},   {"layer1_dw", 1024, 784, 128, true, false},
    {"layer2_y", 128, 1024, 1024, false, true},  {"layer2_dx", 128, 1024, 1024, false, false},
    {"layer2_dw", 1024, 1024, 128, true, false}, {"layer3_y", 128, 10, 1024, false, true},
    {"layer3_dw", 10, 1024, 128, true, false},   {"square_1024", 1024, 1024, 1024, false, false},
};

void product(benchmark::State& state, Dtype dtype, const Product& p) {
  Data a(dtype, {p.m, p.k}), b(dtype, {p.k, p.n}), out(dtype, {p.m, p.n});
  MatmulArgs args;
  args.out = out.view;
  args.a = a.view;
  args.b = b.view;
  if (p.a_transposed) args.a.strides = {1, p.m};
  if (p.b_transposed) args.b.strides = {1, p.k};
  for (auto _ : state) matmul(Stream(), args, Workspace{});
  rate(state, "FLOP/s",
       2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k));
}

struct Layer {
  const char* name;
  std::int64_t n, c, h, o, kernel, padding;
};
const Layer kLayers[] = {{"conv1", 128, 1, 28, 16, 3, 1},
                         {"conv2", 128, 16, 14, 32, 3, 1},
                         {"conv64", 32, 64, 28, 64, 3, 1}};

void convolution(benchmark::State& state, Dtype dtype, const Layer& l, ConvPass pass) {
  const std::int64_t p = l.h + 2 * l.padding - l.kernel + 1;
  Data x(dtype, {l.n, l.c, l.h, l.h}), w(dtype, {l.o, l.c, l.kernel, l.kernel});
  Data y(dtype, {l.n, l.o, p, p}), bias(dtype, {l.o});
  Conv2dArgs args;
  args.x = x.view;
  args.w = w.view;
  args.y = y.view;
  args.geometry.padding[0] = args.geometry.padding[1] = l.padding;
  if (pass == ConvPass::forward) {
    args.bias = bias.view;
    args.activation = Activation::relu;
  }
  const Data scratch(Dtype::u8,
                     {static_cast<std::int64_t>(conv2d_workspace_bytes(Stream(), pass, args))});
  for (auto _ : state) switch (pass) {
      case ConvPass::forward: conv2d_forward(Stream(), args, scratch.workspace()); break;
      case ConvPass::backward_data:
        conv2d_backward_data(Stream(), args, scratch.workspace());
        break;
      case ConvPass::backward_weight:
        conv2d_backward_weight(Stream(), args, 0, scratch.workspace());
        break;
    }
  rate(state, "FLOP/s", 2.0 * static_cast<double>(y.view.numel() * l.c * l.kernel * l.kernel));
}

void pooling(benchmark::State& state, Dtype dtype, bool backward) {
  Data x(dtype, {128, 16, 28, 28}), y(dtype, {128, 16, 14, 14}), index(Dtype::i32, y.view.sizes);
  max_pool2d_forward(Stream(), y.view, index.view, x.view, PoolGeometry{});
  for (auto _ : state)
    backward ? max_pool2d_backward(Stream(), x.view, y.view, index.view, PoolGeometry{})
             : max_pool2d_forward(Stream(), y.view, index.view, x.view, PoolGeometry{});
  rate(state, "B/s", x.bytes() + y.bytes() + index.bytes());
}

void softmax_rows(benchmark::State& state, Dtype dtype, std::int64_t n, std::int64_t c) {
  Data x(dtype, {n, c}), y(dtype, {n, c});
  for (auto _ : state) softmax_forward(Stream(), false, y.view, x.view);
  rate(state, "B/s", x.bytes() + y.bytes());
}

void loss_rows(benchmark::State& state, Dtype dtype, std::int64_t n, std::int64_t v) {
  Data x(dtype, {n, v}), rows(Dtype::f32, {n}), lse(Dtype::f32, {n}), target(Dtype::i64, {n});
  Data loss(Dtype::f32, {1});
  CrossEntropyForward args;
  args.row_loss = rows.view;
  args.lse = lse.view;
  args.loss = loss.view;
  args.logits = x.view;
  args.target = target.view;
  for (auto _ : state) cross_entropy_forward(Stream(), args);
  rate(state, "B/s", x.bytes());
}

void layer_norm(benchmark::State& state, Dtype dtype, bool backward) {
  const std::int64_t n = 4096, c = 768;
  Data x(dtype, {n, c}), y(dtype, {n, c}), w(Dtype::f32, {c}), b(Dtype::f32, {c});
  Data mean(Dtype::f32, {n}), rstd(Dtype::f32, {n}), dx(dtype, {n, c});
  const Data scratch(
      Dtype::u8,
      {static_cast<std::int64_t>(layer_norm_backward_workspace_bytes(Device::cpu(), n, c))});
  LayerNormForward f;
  f.y = y.view;
  f.mean = mean.view;
  f.rstd = rstd.view;
  f.x = x.view;
  f.weight = w.view;
  f.bias = b.view;
  LayerNormBackward g;
  g.dx = dx.view;
  g.dweight = w.view;
  g.dbias = b.view;
  g.dy = y.view;
  g.x = x.view;
  g.mean = mean.view;
  g.rstd = rstd.view;
  for (auto _ : state)
    backward ? layer_norm_backward(Stream(), g, scratch.workspace())
             : layer_norm_forward(Stream(), f);
  rate(state, "B/s", x.bytes() * (backward ? 3 : 2));
}

void adam(benchmark::State& state) {
  const std::int64_t n = 1 << 24;
  Data p(Dtype::f32, {n}), g(Dtype::f32, {n}), m(Dtype::f32, {n}), v(Dtype::f32, {n});
  Data step(Dtype::f32, {1});
  ParameterEntry e{};
  e.parameter = p.view.data;
  e.gradient = g.view.data;
  e.state[0] = m.view.ptr<float>();
  e.state[1] = v.view.ptr<float>();
  e.step = step.view.ptr<float>();
  e.numel = n;
  const ParameterTable table{&e, &e, 1, n / kChunk};
  OptimizerScalars s;
  s.lr = 1e-3f;
  s.beta1 = 0.9f;
  s.beta2 = 0.999f;
  s.eps = 1e-8f;
  for (auto _ : state) adam_step(Stream(), table, &s, OptimizerFlags{}, StepScalars{});
  rate(state, "B/s", p.bytes() * 7);
}

void enroll() {
  const std::pair<Dtype, std::string> dtypes[] = {
      {Dtype::f32, "f32"}, {Dtype::bf16, "bf16"}, {Dtype::f16, "f16"}};
  const auto add = [](const std::string& name, auto&& body) {
    benchmark::RegisterBenchmark(name.c_str(), body)->UseRealTime();
  };
  for (const auto& [dtype, text] : dtypes) {
    const Dtype d = dtype;
    for (const Product& p : kProducts)
      add("matmul/" + text + "/" + p.name, [=](benchmark::State& s) { product(s, d, p); });
    for (const Layer& l : kLayers) {
      const std::string name = text + "/" + l.name;
      add("conv_y/" + name, [=](benchmark::State& s) { convolution(s, d, l, ConvPass::forward); });
      add("conv_dx/" + name,
          [=](benchmark::State& s) { convolution(s, d, l, ConvPass::backward_data); });
      add("conv_dw/" + name,
          [=](benchmark::State& s) { convolution(s, d, l, ConvPass::backward_weight); });
    }
    add("max_pool_y/" + text, [=](benchmark::State& s) { pooling(s, d, false); });
    add("max_pool_dx/" + text, [=](benchmark::State& s) { pooling(s, d, true); });
    add("softmax/" + text + "/8192x512",
        [=](benchmark::State& s) { softmax_rows(s, d, 8192, 512); });
    add("cross_entropy/" + text + "/64x50304",
        [=](benchmark::State& s) { loss_rows(s, d, 64, 50304); });
    add("layer_norm_y/" + text, [=](benchmark::State& s) { layer_norm(s, d, false); });
    add("layer_norm_dx/" + text, [=](benchmark::State& s) { layer_norm(s, d, true); });
  }
  add("adam/f32/16M", adam);
}

}  // namespace
}  // namespace mixtape

int main(int argc, char** argv) {
  mixtape::enroll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
