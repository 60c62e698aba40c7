// The three elementwise kernels, as templates over a formula (elementwise_formulas.cuh).
//
//   contiguous  one dense run of one dtype: 16-byte accesses, several in flight per thread
//   rows        innermost dimension dense or broadcast, any mix of dtypes: groups of 8 elements
//   strided     anything: one element at a time, neighbouring threads on neighbouring elements
//
// Only the contiguous kernel is compiled per storage type (f32, f16, bf16); the other two decode
// dtypes at run time, on the raw bits of all operands loaded before, so that loads overlap. A
// formula is loaded completely before it stores: an operand may be the output's memory.
#pragma once

#include "kernels/cuda/approx.cuh"
#include "kernels/cuda/elementwise_launch.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {

// ---- contiguous

/// What F is computed in where all operands are stored as T: float, or F's shorter type for 16
/// bits.
template <class F, class T>
struct ContiguousArithmetic {
  using type = float;
};
template <class F, class T>
requires(requires { requires F::kApprox; } && sizeof(T) == 2) struct ContiguousArithmetic<F, T> {
  using type = typename F::Short;
};

/// 16-byte vectors that one thread has in flight.
template <class F>
inline constexpr int kVectorsPerThread = F::kInputs == 1 ? 4 : 2;

template <class T, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_contiguous_kernel(F f, ContiguousArgs<F::kInputs> args) {
  constexpr int kN = F::kInputs, kWidth = kPerVector<T>, kUnroll = kVectorsPerThread<F>;
  using C = typename ContiguousArithmetic<F, T>::type;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * args.block_vectors;
  const int count = static_cast<int>(min(static_cast<long long>(args.block_vectors),
                                         static_cast<long long>(args.vectors - first)));
  uint4 raw[kUnroll][kN];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int i = u * kElementwiseThreads + static_cast<int>(threadIdx.x);
    if (i < count) {
#pragma unroll
      for (int k = 0; k < kN; ++k)
        if (args.in[k] != nullptr) raw[u][k] = static_cast<const uint4*>(args.in[k])[first + i];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int i = u * kElementwiseThreads + static_cast<int>(threadIdx.x);
    if (i >= count) break;
    float x[kN][kWidth], y[kWidth];
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      unpack<T>(raw[u][k], x[k]);
      if (args.in[k] == nullptr) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[k][j] = args.scalar[k];
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      C in[kN];
#pragma unroll
      for (int k = 0; k < kN; ++k) in[k] = C(x[k][j]);
      if constexpr (std::is_same_v<C, float>)
        y[j] = f(in);
      else
        y[j] = f(in).v;
    }
    static_cast<uint4*>(args.out)[first + i] = pack<T>(y);
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < args.tail) {
    const std::int64_t i = args.vectors * kWidth + threadIdx.x;
    C in[kN];
#pragma unroll
    for (int k = 0; k < kN; ++k)
      in[k] = C(args.in[k] != nullptr ? static_cast<float>(static_cast<const T*>(args.in[k])[i])
                                      : args.scalar[k]);
    if constexpr (std::is_same_v<C, float>)
      static_cast<T*>(args.out)[i] = T(f(in));
    else
      static_cast<T*>(args.out)[i] = T(f(in).v);
  }
}

// ---- rows

/// Eight elements as loaded: 16-, 32- and 8-bit types keep their bits, 64-bit ones are floats.
struct RawGroup {
  uint4 low, high;
};

__device__ __forceinline__ RawGroup load_group(const void* data, Dtype t, std::int32_t offset) {
  RawGroup raw{};
  switch (t) {
    case Dtype::f16:
    case Dtype::bf16:
      raw.low = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(data) + offset);
      break;
    case Dtype::f32:
    case Dtype::i32: {
      const auto* p =
          reinterpret_cast<const uint4*>(static_cast<const std::uint32_t*>(data) + offset);
      raw.low = p[0];
      raw.high = p[1];
      break;
    }
    case Dtype::u8:
    case Dtype::b8: {
      const uint2 bytes =
          *reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(data) + offset);
      raw.low.x = bytes.x;
      raw.low.y = bytes.y;
      break;
    }
    case Dtype::f64:
    case Dtype::i64: {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = load_as<float>(data, t, offset + j);
      raw.low = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                           __float_as_uint(x[3]));
      raw.high = make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]),
                            __float_as_uint(x[7]));
      break;
    }
  }
  return raw;
}

__device__ __forceinline__ void decode_group(const RawGroup& raw, Dtype t, float (&x)[8]) {
  const std::uint32_t words[8] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                                  raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  switch (t) {
    case Dtype::f16: unpack<Half>(raw.low, x); break;
    case Dtype::bf16: unpack<BFloat16>(raw.low, x); break;
    case Dtype::u8:
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = static_cast<float>((words[j / 4] >> (8 * (j % 4))) & 0xFF);
      break;
    case Dtype::b8:
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = ((words[j / 4] >> (8 * (j % 4))) & 0xFF) != 0 ? 1.f : 0.f;
      break;
    case Dtype::i32:
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = static_cast<float>(static_cast<std::int32_t>(words[j]));
      break;
    default:
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = __uint_as_float(words[j]);
  }
}

__device__ __forceinline__ void store_group(void* data, Dtype t, std::int32_t offset,
                                            const float (&y)[8]) {
  switch (t) {
    case Dtype::f16:
      *reinterpret_cast<uint4*>(static_cast<Half*>(data) + offset) = pack<Half>(y);
      break;
    case Dtype::bf16:
      *reinterpret_cast<uint4*>(static_cast<BFloat16*>(data) + offset) = pack<BFloat16>(y);
      break;
    case Dtype::f32: {
      auto* p = reinterpret_cast<float4*>(static_cast<float*>(data) + offset);
      p[0] = make_float4(y[0], y[1], y[2], y[3]);
      p[1] = make_float4(y[4], y[5], y[6], y[7]);
      break;
    }
    case Dtype::u8:
    case Dtype::b8: {
      std::uint32_t words[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t byte =
            t == Dtype::b8 ? (y[j] != 0.0f ? 1u : 0u) : convert<std::uint8_t>(y[j]);
        words[j / 4] |= byte << (8 * (j % 4));
      }
      *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(data) + offset) =
          make_uint2(words[0], words[1]);
      break;
    }
    default:
#pragma unroll
      for (int j = 0; j < 8; ++j) store_as(data, t, offset + j, y[j]);
  }
}

template <class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_rows_kernel(F f, RowsArgs<F::kInputs> args) {
  constexpr int kN = F::kInputs;
  std::uint32_t group = blockIdx.x * kElementwiseThreads + threadIdx.x;
  if (group >= args.groups) return;
  std::uint32_t rest = 0, column = group;
  if (args.dims > 1) rest = args.sizes[0].divide(column);
  std::int32_t offset[kN + 1];
#pragma unroll
  for (int k = 0; k <= kN; ++k)
    offset[k] = args.dense[k] ? static_cast<std::int32_t>(column) * kRowsWidth : 0;
#pragma unroll
  for (int d = 1; d < kMaxDims; ++d) {
    if (d >= args.dims) break;
    std::uint32_t index = rest;
    if (d + 1 < args.dims) rest = args.sizes[d].divide(index);
#pragma unroll
    for (int k = 0; k <= kN; ++k)
      offset[k] += static_cast<std::int32_t>(index) * args.strides[k][d];
  }
  RawGroup raw[kN];
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    const void* data = args.data[k + 1];
    if (data == nullptr) continue;
    if (args.dense[k + 1])
      raw[k] = load_group(data, args.dtypes[k + 1], offset[k + 1]);
    else
      raw[k].low.x = __float_as_uint(load_as<float>(data, args.dtypes[k + 1], offset[k + 1]));
  }
  float x[kN][8], y[8];
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    if (args.data[k + 1] != nullptr && args.dense[k + 1]) {
      decode_group(raw[k], args.dtypes[k + 1], x[k]);
    } else {
      const float same =
          args.data[k + 1] == nullptr ? args.scalar[k + 1] : __uint_as_float(raw[k].low.x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[k][j] = same;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float in[kN];
#pragma unroll
    for (int k = 0; k < kN; ++k) in[k] = x[k][j];
    y[j] = f(in);
  }
  store_group(args.data[0], args.dtypes[0], offset[0], y);
}

// ---- strided

template <class C, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_strided_kernel(F f, StridedArgs<F::kInputs, C> args) {
  constexpr int kN = F::kInputs;
  const std::uint32_t first = blockIdx.x * (kElementwiseThreads * kStridedItems) + threadIdx.x;
  std::int32_t offset[kN + 1][kStridedItems] = {};
#pragma unroll
  for (int u = 0; u < kStridedItems; ++u) {
    std::uint32_t rest = first + u * kElementwiseThreads;
    if (rest >= args.numel) rest = 0;  // loads element 0, stores nothing
#pragma unroll
    for (int d = 0; d < kMaxDims; ++d) {
      if (d >= args.dims) break;
      std::uint32_t index = rest;
      if (d + 1 < args.dims) rest = args.sizes[d].divide(index);
#pragma unroll
      for (int k = 0; k <= kN; ++k)
        offset[k][u] += static_cast<std::int32_t>(index) * args.strides[k][d];
    }
  }
  C x[kN][kStridedItems];
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    if (args.data[k + 1] != nullptr) {
      load_items(args.data[k + 1], args.dtypes[k + 1], offset[k + 1], x[k]);
    } else {
#pragma unroll
      for (int u = 0; u < kStridedItems; ++u) x[k][u] = args.scalar[k + 1];
    }
  }
#pragma unroll
  for (int u = 0; u < kStridedItems; ++u) {
    C in[kN];
#pragma unroll
    for (int k = 0; k < kN; ++k) in[k] = x[k][u];
    if (first + u * kElementwiseThreads < args.numel)
      store_as(args.data[0], args.dtypes[0], offset[0][u], f(in));
  }
}

// ---- the table of one formula

/// Runs out = f(in...) with all instances of F. kContiguous: compile the per-dtype kernels too.
template <bool kContiguous = true, class F>
void elementwise(const Stream& stream, const char* name, Dtype compute, const F& f, const View& out,
                 const Operand (&in)[F::kInputs]) {
  ElementwiseKernels kernels;
  if constexpr (kContiguous) {
    kernels.f32 = kernel_address(&elementwise_contiguous_kernel<float, F>);
    kernels.f16 = kernel_address(&elementwise_contiguous_kernel<Half, F>);
    kernels.bf16 = kernel_address(&elementwise_contiguous_kernel<BFloat16, F>);
    kernels.vectors_per_thread = kVectorsPerThread<F>;
  }
  kernels.rows = kernel_address(&elementwise_rows_kernel<F>);
  kernels.strided_f32 = kernel_address(&elementwise_strided_kernel<float, F>);
  kernels.strided_f64 = kernel_address(&elementwise_strided_kernel<double, F>);
  if constexpr (F::kIntegral)
    kernels.strided_i64 = kernel_address(&elementwise_strided_kernel<std::int64_t, F>);
  kernels.formula = &f;
  launch_elementwise<F::kInputs>(stream, name, compute, kernels, out, in);
}

}  // namespace mixtape::kernels::cuda
