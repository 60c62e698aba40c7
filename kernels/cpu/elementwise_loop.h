// The one loop of the CPU's elementwise kernels. A kernel gives a function on short dense runs of
// one compute type; the loop coalesces dimensions, converts and gathers operands into blocks that
// stay in L1 (or passes their memory itself where it is already such a run), and shares blocks
// among threads. So a formula is compiled once per compute type, whatever the dtypes and strides.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cpu/packet.h"
#include "kernels/elementwise.h"

namespace mixtape::kernels::cpu {

/// Inputs a block function can have.
inline constexpr int kMaxInputs = 4;
/// Elements of a block, at most.
inline constexpr std::int64_t kBlockElements = 1024;
/// Elements that are worth waking a second thread for.
inline constexpr std::int64_t kParallelGrain = 32768;

/// out[i] = f(in[0][i], in[1][i], ...), i in [0, n): dense runs of the compute type. out may be one
/// of the inputs.
using BlockFunction = void (*)(const void* const* in, void* out, std::int64_t n,
                               const void* params);

/// Runs `block` over all elements of out. Each input is a number or a view of a shape that
/// broadcasts to out's, of any dtype and strides. compute is f32, f64 or i64. `grain` is the number
/// of elements that are worth a thread. Throws "<kernel>: ..." if a shape does not broadcast.
void elementwise(const char* kernel, BlockFunction block, const void* params, Dtype compute,
                 const View& out, std::span<const Operand> inputs,
                 std::int64_t grain = kParallelGrain);

/// Stores `value` as one element of `dtype`, rounded once.
void store_scalar(const Scalar& value, Dtype dtype, void* out);

/// Applies f(Packet, ...) -> Packet with N arguments over dense runs of float.
template <int N, class F>
void map_packets(const void* const* in, void* out, std::int64_t n, F&& f) {
  const auto apply = [&](const float* const* p, std::int64_t i) {
    if constexpr (N == 1) return f(Packet::load(p[0] + i));
    if constexpr (N == 2) return f(Packet::load(p[0] + i), Packet::load(p[1] + i));
    if constexpr (N == 3)
      return f(Packet::load(p[0] + i), Packet::load(p[1] + i), Packet::load(p[2] + i));
  };
  const float* p[N];
  for (int k = 0; k < N; ++k) p[k] = static_cast<const float*>(in[k]);
  float* y = static_cast<float*>(out);
  std::int64_t i = 0;
  for (; i + Packet::kLanes <= n; i += Packet::kLanes) apply(p, i).store(y + i);
  if (i == n) return;
  float tail[N + 1][Packet::kLanes] = {};
  const float* t[N];
  const std::size_t bytes = static_cast<std::size_t>(n - i) * sizeof(float);
  for (int k = 0; k < N; ++k) t[k] = static_cast<float*>(std::memcpy(tail[k], p[k] + i, bytes));
  apply(t, 0).store(tail[N]);
  std::memcpy(y + i, tail[N], bytes);
}

/// Applies f to N arguments of the compute type C over dense runs: as packets for float.
template <class C, int N, class F>
void map_block(const void* const* in, void* out, std::int64_t n, F&& f) {
  if constexpr (std::is_same_v<C, float>) {
    map_packets<N>(in, out, n, f);
  } else {
    const C* p[N];
    for (int k = 0; k < N; ++k) p[k] = static_cast<const C*>(in[k]);
    C* y = static_cast<C*>(out);
    for (std::int64_t i = 0; i < n; ++i) {
      if constexpr (N == 1) y[i] = f(p[0][i]);
      if constexpr (N == 2) y[i] = f(p[0][i], p[1][i]);
      if constexpr (N == 3) y[i] = f(p[0][i], p[1][i], p[2][i]);
    }
  }
}

}  // namespace mixtape::kernels::cpu
