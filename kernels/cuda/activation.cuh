// The activations of matmul.h on the device, by the formulas of elementwise_functors.h, and their
// dispatch to kernel templates.
#pragma once

#include "kernels/cuda/approx.cuh"  // before elementwise_functors.h: one of its types T
#include "kernels/elementwise_functors.h"
#include "kernels/matmul.h"

namespace mixtape::kernels::cuda {

/// A formula computed in Approx, for results that are rounded to 16 bits: with the library's
/// functions the kernels would be bound by arithmetic.
template <class Functor>
struct InApprox {
  __device__ static float value(float x) { return Functor::value(Approx(x)).v; }
  __device__ static float derivative(float dy, float saved) {
    return Functor::derivative(Approx(dy), Approx(saved)).v;
  }
};

struct Identity {
  template <class C>
  __device__ static C value(C z) {
    return z;
  }
  template <class C>
  __device__ static C derivative(C dy, C) {
    return dy;
  }
};

template <Activation kActivation>
struct ExactActivation;
template <>
struct ExactActivation<Activation::none> {
  using Functor = Identity;
};
template <>
struct ExactActivation<Activation::relu> {
  using Functor = functors::Relu;
};
template <>
struct ExactActivation<Activation::gelu_tanh> {
  using Functor = functors::GeluTanh;
};
template <>
struct ExactActivation<Activation::gelu> {
  using Functor = functors::Gelu;
};
template <>
struct ExactActivation<Activation::silu> {
  using Functor = functors::Silu;
};

/// The functor of an activation for results of storage type T.
template <Activation kActivation, class T,
          class Exact = typename ExactActivation<kActivation>::Functor>
using ActivationFunctor = std::conditional_t<sizeof(T) == 2 && kActivation != Activation::none &&
                                                 kActivation != Activation::relu,
                                             InApprox<Exact>, Exact>;

template <Activation kActivation>
struct ActivationTag {
  static constexpr Activation value = kActivation;
};

/// Calls f(ActivationTag<...>{}) for a run-time activation.
template <class F>
void dispatch_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::none: return f(ActivationTag<Activation::none>{});
    case Activation::relu: return f(ActivationTag<Activation::relu>{});
    case Activation::gelu_tanh: return f(ActivationTag<Activation::gelu_tanh>{});
    case Activation::gelu: return f(ActivationTag<Activation::gelu>{});
    case Activation::silu: return f(ActivationTag<Activation::silu>{});
  }
}

}  // namespace mixtape::kernels::cuda
