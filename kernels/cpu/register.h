// SIMD registers of any compute type, and the operations that reductions take elements in with,
// which work on registers and on single numbers alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cpu/packet.h"

namespace mixtape::kernels::cpu {

/// A register of C, as wide as the float Packet.
template <class C>
struct Register {
  static constexpr std::int64_t kLanes = Packet::kLanes * 4 / static_cast<std::int64_t>(sizeof(C));
  typedef C Lanes __attribute__((vector_size(Packet::kLanes * 4)));
  static Lanes load(const C* p) {
    Lanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
};

// Each takes in x: on registers and on single numbers alike.
struct Sum {
  template <class V>
  static V take(V a, V x) {
    return a + x;
  }
  template <class C>
  static constexpr C identity() {
    return C{0};
  }
};
struct Max {  // NaN wins
  template <class V>
  static V take(V a, V x) {
    const V larger = a >= x ? a : x;
    return a != a ? a : larger;
  }
  template <class C>
  static constexpr C identity() {
    using Limits = std::numeric_limits<C>;
    return Limits::has_infinity ? -Limits::infinity() : Limits::min();
  }
};
struct Min {
  template <class V>
  static V take(V a, V x) {
    const V smaller = a <= x ? a : x;
    return a != a ? a : smaller;
  }
  template <class C>
  static constexpr C identity() {
    using Limits = std::numeric_limits<C>;
    return Limits::has_infinity ? Limits::infinity() : Limits::max();
  }
};
struct Any {
  template <class V>
  static V take(V a, V x) {
    return x != V{} ? V{} + 1 : a;
  }
  template <class C>
  static constexpr C identity() {
    return C{0};
  }
};
struct All {
  template <class V>
  static V take(V a, V x) {
    return x != V{} ? a : V{};
  }
  template <class C>
  static constexpr C identity() {
    return C{1};
  }
};

}  // namespace mixtape::kernels::cpu
