// The derivative of every binary op for one input; each input is compiled in a file of its own.
#pragma once

#include "kernels/cuda/binary.h"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/elementwise_formulas.cuh"

namespace mixtape::kernels::cuda {

template <class Functor, int kInput>
void run_backward(const Stream& stream, const char* name, Dtype compute, const View& dx,
                  const View& dy, const Operand& a, const Operand& b) {
  if constexpr (Functor::kComparison) {
    MT_THROW(name, ": a comparison has no derivative");
  } else {
    // What the functor does not read is not loaded either.
    constexpr unsigned kNeeds = Functor::kNeeds >> (2 * kInput);
    const Operand none(Scalar(0.0));
    const Operand in[3] = {dy, (kNeeds & 1) != 0 ? a : none, (kNeeds & 2) != 0 ? b : none};
    elementwise(stream, name, compute, BinaryBackward<Functor, kInput>{}, dx, in);
  }
}

template <int kInput>
void binary_backward_of(const Stream& stream, BinaryOp op, Dtype compute, const View& dx,
                        const View& dy, const Operand& a, const Operand& b) {
  switch (op) {
#define MT_BINARY(function, Functor)                                                               \
  case BinaryOp::function:                                                                         \
    return run_backward<functors::Functor, kInput>(stream, #function "_backward", compute, dx, dy, \
                                                   a, b);
#include "kernels/elementwise.def"
  }
}

}  // namespace mixtape::kernels::cuda
