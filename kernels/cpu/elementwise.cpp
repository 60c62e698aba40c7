// Unary, binary and selecting elementwise kernels on the CPU, and their derivatives: one block
// function per functor and compute type, run by the loop of elementwise_loop.h.
#include "kernels/elementwise.h"

#include <array>

#include "kernels/cpu/elementwise_loop.h"
#include "kernels/cpu/packet.h"
#include "kernels/elementwise_functors.h"

namespace mixtape::kernels::cpu {

namespace {

// Elements that are worth a thread, for formulas with exp, log and the like.
constexpr std::int64_t kHeavyGrain = kParallelGrain / 4;

template <class F>
struct UnaryValue {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void*) {
    map_block<C, 1>(in, out, n, [](auto x) { return F::value(x); });
  }
};
template <class F>
struct UnaryDerivative {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void*) {
    map_block<C, 2>(in, out, n, [](auto dy, auto saved) { return F::derivative(dy, saved); });
  }
};
template <class F>
struct BinaryValue {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void*) {
    map_block<C, 2>(in, out, n, [](auto a, auto b) { return F::value(a, b); });
  }
};
template <class F>
struct BinaryDerivativeA {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void*) {
    map_block<C, 3>(in, out, n, [](auto dy, auto a, auto b) { return F::derivative_a(dy, a, b); });
  }
};
template <class F>
struct BinaryDerivativeB {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void*) {
    map_block<C, 3>(in, out, n, [](auto dy, auto a, auto b) { return F::derivative_b(dy, a, b); });
  }
};
struct Where {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void*) {
    map_block<C, 3>(in, out, n, [](auto condition, auto a, auto b) {
      return math::select(math::ne(condition, math::constant(condition, 0.0)), a, b);
    });
  }
};
template <class C>
auto splat_for(C value) {
  if constexpr (std::is_same_v<C, float>)
    return Packet::splat(value);
  else
    return value;
}
/// params: {lo, hi} in the compute type.
struct Clamp {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void* params) {
    const C* bounds = static_cast<const C*>(params);
    const auto lo = splat_for(bounds[0]), hi = splat_for(bounds[1]);
    map_block<C, 1>(in, out, n, [=](auto x) { return math::minimum(math::maximum(x, lo), hi); });
  }
};
struct ClampDerivative {
  template <class C>
  static void block(const void* const* in, void* out, std::int64_t n, const void* params) {
    const C* bounds = static_cast<const C*>(params);
    const auto lo = splat_for(bounds[0]), hi = splat_for(bounds[1]);
    map_block<C, 2>(in, out, n, [=](auto dy, auto x) {
      const auto zero = math::constant(x, 0.0);
      return math::select(math::ge(x, lo), math::select(math::le(x, hi), dy, zero), zero);
    });
  }
};

/// Block::block for `compute`; i64 only where the formula exists for integers.
template <class Block, bool kIntegral>
BlockFunction block_for(const char* kernel, const char* op, Dtype compute) {
  if (compute == Dtype::f32) return Block::template block<float>;
  if (compute == Dtype::f64) return Block::template block<double>;
  if constexpr (kIntegral)
    if (compute == Dtype::i64) return Block::template block<std::int64_t>;
  MT_THROW(kernel, ": ", op, " cannot be computed in ", name_of(compute));
}

/// Arithmetic type of a derivative: f64 if dx or anything it is made of is.
Dtype derivative_dtype(std::initializer_list<View> views) {
  for (const View& v : views)
    if (v && v.dtype == Dtype::f64) return Dtype::f64;
  return Dtype::f32;
}

BlockFunction unary_block(UnaryOp op, Dtype compute) {
  switch (op) {
#define MT_UNARY(function, Functor)                                                \
  case UnaryOp::function:                                                          \
    return block_for<UnaryValue<functors::Functor>, functors::Functor::kIntegral>( \
        "unary", #function, compute);
#include "kernels/elementwise.def"
  }
  MT_THROW("unary: invalid op ", static_cast<int>(op));
}

BlockFunction unary_derivative_block(UnaryOp op, Dtype compute) {
  switch (op) {
#define MT_UNARY(function, Functor)                                                          \
  case UnaryOp::function:                                                                    \
    return block_for<UnaryDerivative<functors::Functor>, false>("unary_backward", #function, \
                                                                compute);
#include "kernels/elementwise.def"
  }
  MT_THROW("unary_backward: invalid op ", static_cast<int>(op));
}

BlockFunction binary_block(BinaryOp op, Dtype compute) {
  switch (op) {
#define MT_BINARY(function, Functor)                                                \
  case BinaryOp::function:                                                          \
    return block_for<BinaryValue<functors::Functor>, functors::Functor::kIntegral>( \
        "binary", #function, compute);
#include "kernels/elementwise.def"
  }
  MT_THROW("binary: invalid op ", static_cast<int>(op));
}

template <class F>
BlockFunction binary_derivative_block(const char* name, int input, Dtype compute) {
  if constexpr (F::kComparison)
    MT_THROW("binary_backward: ", name, " has no derivative");
  else if (input == 0)
    return block_for<BinaryDerivativeA<F>, false>("binary_backward", name, compute);
  else
    return block_for<BinaryDerivativeB<F>, false>("binary_backward", name, compute);
}

bool is_heavy(UnaryOp op) {
  return op != UnaryOp::neg && op != UnaryOp::abs && op != UnaryOp::relu && op != UnaryOp::sqrt;
}
std::int64_t grain_of(UnaryOp op) { return is_heavy(op) ? kHeavyGrain : kParallelGrain; }
std::int64_t grain_of(BinaryOp op) {
  return op == BinaryOp::pow ? kHeavyGrain / 4 : kParallelGrain;
}

/// The bounds {lo, hi} in the compute type, for Clamp and ClampDerivative.
struct Bounds {
  alignas(16) unsigned char values[16];
  Bounds(const Scalar& lo, const Scalar& hi, Dtype compute) {
    store_scalar(lo, compute, values);
    store_scalar(hi, compute, values + size_of(compute));
  }
};

}  // namespace

void unary(const Stream&, UnaryOp op, Dtype compute, View out, View x) {
  const Operand inputs[] = {x};
  elementwise("unary", unary_block(op, compute), nullptr, compute, out, inputs, grain_of(op));
}

void unary_backward(const Stream&, UnaryOp op, View dx, View dy, View saved) {
  const Dtype compute = derivative_dtype({dx, dy, saved});
  const Operand inputs[] = {dy, saved};
  elementwise("unary_backward", unary_derivative_block(op, compute), nullptr, compute, dx, inputs,
              grain_of(op));
}

void binary(const Stream&, BinaryOp op, Dtype compute, View out, const Operand& a,
            const Operand& b) {
  const Operand inputs[] = {a, b};
  elementwise("binary", binary_block(op, compute), nullptr, compute, out, inputs, grain_of(op));
}

void binary_backward(const Stream&, BinaryOp op, int input, View dx, View dy, const Operand& a,
                     const Operand& b) {
  const Dtype compute = derivative_dtype({dx, dy, a.view, b.view});
  const BlockFunction block = [&]() -> BlockFunction {
    switch (op) {
#define MT_BINARY(function, Functor) \
  case BinaryOp::function:           \
    return binary_derivative_block<functors::Functor>(#function, input, compute);
#include "kernels/elementwise.def"
    }
    MT_THROW("binary_backward: invalid op ", static_cast<int>(op));
  }();
  const Operand inputs[] = {dy, a, b};
  elementwise("binary_backward", block, nullptr, compute, dx, inputs, grain_of(op));
}

void where(const Stream&, Dtype compute, View out, View condition, const Operand& a,
           const Operand& b) {
  const Operand inputs[] = {condition, a, b};
  elementwise("where", block_for<Where, true>("where", "where", compute), nullptr, compute, out,
              inputs);
}

void clamp(const Stream&, Dtype compute, View out, View x, Scalar lo, Scalar hi) {
  const Bounds bounds(lo, hi, compute);
  const Operand inputs[] = {x};
  elementwise("clamp", block_for<Clamp, true>("clamp", "clamp", compute), bounds.values, compute,
              out, inputs);
}

void clamp_backward(const Stream&, View dx, View dy, View x, Scalar lo, Scalar hi) {
  const Dtype compute = derivative_dtype({dx, dy, x});
  const Bounds bounds(lo, hi, compute);
  const Operand inputs[] = {dy, x};
  elementwise("clamp_backward",
              block_for<ClampDerivative, false>("clamp_backward", "clamp", compute), bounds.values,
              compute, dx, inputs);
}

}  // namespace mixtape::kernels::cpu
