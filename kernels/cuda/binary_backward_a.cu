#include "kernels/cuda/binary_backward.cuh"

namespace mixtape::kernels::cuda {

void binary_backward_a(const Stream& stream, BinaryOp op, Dtype compute, const View& dx,
                       const View& dy, const Operand& a, const Operand& b) {
  binary_backward_of<0>(stream, op, compute, dx, dy, a, b);
}

}  // namespace mixtape::kernels::cuda
