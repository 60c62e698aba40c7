// The functors of elementwise_functors.h as functions of their loaded operands, for the kernels of
// elementwise.cuh: f(x) with x[0..kInputs) in the arithmetic type C.
#pragma once

#include "kernels/cuda/approx.cuh"  // before elementwise_functors.h: one of its types T
#include "kernels/elementwise_functors.h"

namespace mixtape::kernels::cuda {

/// As Approx for formulas that divide by what the user gave: a / b is 2 ulp for every b and has the
/// special cases of IEEE division, where Approx loses the largest and smallest of bfloat16.
struct ApproxQuotient {
  float v;
  ApproxQuotient() = default;
  __device__ explicit ApproxQuotient(float x) : v(x) {}
};
__device__ __forceinline__ ApproxQuotient operator*(ApproxQuotient a, ApproxQuotient b) {
  return ApproxQuotient(a.v * b.v);
}
__device__ __forceinline__ ApproxQuotient operator-(ApproxQuotient a) {
  return ApproxQuotient(-a.v);
}
__device__ __forceinline__ ApproxQuotient operator/(ApproxQuotient a, ApproxQuotient b) {
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a.v), "f"(b.v));
  return ApproxQuotient(q);
}

/// Formulas whose functions cost more than the memory traffic of 16-bit operands are computed in
/// Approx or ApproxQuotient where every operand is stored in 16 bits.
struct Approximate {
  bool value = false, derivative = false;
};
template <class Functor>
inline constexpr Approximate kApproximate{};
template <>
inline constexpr Approximate kApproximate<functors::Gelu>{true, true};
template <>
inline constexpr Approximate kApproximate<functors::GeluTanh>{true, true};
template <>
inline constexpr Approximate kApproximate<functors::Silu>{true, true};
template <>
inline constexpr Approximate kApproximate<functors::Sigmoid>{true, false};
template <>
inline constexpr Approximate kApproximate<functors::Tanh>{true, false};
template <>
inline constexpr Approximate kApproximate<functors::Log>{true, false};
template <>
inline constexpr Approximate kApproximate<functors::Pow>{true, true};
template <>
inline constexpr Approximate kApproximate<functors::Div>{false, true};

/// The type they are computed in.
template <class Functor>
using ApproxOf = std::conditional_t<std::is_same_v<Functor, functors::Div>, ApproxQuotient, Approx>;

template <class Functor>
struct UnaryForward {
  static constexpr int kInputs = 1;
  static constexpr bool kIntegral = Functor::kIntegral, kApprox = kApproximate<Functor>.value;
  using Short = ApproxOf<Functor>;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[1]) const {
    return Functor::value(x[0]);
  }
};

template <class Functor>
struct UnaryBackward {  // (dy, saved) -> dx
  static constexpr int kInputs = 2;
  static constexpr bool kIntegral = false, kApprox = kApproximate<Functor>.derivative;
  using Short = ApproxOf<Functor>;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[2]) const {
    return Functor::derivative(x[0], x[1]);
  }
};

template <class Functor>
struct BinaryForward {
  static constexpr int kInputs = 2;
  static constexpr bool kIntegral = Functor::kIntegral, kApprox = kApproximate<Functor>.value;
  using Short = ApproxOf<Functor>;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[2]) const {
    return Functor::value(x[0], x[1]);
  }
};

template <class Functor, int kInput>
struct BinaryBackward {  // (dy, a, b) -> da or db
  static constexpr int kInputs = 3;
  static constexpr bool kIntegral = false, kApprox = kApproximate<Functor>.derivative;
  using Short = ApproxOf<Functor>;
  template <class C>
  __device__ __forceinline__ C operator()(const C (&x)[3]) const {
    if constexpr (kInput == 0)
      return Functor::derivative_a(x[0], x[1], x[2]);
    else
      return Functor::derivative_b(x[0], x[1], x[2]);
  }
};

}  // namespace mixtape::kernels::cuda
