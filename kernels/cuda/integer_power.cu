// Squares, cubes and fourth powers, which is what pow is mostly used for: a few multiplications
// instead of a logarithm and an exponential.
#include "kernels/cuda/binary.h"
#include "kernels/cuda/elementwise.cuh"

namespace mixtape::kernels::cuda {

namespace {

template <class C>
__device__ __forceinline__ C integer_power(C x, int n) {
  const C square = x * x;
  switch (n) {
    case 1: return x;
    case 2: return square;
    case 3: return square * x;
    default: return square * square;
  }
}

struct IntegerPower {  // x^n
  static constexpr int kInputs = 1;
  static constexpr bool kIntegral = false;
  int n;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[1]) const {
    return integer_power(x[0], n);
  }
};

struct IntegerPowerBackward {  // (dy, x) -> dy n x^(n-1)
  static constexpr int kInputs = 2;
  static constexpr bool kIntegral = false;
  int n;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[2]) const {
    return x[0] * static_cast<C>(n) * integer_power(x[1], n - 1);
  }
};

}  // namespace

int small_exponent(const Operand& b) {
  if (b.view) return 0;
  const double v = b.scalar.to<double>();
  return v == 2 || v == 3 || v == 4 ? static_cast<int>(v) : 0;
}

void integer_power(const Stream& stream, Dtype compute, const View& out, const View& x, int n) {
  const Operand in[1] = {x};
  elementwise(stream, "pow", compute, IntegerPower{n}, out, in);
}

void integer_power_backward(const Stream& stream, Dtype compute, const View& dx, const View& dy,
                            const View& x, int n) {
  const Operand in[2] = {dy, x};
  elementwise(stream, "pow_backward", compute, IntegerPowerBackward{n}, dx, in);
}

}  // namespace mixtape::kernels::cuda
