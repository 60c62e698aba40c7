// Speed of the CUDA kernels at large sizes: GB/s as a share of the device's own copy rate (each
// byte counted once), TFLOP/s for matrix products. Operands rotate among several sets that together
// exceed the caches. Prints one JSON line a kernel.
//
//   kernel_benchmark [memory|matmul|attention]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "engine/generator.h"
#include "engine/grad_mode.h"
#include "engine/op.h"
#include "engine/transfer.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/random.h"
#include "kernels/reduce.h"
#include "kernels/softmax.h"
#include "ops/ops.h"
#include "optim/optimizer.h"

namespace mixtape {
namespace {

using kernels::Activation;
using kernels::BinaryOp;
using kernels::ReduceOp;
using kernels::UnaryOp;

const Device kDevice = Device::cuda();
constexpr int kRepeats = 40;
double copy_rate = 0;

Stream stream() { return Stream::current(kDevice); }

/// Median milliseconds of f(i), i counting calls, after `warm_ms` of it: a cool card runs long
/// products faster than it can go on running them.
double median_ms(const std::function<void(int)>& f, double warm_ms = 0) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  do {
    for (int i = 0; i < 5; ++i) f(i);
    stream().synchronize();
  } while (std::chrono::duration<double, std::milli>(Clock::now() - start).count() < warm_ms);
  std::vector<Event> starts, ends;
  for (int i = 0; i < kRepeats; ++i) {
    starts.emplace_back(stream(), true);
    f(i);
    ends.emplace_back(stream(), true);
  }
  stream().synchronize();
  std::vector<double> ms;
  for (int i = 0; i < kRepeats; ++i)
    ms.push_back(starts[static_cast<std::size_t>(i)].elapsed_ms(ends[static_cast<std::size_t>(i)]));
  std::nth_element(ms.begin(), ms.begin() + kRepeats / 2, ms.end());
  return ms[kRepeats / 2];
}

void report(const std::string& name, Dtype dtype, double bytes, const std::function<void(int)>& f) {
  const double ms = median_ms(f), rate = bytes / ms / 1e6;
  if (name == "copy") copy_rate = rate;
  std::printf(
      "{\"bench\": \"%s\", \"dtype\": \"%s\", \"ms\": %.4f, \"gbps\": %.0f, \"of_copy\": %.3f}\n",
      name.c_str(), std::string(name_of(dtype)).c_str(), ms, rate, rate / copy_rate);
  std::fflush(stdout);
}

constexpr int kSets = 3;
std::vector<Tensor> sets(const Shape& shape, Dtype dtype) {
  std::vector<Tensor> all;
  for (int i = 0; i < kSets; ++i) all.push_back(randn(shape, {.dtype = dtype, .device = kDevice}));
  return all;
}

void memory_kernels() {
  constexpr std::int64_t n = std::int64_t{1} << 27;
  {
    const auto x = sets({n}, Dtype::f32), y = sets({n}, Dtype::f32);
    report("copy", Dtype::f32, 8.0 * n, [&](int i) {
      copy_bytes(y[static_cast<std::size_t>(i % kSets)].raw_data(), kDevice,
                 x[static_cast<std::size_t>(i % kSets)].raw_data(), kDevice, 4 * n, stream());
    });
  }
  for (const Dtype t : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const double b = static_cast<double>(size_of(t)) * n;
    const auto a = sets({n}, t), c = sets({n}, t), out = sets({n}, t);
    const auto at = [](const std::vector<Tensor>& v, int i) {
      return v[static_cast<std::size_t>(i % kSets)].view();
    };
    const auto unary = [&](const char* name, UnaryOp op) {
      report(name, t, 2 * b,
             [&](int i) { kernels::unary(stream(), op, Dtype::f32, at(out, i), at(a, i)); });
      report(std::string(name) + "_backward", t, 3 * b,
             [&](int i) { kernels::unary_backward(stream(), op, at(out, i), at(c, i), at(a, i)); });
    };
    unary("relu", UnaryOp::relu);
    unary("gelu_tanh", UnaryOp::gelu_tanh);
    unary("exp", UnaryOp::exp);
    report("add", t, 3 * b, [&](int i) {
      kernels::binary(stream(), BinaryOp::add, Dtype::f32, at(out, i), at(a, i), at(c, i));
    });
    report("div_backward_b", t, 4 * b, [&](int i) {
      kernels::binary_backward(stream(), BinaryOp::div, 1, at(out, i), at(c, i), at(a, i),
                               at(a, i + 1));
    });
    report("dropout", t, 2 * b, [&](int i) {
      kernels::dropout(stream(), at(out, i), at(a, i), 0.1, {1, 2});
    });

    const Tensor total = zeros({1, 1}, {.device = kDevice});
    const std::int64_t columns = 1024, rows = n / columns;
    const auto as_rows = [&](View v, std::int64_t width) {
      v.sizes = {n / width, width};
      v.strides = {width, 1};
      return v;
    };
    const View everything = as_rows(a[0].view(), columns);
    const Scratch scratch(kernels::reduce_workspace_bytes(total.view(), everything), kDevice);
    report("sum_all", t, b, [&](int i) {
      kernels::reduce(stream(), ReduceOp::sum, total.view(), as_rows(at(a, i), columns),
                      {scratch.data(), scratch.bytes()});
    });
    const Tensor sums = zeros({1, columns}, {.device = kDevice});
    const Scratch column_scratch(kernels::reduce_workspace_bytes(sums.view(), everything), kDevice);
    report("sum_columns", t, b, [&](int i) {
      kernels::reduce(stream(), ReduceOp::sum, sums.view(), as_rows(at(a, i), columns),
                      {column_scratch.data(), column_scratch.bytes()});
    });

    for (const std::int64_t width : {std::int64_t{1024}, std::int64_t{32768}}) {
      const std::string suffix = "_" + std::to_string(width);
      report("softmax" + suffix, t, 2 * b, [&](int i) {
        kernels::softmax_forward(stream(), false, as_rows(at(out, i), width),
                                 as_rows(at(a, i), width));
      });
      report("softmax_backward" + suffix, t, 3 * b, [&](int i) {
        kernels::softmax_backward(stream(), false, as_rows(at(out, i), width),
                                  as_rows(at(a, i), width), as_rows(at(c, i), width));
      });
    }
    for (const std::int64_t width : {768L, 1024L, 1600L, 4096L}) {
      const std::int64_t count = n / width;
      const double bytes = static_cast<double>(size_of(t)) * static_cast<double>(count * width);
      const Tensor w = randn({width}, {.device = kDevice}),
                   bias = randn({width}, {.device = kDevice}),
                   mean = empty({count}, {.device = kDevice}),
                   rstd = empty({count}, {.device = kDevice}),
                   dw = empty({width}, {.device = kDevice}),
                   db = empty({width}, {.device = kDevice});
      const Scratch norm_scratch(
          kernels::layer_norm_backward_workspace_bytes(kDevice, count, width), kDevice);
      for (const bool with_residual : {false, true}) {
        const std::string name = with_residual ? "add_layer_norm" : "layer_norm",
                          suffix = "_" + std::to_string(width);
        const double operands = with_residual ? 4 : 2;
        report(name + suffix, t, operands * bytes, [&](int i) {
          kernels::LayerNormForward args{.y = as_rows(at(out, i), width),
                                         .mean = mean.view(),
                                         .rstd = rstd.view(),
                                         .x = as_rows(at(a, i), width),
                                         .weight = w.view(),
                                         .bias = bias.view()};
          if (with_residual) {
            args.residual = as_rows(at(c, i), width);
            args.sum = as_rows(at(out, i + 1), width);
          }
          kernels::layer_norm_forward(stream(), args);
        });
        report(name + "_backward" + suffix, t, (with_residual ? 4 : 3) * bytes, [&](int i) {
          kernels::LayerNormBackward args{.dx = as_rows(at(out, i), width),
                                          .dweight = dw.view(),
                                          .dbias = db.view(),
                                          .dy = as_rows(at(c, i), width),
                                          .x = as_rows(at(a, i), width),
                                          .weight = w.view(),
                                          .mean = mean.view(),
                                          .rstd = rstd.view()};
          if (with_residual) args.dsum = as_rows(at(c, i + 1), width);
          kernels::layer_norm_backward(stream(), args, {norm_scratch.data(), norm_scratch.bytes()});
        });
      }
    }
    (void)rows;
  }
  for (const Dtype t : {Dtype::f32, Dtype::bf16}) {  // bias gradients of a transformer's layers
    const auto run = [&](const char* name, std::int64_t columns, Activation activation) {
      const std::int64_t rows = 32768;
      const auto dy = sets({rows, columns}, t), x = sets({rows, columns}, t);
      const Tensor dz = empty_like(dy[0]), bias = empty({columns}, {.device = kDevice});
      const Scratch scratch(kernels::activation_backward_workspace_bytes(kDevice, rows, columns),
                            kDevice);
      const bool sums_only = activation == Activation::none;
      report(name, t,
             static_cast<double>((sums_only ? 1 : 3) * rows * columns) *
                 static_cast<double>(size_of(t)),
             [&](int i) {
               const auto k = static_cast<std::size_t>(i % kSets);
               kernels::activation_backward(stream(), activation, sums_only ? View() : dz.view(),
                                            bias.view(), 0, dy[k].view(),
                                            sums_only ? View() : x[k].view(),
                                            {scratch.data(), scratch.bytes()});
             });
    };
    run("gelu_tanh_bias_backward_3072", 3072, Activation::gelu_tanh);
    run("bias_backward_2304", 2304, Activation::none);
  }
  {  // cross-entropy over GPT-2's vocabulary
    const std::int64_t rows = 8192, classes = 50304;
    const Tensor logits = randn({rows, classes}, {.dtype = Dtype::bf16, .device = kDevice}),
                 d = empty_like(logits);
    const Tensor target = randint(0, classes, {rows}, {.dtype = Dtype::i64, .device = kDevice}),
                 row_loss = empty({rows}, {.device = kDevice}),
                 lse = empty({rows}, {.device = kDevice}), count = empty({1}, {.device = kDevice}),
                 loss = empty({}, {.device = kDevice}), dy = ones({1}, {.device = kDevice});
    const double b = 2.0 * rows * classes;
    report("cross_entropy_50304", Dtype::bf16, b, [&](int) {
      kernels::cross_entropy_forward(stream(), {.row_loss = row_loss.view(),
                                                .lse = lse.view(),
                                                .count = count.view(),
                                                .loss = loss.view(),
                                                .logits = logits.view(),
                                                .target = target.view(),
                                                .mean = true});
    });
    report("cross_entropy_backward_50304", Dtype::bf16, 2 * b, [&](int) {
      kernels::cross_entropy_backward(stream(), {.dlogits = d.view(),
                                                 .dy = dy.view(),
                                                 .count = count.view(),
                                                 .lse = lse.view(),
                                                 .logits = logits.view(),
                                                 .target = target.view()});
    });
  }
  {  // 124 million parameters in 148 tensors
    std::vector<Tensor> parameters;
    for (int i = 0; i < 148; ++i)
      parameters.push_back(
          randn({i == 0 ? 38597376 : 580000}, {.device = kDevice}).set_requires_grad());
    optim::AdamW opt(parameters);
    double count = 0;
    for (Tensor& p : parameters) {
      p.set_grad(full(p.shape(), 1e-3, {.device = kDevice}));
      count += static_cast<double>(p.numel());
    }
    report("adamw_124m", Dtype::f32, 28 * count, [&](int) { opt.step(); });
  }
}

constexpr double kMatmulWarmMs = 400;

void matmul_kernels() {
  struct S {
    std::int64_t m, n, k;
  };
  for (const Dtype t : {Dtype::f16, Dtype::bf16}) {
    for (const S& s : std::vector<S>{{8192, 8192, 8192},
                                     {32768, 2304, 768},
                                     {32768, 768, 768},
                                     {32768, 3072, 768},
                                     {32768, 768, 3072},
                                     {32768, 50304, 768},
                                     {768, 3072, 32768},
                                     {128, 1024, 784},
                                     {128, 1024, 1024},
                                     {128, 10, 1024}}) {
      const Tensor a = randn({s.m, s.k}, {.dtype = t, .device = kDevice}),
                   b = randn({s.n, s.k}, {.dtype = t, .device = kDevice}),
                   out = empty({s.m, s.n}, {.dtype = t, .device = kDevice});
      const Scratch scratch(kernels::matmul_workspace_bytes(kDevice), kDevice);
      const Tensor bt = b.t();
      const double ms = median_ms(
          [&](int) {
            kernels::matmul(stream(), {.out = out.view(), .a = a.view(), .b = bt.view()},
                            {scratch.data(), scratch.bytes()});
          },
          kMatmulWarmMs);
      std::printf(
          "{\"bench\": \"matmul\", \"engine\": \"mixtape\", \"dtype\": \"%s\", \"m\": %lld, \"n\": "
          "%lld, \"k\": %lld, \"ms\": %.5f, \"tflops\": %.1f}\n",
          std::string(name_of(t)).c_str(), static_cast<long long>(s.m), static_cast<long long>(s.n),
          static_cast<long long>(s.k), ms,
          2e-9 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) /
              ms);
      std::fflush(stdout);
    }
  }
}

/// Causal self-attention over one packed projection, forward and backward, of both backends.
void attention_kernels() {
  struct S {
    std::int64_t b, h, t, d;
    Dtype dtype;
    kernels::AttentionBackend backend;
  };
  constexpr auto kAuto = kernels::AttentionBackend::automatic;
  constexpr auto kOwn = kernels::AttentionBackend::own;
  for (const S& s : std::vector<S>{{32, 12, 1024, 64, Dtype::bf16, kAuto},
                                   {4, 12, 1024, 64, Dtype::bf16, kAuto},
                                   {16, 25, 1024, 64, Dtype::bf16, kAuto},
                                   {32, 12, 1024, 64, Dtype::f16, kAuto},
                                   {4, 12, 1024, 64, Dtype::bf16, kOwn},
                                   {4, 12, 1024, 64, Dtype::f32, kOwn}}) {
    kernels::set_attention_backend(s.backend);
    const Shape packed = {s.b, s.t, 3 * s.h * s.d}, plain = {s.b, s.t, s.h * s.d};
    const TensorOptions options{.dtype = s.dtype, .device = kDevice};
    const Tensor qkv = randn(packed, options), d = empty(packed, options),
                 out = empty(plain, options), dout = randn(plain, options),
                 lse = empty({s.b, s.h, s.t}, {.device = kDevice});
    const auto heads = [&](const Tensor& t, std::int64_t part) {
      View v = t.view();
      v.data = static_cast<char*>(v.data) +
               part * s.h * s.d * static_cast<std::int64_t>(size_of(s.dtype));
      v.strides = {v.stride(0), s.d, v.stride(1), 1};
      v.sizes = {s.b, s.h, s.t, s.d};
      return v;
    };
    const kernels::AttentionArgs args{
        .q = heads(qkv, 0), .k = heads(qkv, 1), .v = heads(qkv, 2), .causal = true, .scale = 0.125};
    const kernels::AttentionForward forward{.out = heads(out, 0), .lse = lse.view(), .args = args};
    const kernels::AttentionBackward backward{.dq = heads(d, 0),
                                              .dk = heads(d, 1),
                                              .dv = heads(d, 2),
                                              .dout = heads(dout, 0),
                                              .out = heads(out, 0),
                                              .lse = lse.view(),
                                              .args = args};
    const Scratch f(kernels::attention_forward_workspace_bytes(stream(), forward), kDevice),
        b(kernels::attention_backward_workspace_bytes(stream(), backward), kDevice);
    const double forward_ms = median_ms([&](int) {
      kernels::attention_forward(stream(), forward, {f.data(), f.bytes()});
    });
    const double backward_ms = median_ms([&](int) {
      kernels::attention_backward(stream(), backward, {b.data(), b.bytes()});
    });
    // Half of the T x T products are needed; forward has two of them, backward five.
    const double product = static_cast<double>(s.b * s.h * s.t * s.t * s.d);
    std::printf(
        "{\"bench\": \"attention\", \"forward\": \"%s\", \"backward\": \"%s\", \"dtype\": \"%s\", "
        "\"b\": %lld, \"h\": "
        "%lld, \"t\": %lld, \"d\": %lld, \"forward_ms\": %.4f, \"backward_ms\": %.4f, "
        "\"forward_tflops\": %.1f, \"backward_tflops\": %.1f}\n",
        kernels::attention_choice(forward).c_str(), kernels::attention_choice(backward).c_str(),
        std::string(name_of(s.dtype)).c_str(), static_cast<long long>(s.b),
        static_cast<long long>(s.h), static_cast<long long>(s.t), static_cast<long long>(s.d),
        forward_ms, backward_ms, 2e-9 * product / forward_ms, 5e-9 * product / backward_ms);
    std::fflush(stdout);
  }
  kernels::set_attention_backend(kAuto);
}

}  // namespace
}  // namespace mixtape

int main(int argc, char** argv) {
  if (mixtape::cuda_device_count() == 0)
    return std::fprintf(stderr, "kernel_benchmark: needs a CUDA device\n"), 1;
  const mixtape::NoGrad no_grad;
  const std::string only = argc > 1 ? argv[1] : "";
  const auto wanted = [&](const char* part) { return only.empty() || only == part; };
  if (wanted("memory")) mixtape::memory_kernels();
  if (wanted("matmul")) mixtape::matmul_kernels();
  if (wanted("attention")) mixtape::attention_kernels();
  return 0;
}
