// The activations of matmul.h on the device, by the formulas of elementwise_functors.h, and their
// dispatch to kernel templates.
#pragma once

#include "kernels/elementwise_functors.h"
#include "kernels/matmul.h"

namespace mixtape::kernels::cuda {

/// 1 / (1 + exp(-x)) by the special-function unit: relative error about 2^-20, so only for results
/// that are rounded to 16 bits. The library exp and division would make these kernels
/// compute-bound.
__device__ inline float sigmoid_16bit(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

/// GELU's tanh form for 16-bit results, as x * sigmoid(2 u): 0.5 (1 + tanh u) = sigmoid(2 u).
struct GeluTanh16 {
  static constexpr float kScale = 1.59576912160573071f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
  __device__ static float value(float x) {
    return x * sigmoid_16bit(kScale * x * (1.0f + kCubic * x * x));
  }
  __device__ static float derivative(float dy, float x) {
    const float s = sigmoid_16bit(kScale * x * (1.0f + kCubic * x * x));
    return dy * s * (1.0f + x * (1.0f - s) * kScale * (1.0f + 3 * kCubic * x * x));
  }
};
struct Silu16 {
  __device__ static float value(float x) { return x * sigmoid_16bit(x); }
  __device__ static float derivative(float dy, float x) {
    const float s = sigmoid_16bit(x);
    return dy * s * (1.0f + x * (1.0f - s));
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

/// The functor of an activation for results of storage type T.
template <Activation kActivation, class T>
using ActivationFunctor = std::conditional_t<
    kActivation == Activation::none, Identity,
    std::conditional_t<
        kActivation == Activation::relu, functors::Relu,
        std::conditional_t<
            kActivation == Activation::gelu, functors::Gelu,
            std::conditional_t<kActivation == Activation::gelu_tanh,
                               std::conditional_t<sizeof(T) == 2, GeluTanh16, functors::GeluTanh>,
                               std::conditional_t<sizeof(T) == 2, Silu16, functors::Silu>>>>>;

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
