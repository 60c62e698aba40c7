#include "kernels/cuda/binary.h"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/elementwise_formulas.cuh"

namespace mixtape::kernels::cuda {

namespace {

template <class Functor>
void run(const Stream& stream, const char* name, BinaryOp op, Dtype compute, const View& out,
         const Operand& a, const Operand& b) {
  if constexpr (Functor::kComparison) {
    comparison(stream, op, compute, out, a, b);
  } else {
    const Operand in[2] = {a, b};
    elementwise(stream, name, compute, BinaryForward<Functor>{}, out, in);
  }
}

}  // namespace

void binary(const Stream& stream, BinaryOp op, Dtype compute, View out, const Operand& a,
            const Operand& b) {
  if (op == BinaryOp::pow && compute != Dtype::i64 && a.view)
    if (const int n = small_exponent(b)) return integer_power(stream, compute, out, a.view, n);
  switch (op) {
#define MT_BINARY(function, Functor) \
  case BinaryOp::function:           \
    return run<functors::Functor>(stream, #function, op, compute, out, a, b);
#include "kernels/elementwise.def"
  }
  MT_THROW("binary: invalid op ", static_cast<int>(op));
}

void binary_backward(const Stream& stream, BinaryOp op, int input, View dx, View dy,
                     const Operand& a, const Operand& b) {
  bool wide = dx.dtype == Dtype::f64 || dy.dtype == Dtype::f64;
  for (const Operand* x : {&a, &b}) wide = wide || (x->view && x->view.dtype == Dtype::f64);
  const Dtype compute = wide ? Dtype::f64 : Dtype::f32;
  if (op == BinaryOp::pow && input == 0 && a.view)
    if (const int n = small_exponent(b))
      return integer_power_backward(stream, compute, dx, dy, a.view, n);
  const auto half = input == 0 ? binary_backward_a : binary_backward_b;
  half(stream, op, compute, dx, dy, a, b);
}

}  // namespace mixtape::kernels::cuda
