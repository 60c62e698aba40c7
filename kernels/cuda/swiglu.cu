// SwiGLU: bound by memory, so one pass each way in 16-byte units, with the short exponential of
// approx.cuh where results are stored in 16 bits. Rows that are not 16-byte aligned, and f64, go
// element by element. Unit indices are 32-bit; more units than that take several launches.
#include <algorithm>

#include "kernels/cuda/elementwise_formulas.cuh"
#include "kernels/cuda/fast_divide.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/unit_access.cuh"
#include "kernels/swiglu.h"

namespace mixtape::kernels::cuda {
namespace {

using functors::Silu;

constexpr int kThreads = 256, kUnitsPerThread = 2;

/// Type in which Silu of elements stored as T is computed.
template <class T>
using SiluType = std::conditional_t<sizeof(T) == 2, Approx, compute_t<T>>;

template <class C>
__device__ __forceinline__ C silu(C x, C) {
  return Silu::value(x);
}
__device__ __forceinline__ float silu(float x, Approx) { return Silu::value(Approx(x)).v; }
/// dy * silu'(x).
template <class C>
__device__ __forceinline__ C silu_derivative(C dy, C x, C) {
  return Silu::derivative(dy, x);
}
__device__ __forceinline__ float silu_derivative(float dy, float x, Approx) {
  return Silu::derivative(Approx(dy), Approx(x)).v;
}

/// `count` units of kWidth elements; `per_row` of them make H elements.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(T* y, const T* x, unsigned count, FastDivide per_row) {
  using C = compute_t<T>;
  const unsigned first = blockIdx.x * (kThreads * kUnitsPerThread) + threadIdx.x;
  C gate[kUnitsPerThread][kWidth], up[kUnitsPerThread][kWidth];
#pragma unroll
  for (int k = 0; k < kUnitsPerThread; ++k) {
    unsigned column = first + k * kThreads;
    if (column >= count) continue;
    const std::int64_t row = per_row.divide(column), half = std::int64_t{per_row.divisor} * kWidth;
    const T* const from = x + 2 * row * half + std::int64_t{column} * kWidth;
    load_unit<T>(from, gate[k]);
    load_unit<T>(from + half, up[k]);
  }
#pragma unroll
  for (int k = 0; k < kUnitsPerThread; ++k) {
    const unsigned unit = first + k * kThreads;
    if (unit >= count) continue;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gate[k][i] = silu(gate[k][i], SiluType<T>()) * up[k][i];
    store_unit<T>(y + std::int64_t{unit} * kWidth, gate[k]);
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(T* dx, const T* dy, const T* x, unsigned count, FastDivide per_row) {
  using C = compute_t<T>;
  const unsigned unit = blockIdx.x * kThreads + threadIdx.x;
  if (unit >= count) return;
  unsigned column = unit;
  const std::int64_t row = per_row.divide(column), half = std::int64_t{per_row.divisor} * kWidth;
  const std::int64_t offset = 2 * row * half + std::int64_t{column} * kWidth;
  C gate[kWidth], up[kWidth], d[kWidth];
  load_unit<T>(x + offset, gate);
  load_unit<T>(x + offset + half, up);
  load_unit<T>(dy + std::int64_t{unit} * kWidth, d);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const C dgate = silu_derivative(d[i] * up[i], gate[i], SiluType<T>());
    up[i] = d[i] * silu(gate[i], SiluType<T>());
    gate[i] = dgate;
  }
  store_unit<T>(dx + offset, gate);
  store_unit<T>(dx + offset + half, up);
}

/// Calls f(TypeTag<T>, integral_constant width) with the widest unit that fits the operands.
template <class F>
void dispatch_units(std::initializer_list<View> operands, std::int64_t half, F&& f) {
  dispatch_floating("swiglu", operands.begin()->dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= 4) {
      bool vector = half % kPerVector<T> == 0;
      for (const View& v : operands) vector = vector && aligned(v.data, 16);
      if (vector) return f(tag, std::integral_constant<int, kPerVector<T>>{});
    }
    f(tag, std::integral_constant<int, 1>{});
  });
}

/// Calls f(first row, units) for runs of whole rows of at most 2^30 units.
template <class F>
void for_each_run(std::int64_t rows, std::int64_t per_row, F&& f) {
  constexpr std::int64_t kMostUnits = std::int64_t{1} << 30;
  MT_CHECK(per_row <= kMostUnits, "swiglu: expected rows of at most 2^30 units, got ", per_row);
  const std::int64_t rows_per_run = kMostUnits / per_row;
  for (std::int64_t row = 0; row < rows; row += rows_per_run)
    f(row, static_cast<unsigned>(std::min(rows_per_run, rows - row) * per_row));
}

}  // namespace

void swiglu_forward(const Stream& stream, View y, View x) {
  check_swiglu("swiglu_forward", y, x);
  if (y.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const std::int64_t half = y.size(1);
  dispatch_units({y, x}, half, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    for_each_run(y.size(0), half / kWidth, [&](std::int64_t row, unsigned units) {
      launch(swiglu_forward_kernel<T, kWidth>, dim3(blocks_for(units, kThreads * kUnitsPerThread)),
             dim3(kThreads), 0, native_stream(stream), y.ptr<T>() + row * half,
             x.ptr<T>() + 2 * row * half, units, FastDivide(half / kWidth));
    });
  });
}

void swiglu_backward(const Stream& stream, View dx, View dy, View x) {
  check_swiglu("swiglu_backward", dy, x);
  check_swiglu("swiglu_backward", dy, dx);
  if (dy.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const std::int64_t half = dy.size(1);
  dispatch_units({dx, dy, x}, half, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    for_each_run(dy.size(0), half / kWidth, [&](std::int64_t row, unsigned units) {
      launch(swiglu_backward_kernel<T, kWidth>, dim3(blocks_for(units, kThreads)), dim3(kThreads),
             0, native_stream(stream), dx.ptr<T>() + 2 * row * half, dy.ptr<T>() + row * half,
             x.ptr<T>() + 2 * row * half, units, FastDivide(half / kWidth));
    });
  });
}

}  // namespace mixtape::kernels::cuda
