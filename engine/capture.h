// Whole-step CUDA graphs: the device work of a training step is recorded once and then replayed by
// one launch, which takes the host out of launch-bound steps.
//
//   auto step = mt::capture([&](mt::Inputs in) -> std::vector<mt::Tensor> {
//     mt::Tensor loss;
//     { mt::Autocast amp(mt::Dtype::bf16);  loss = mt::cross_entropy(net(in[0]), in[1]); }
//     loss.backward();  opt.step();  opt.zero_grad();
//     return {loss};
//   });
//   for (auto& [x, y] : loader) { schedule.step();  mt::Tensor loss = step({x, y})[0]; }
//
// Each call is one step, whether it runs eagerly (the first ones), is recorded, or is replayed.
// Inputs are copied to fixed memory and outputs lie in fixed memory that the next call overwrites:
// clone() what must last. Learning rates, loss scale, step counts and random offsets are read at
// each replay. On the CPU every call runs the step itself.
//
// Outside the step: whatever changes on the host from step to step (schedules, train() and eval(),
// data loading), and whatever waits for the device (item(), printing, copies to the host); the
// latter throw, naming the op, while the step is recorded. The optimizer and the GradScaler that
// the step uses must outlive its replays.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "engine/function.h"
#include "engine/op.h"

namespace mixtape {

using StepFunction = Function<std::vector<Tensor>(Inputs)>;

struct CaptureOptions {
  Device device = Device::best();
  /// Calls that run eagerly for each new set of input shapes, at least 1: they choose algorithms
  /// and make what later steps reuse (gradients, optimizer tables, 16-bit weight copies).
  int warmup = 3;
};

/// A step and its graphs, one for each set of input shapes, dtypes, grad and autocast modes.
class CapturedStep {
 public:
  explicit CapturedStep(StepFunction step, CaptureOptions options = {});
  ~CapturedStep();
  CapturedStep(CapturedStep&&) noexcept;
  CapturedStep& operator=(CapturedStep&&) noexcept;

  /// One step. Inputs are on the device of the options. Throws when the step cannot be captured,
  /// naming what blocks it, and when a parameter or gradient that a graph addresses has moved.
  std::vector<Tensor> operator()(Inputs inputs);
  std::vector<Tensor> operator()(std::initializer_list<Tensor> inputs) {
    return (*this)(Inputs(inputs.begin(), inputs.size()));
  }

  /// Graphs recorded so far; 0 on the CPU.
  int graphs() const;
  /// Kernels, copies and fills in all of them.
  std::size_t nodes() const;
  /// Forgets all graphs and gives their memory back; the next calls warm up again.
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

inline CapturedStep capture(StepFunction step, CaptureOptions options = {}) {
  return CapturedStep(std::move(step), options);
}

}  // namespace mixtape
