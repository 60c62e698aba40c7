// Rotary position embedding: memory is read and written once, in 16-byte units where strides and
// addresses allow (a head's halves each a whole number of them).
//
// A block works on a few tokens at a time, one for each threadIdx.y: its threads first make the
// token's sines and cosines in shared memory, then share out the pairs of units of all heads.
// Frequencies come from the host in the launch's parameters, so that they are the same bits on
// every device.
#include <algorithm>

#include "kernels/cuda/fast_divide.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/unit_access.cuh"
#include "kernels/rotary.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 16;

struct Strides {
  std::int64_t batch, time, head;
  explicit Strides(const View& v) : batch(v.stride(0)), time(v.stride(1)), head(v.stride(2)) {}
};

template <class T>
struct Operands {
  T* y;
  const T* x;
  const void* positions;  // null: 0, 1, .. along T
  Strides y_strides, x_strides;
  std::int64_t position_batch, position_time, offset, tokens, times;
  Dtype position_dtype;
  int heads, rotated_heads, half;  // half: D / 2
  FastDivide units_per_half;
  bool inverse;
};

template <class C>
struct Frequencies {
  C values[kMaxRotaryDim / 2];
};

__device__ __forceinline__ void sine_cosine(float x, float* s, float* c) { sincosf(x, s, c); }
__device__ __forceinline__ void sine_cosine(double x, double* s, double* c) { sincos(x, s, c); }

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rotary_embedding_kernel(Operands<T> o, Frequencies<compute_t<T>> frequencies) {
  using C = compute_t<T>;
  extern __shared__ uint4 shared[];
  C* const cosine = reinterpret_cast<C*>(shared) + threadIdx.y * 2 * o.half;
  C* const sine = cosine + o.half;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.y;
  for (std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y; first < o.tokens;
       first += step) {
    const std::int64_t token = first + threadIdx.y;
    const std::int64_t b = token / o.times, t = token - b * o.times;
    const bool active = token < o.tokens;
    __syncthreads();  // the turn before has used its sines
    if (active) {
      const std::int64_t at = b * o.position_batch + t * o.position_time;
      const std::int64_t position =
          o.offset + (o.positions == nullptr ? t : load_index(o.positions, o.position_dtype, at));
      for (int i = threadIdx.x; i < o.half; i += blockDim.x) {
        C s, c;
        sine_cosine(static_cast<C>(position) * frequencies.values[i], &s, &c);
        cosine[i] = c;
        sine[i] = o.inverse ? -s : s;
      }
    }
    __syncthreads();
    if (!active) continue;
    const T* const x = o.x + b * o.x_strides.batch + t * o.x_strides.time;
    T* const y = o.y + b * o.y_strides.batch + t * o.y_strides.time;
    const unsigned count = o.units_per_half.divisor * o.heads;
    for (unsigned unit = threadIdx.x; unit < count; unit += blockDim.x) {
      unsigned column = unit;
      const int head = static_cast<int>(o.units_per_half.divide(column));
      column *= kWidth;
      const T* const from = x + head * o.x_strides.head + column;
      T* const to = y + head * o.y_strides.head + column;
      C low[kWidth], high[kWidth];
      load_unit<T>(from, low);
      load_unit<T>(from + o.half, high);
      if (head < o.rotated_heads) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const C c = cosine[column + k], s = sine[column + k], v = low[k];
          low[k] = v * c - high[k] * s;
          high[k] = high[k] * c + v * s;
        }
      }
      store_unit<T>(to, low);
      store_unit<T>(to + o.half, high);
    }
  }
}

/// Whether every half head of v starts at a multiple of 16 bytes and is whole vectors of T.
template <class T>
bool is_vectors(const View& v) {
  bool yes = aligned(v.data, 16) && v.size(3) / 2 % kPerVector<T> == 0;
  for (int d = 0; d < 3; ++d) yes = yes && (v.size(d) <= 1 || v.stride(d) % kPerVector<T> == 0);
  return yes;
}

template <class T, int kWidth>
void launch_rotary(const Stream& stream, const RotaryEmbedding& a) {
  using C = compute_t<T>;
  const std::int64_t dim = a.x.size(3), half = dim / 2, heads = a.x.size(2);
  MT_CHECK(heads * half < std::int64_t{1} << 30,
           "rotary_embedding: expected fewer than 2^31 elements a token, got ", heads * dim);
  Frequencies<C> frequencies{};
  for (std::int64_t i = 0; i < half; ++i)
    frequencies.values[i] = static_cast<C>(rotary_frequency(a.base, i, dim));
  const Operands<T> o{a.y.ptr<T>(),
                      a.x.ptr<T>(),
                      a.positions ? a.positions.data : nullptr,
                      Strides(a.y),
                      Strides(a.x),
                      a.positions ? a.positions.stride(0) : 0,
                      a.positions ? a.positions.stride(1) : 0,
                      a.offset,
                      a.x.size(0) * a.x.size(1),
                      a.x.size(1),
                      a.positions.dtype,
                      static_cast<int>(heads),
                      static_cast<int>(a.rotated_heads),
                      static_cast<int>(half),
                      FastDivide(half / kWidth),
                      a.inverse};
  const std::int64_t units = heads * half / kWidth;
  unsigned across = kWarp;  // threads that share a token
  while (across < kThreads && across < units) across *= 2;
  const unsigned tokens = kThreads / across;
  const std::int64_t blocks = std::min(ceil_div<std::int64_t>(o.tokens, tokens), kMaxBlocks);
  launch(rotary_embedding_kernel<T, kWidth>, dim3(static_cast<unsigned>(blocks)),
         dim3(across, tokens), static_cast<std::size_t>(tokens * dim) * sizeof(C),
         native_stream(stream), o, frequencies);
}

}  // namespace

void rotary_embedding(const Stream& stream, const RotaryEmbedding& args) {
  check_rotary_embedding(args);
  if (args.x.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  dispatch_floating("rotary_embedding", args.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= 4) {
      if (is_vectors<T>(args.x) && is_vectors<T>(args.y))
        return launch_rotary<T, kPerVector<T>>(stream, args);
    }
    launch_rotary<T, 1>(stream, args);
  });
}

}  // namespace mixtape::kernels::cuda
