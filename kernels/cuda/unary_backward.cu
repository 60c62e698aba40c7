#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/elementwise_formulas.cuh"

namespace mixtape::kernels::cuda {

void unary_backward(const Stream& stream, UnaryOp op, View dx, View dy, View saved) {
  const bool wide =
      dx.dtype == Dtype::f64 || dy.dtype == Dtype::f64 || (saved && saved.dtype == Dtype::f64);
  const Dtype compute = wide ? Dtype::f64 : Dtype::f32;
  const Operand in[2] = {dy, saved};
  switch (op) {
#define MT_UNARY(function, Functor)                                                                \
  case UnaryOp::function:                                                                          \
    return elementwise(stream, #function "_backward", compute, UnaryBackward<functors::Functor>{}, \
                       dx, in);
#include "kernels/elementwise.def"
  }
  MT_THROW("unary_backward: invalid op ", static_cast<int>(op));
}

}  // namespace mixtape::kernels::cuda
