// Comparisons: the output is b8, so no operand set shares one dtype and the per-dtype contiguous
// kernels are not compiled; the rows kernel takes the dense cases.
#include "kernels/cuda/binary.h"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/elementwise_formulas.cuh"

namespace mixtape::kernels::cuda {

namespace {

template <class Functor>
void run(const Stream& stream, const char* name, Dtype compute, const View& out, const Operand& a,
         const Operand& b) {
  if constexpr (Functor::kComparison) {
    const Operand in[2] = {a, b};
    elementwise<false>(stream, name, compute, BinaryForward<Functor>{}, out, in);
  } else {
    MT_THROW("comparison: expected a comparison, got ", name);
  }
}

}  // namespace

void comparison(const Stream& stream, BinaryOp op, Dtype compute, const View& out, const Operand& a,
                const Operand& b) {
  switch (op) {
#define MT_BINARY(function, Functor) \
  case BinaryOp::function:           \
    return run<functors::Functor>(stream, #function, compute, out, a, b);
#include "kernels/elementwise.def"
  }
}

}  // namespace mixtape::kernels::cuda
