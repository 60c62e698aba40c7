// Loops over one row in SIMD registers, for the kernels that reduce rows (norm, softmax, loss).
//
// Written once for both arithmetic types: RowPacket<float> is the Packet, RowPacket<double> one
// double. A row's tail comes as a partly filled register. Sums run in four registers over blocks of
// kSumBlock elements and the blocks are added in double, so that the error of a sum does not
// grow with the row: at most kSumBlock / (4 * lanes) + 8 float roundings, and the order depends on
// the length alone.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/packet.h"
// After packet.h, which it uses for T = Packet.
#include "kernels/elementwise_functors.h"

namespace mixtape::kernels::cpu {

template <class C>
struct RowPacket;

template <>
struct RowPacket<float> {
  using V = Packet;
  static constexpr int kLanes = Packet::kLanes;
  static V splat(float x) { return Packet::splat(x); }
  static V load(const float* p) { return Packet::load(p); }
  static V load(const float* p, int count, float fill) {
    if (count == kLanes) return Packet::load(p);
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
    return Packet::load(lanes);
  }
  static void store(float* p, V v, int count) {
    if (count == kLanes) return v.store(p);
    for (int i = 0; i < count; ++i) p[i] = v.v[i];
  }
  static double sum(V v) {
    double total = 0;
    for (int i = 0; i < kLanes; ++i) total += static_cast<double>(v.v[i]);
    return total;
  }
  static float max(V v) {
    float m = v.v[0];
    for (int i = 1; i < kLanes; ++i) m = math::maximum(m, v.v[i]);
    return m;
  }
};

template <>
struct RowPacket<double> {
  using V = double;
  static constexpr int kLanes = 1;
  static V splat(double x) { return x; }
  static V load(const double* p) { return *p; }
  static V load(const double* p, int, double) { return *p; }
  static void store(double* p, V v, int) { *p = v; }
  static double sum(V v) { return v; }
  static double max(V v) { return v; }
};

/// Calls f(i, count, slot) for the registers of [begin, end): count elements starting at i, slot a
/// constant 0..3 that says which of four accumulators to use.
template <class C, class F>
inline void for_each_packet(std::int64_t begin, std::int64_t end, F&& f) {
  constexpr int kLanes = RowPacket<C>::kLanes;
  std::int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    f(i, kLanes, std::integral_constant<int, 0>{});
    f(i + kLanes, kLanes, std::integral_constant<int, 1>{});
    f(i + 2 * kLanes, kLanes, std::integral_constant<int, 2>{});
    f(i + 3 * kLanes, kLanes, std::integral_constant<int, 3>{});
  }
  for (; i + kLanes <= end; i += kLanes) f(i, kLanes, std::integral_constant<int, 0>{});
  if (i < end) f(i, static_cast<int>(end - i), std::integral_constant<int, 0>{});
}

inline constexpr std::int64_t kSumBlock = 4096;

/// K sums over [0, n): f(i, count) gives the K registers to add for elements i .. i + count; lanes
/// past count must be 0 in them.
template <class C, int K, class F>
inline std::array<double, K> row_sums(std::int64_t n, F&& f) {
  using P = RowPacket<C>;
  std::array<double, K> total{};
  for (std::int64_t block = 0; block < n; block += kSumBlock) {
    typename P::V lanes[K][4];
    for (auto& sum : lanes)
      for (auto& lane : sum) lane = P::splat(0);
    for_each_packet<C>(block, std::min(n, block + kSumBlock), [&](auto i, int count, auto slot) {
      const std::array<typename P::V, K> terms = f(i, count);
      for (int k = 0; k < K; ++k) lanes[k][slot] = lanes[k][slot] + terms[k];
    });
    for (int k = 0; k < K; ++k)
      total[k] += P::sum((lanes[k][0] + lanes[k][1]) + (lanes[k][2] + lanes[k][3]));
  }
  return total;
}

/// Largest element; NaN if there is one, -inf for n = 0.
template <class C>
inline C row_max(const C* x, std::int64_t n) {
  using P = RowPacket<C>;
  constexpr C kLowest = -std::numeric_limits<C>::infinity();
  typename P::V lanes[4] = {P::splat(kLowest), P::splat(kLowest), P::splat(kLowest),
                            P::splat(kLowest)};
  for_each_packet<C>(0, n, [&](auto i, int count, auto slot) {
    lanes[slot] = math::maximum(lanes[slot], P::load(x + i, count, kLowest));
  });
  return P::max(
      math::maximum(math::maximum(lanes[0], lanes[1]), math::maximum(lanes[2], lanes[3])));
}

/// Sum of exp(x[i] - shift); with `out` the terms are stored there.
template <class C>
inline double row_exp_sum(const C* x, std::int64_t n, C shift, C* out) {
  using P = RowPacket<C>;
  constexpr C kLowest = -std::numeric_limits<C>::infinity();
  const auto offset = P::splat(shift);
  return row_sums<C, 1>(n, [&](std::int64_t i, int count) {
    const auto e = math::exp(P::load(x + i, count, kLowest) - offset);
    if (out != nullptr) P::store(out + i, e, count);
    return std::array{e};
  })[0];
}

/// Rows worth one thread, for parallel_for's grain.
inline std::int64_t row_grain(std::int64_t columns) {
  constexpr std::int64_t kElements = 16384;
  return std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, columns));
}

}  // namespace mixtape::kernels::cpu
