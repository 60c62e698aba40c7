// Host overhead of the tape on the CPU: a recorded scalar op, its backward, a view, an unrecorded
// op, and a recorded one while a profile is taken.
#include <benchmark/benchmark.h>

#include "engine/grad_mode.h"
#include "engine/profiler.h"
#include "ops/ops.h"

namespace mixtape {
namespace {

void recorded_scalar_op(benchmark::State& state) {
  const Tensor x = scalar_tensor(1.0).set_requires_grad(), y = scalar_tensor(2.0);
  for (auto _ : state) benchmark::DoNotOptimize(x * y);
}
BENCHMARK(recorded_scalar_op);

// Collecting and sorting a profile of each 1000 ops is part of it.
void profiled_scalar_op(benchmark::State& state) {
  const Tensor x = scalar_tensor(1.0).set_requires_grad(), y = scalar_tensor(2.0);
  Profiler profiler({.schedule = {.active = 1}, .cuda = false});
  int ops = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(x * y);
    if (++ops % 1000 == 0) profiler.step();
  }
}
BENCHMARK(profiled_scalar_op);

void unrecorded_scalar_op(benchmark::State& state) {
  const NoGrad no_grad;
  const Tensor x = scalar_tensor(1.0), y = scalar_tensor(2.0);
  for (auto _ : state) benchmark::DoNotOptimize(x * y);
}
BENCHMARK(unrecorded_scalar_op);

void recorded_view(benchmark::State& state) {
  const Tensor x = randn({4, 4}).set_requires_grad();
  for (auto _ : state) benchmark::DoNotOptimize(x.transpose(0, 1));
}
BENCHMARK(recorded_view);

void forward_and_backward_of_100_scalar_ops(benchmark::State& state) {
  Tensor x = scalar_tensor(1.0).set_requires_grad();
  for (auto _ : state) {
    Tensor y = x;
    for (int i = 0; i < 100; ++i) y = y * 1.01;
    y.backward();
  }
}
BENCHMARK(forward_and_backward_of_100_scalar_ops);

}  // namespace
}  // namespace mixtape
