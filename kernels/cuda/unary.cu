#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/elementwise_formulas.cuh"

namespace mixtape::kernels::cuda {

void unary(const Stream& stream, UnaryOp op, Dtype compute, View out, View x) {
  const Operand in[1] = {x};
  switch (op) {
#define MT_UNARY(function, Functor) \
  case UnaryOp::function:           \
    return elementwise(stream, #function, compute, UnaryForward<functors::Functor>{}, out, in);
#include "kernels/elementwise.def"
  }
  MT_THROW("unary: invalid op ", static_cast<int>(op));
}

}  // namespace mixtape::kernels::cuda
