// The activations that matmul and convolution fuse into their stores, on rows of SIMD registers.
#pragma once

#include "kernels/cpu/row.h"
#include "kernels/matmul.h"

namespace mixtape::kernels::cpu {

/// Identity, for Activation::none.
struct Identity {
  template <class T>
  static T value(T x) {
    return x;
  }
  template <class T>
  static T derivative(T dy, T) {
    return dy;
  }
};

/// Calls f(functor) with the formulas of `activation` (kernels/elementwise_functors.h).
template <class F>
decltype(auto) dispatch_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::none: return f(Identity{});
    case Activation::relu: return f(functors::Relu{});
    case Activation::gelu_tanh: return f(functors::GeluTanh{});
    case Activation::gelu: return f(functors::Gelu{});
    case Activation::silu: return f(functors::Silu{});
  }
  MT_THROW("activation: invalid value ", static_cast<int>(activation));
}

}  // namespace mixtape::kernels::cpu
