// Random fills and dropout. A thread makes the numbers of one or two counter blocks, by the
// arithmetic that the CPU shares (kernels/random_math.h): four of a fill, stored as one access;
// eight masks of dropout, because four a block would cost more than the memory traffic of 16-bit
// elements.
#include "kernels/random.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/random_math.h"

namespace mixtape::kernels::cuda {

namespace {

constexpr int kThreads = 256;

/// Elements [4 b, 4 b + 4) of `out`, of which those below n exist; whole ones are one access where
/// `vector` says that out is aligned to four elements.
__device__ __forceinline__ void store_four(void* out, Dtype t, std::int64_t b, std::int64_t n,
                                           bool vector, const float (&v)[4]) {
  if (vector && 4 * b + 4 <= n) {
    if (t == Dtype::f32) {
      static_cast<float4*>(out)[b] = make_float4(v[0], v[1], v[2], v[3]);
      return;
    }
    if (t == Dtype::f16 || t == Dtype::bf16) {
      static_cast<uint2*>(out)[b] =
          t == Dtype::f16
              ? make_uint2(pack_pair<Half>(v[0], v[1]), pack_pair<Half>(v[2], v[3]))
              : make_uint2(pack_pair<BFloat16>(v[0], v[1]), pack_pair<BFloat16>(v[2], v[3]));
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (4 * b + j < n) store_as(out, t, 4 * b + j, v[j]);
}

struct FillArgs {
  void* out;
  Dtype dtype;
  bool vector;
  std::int64_t n;
  PhiloxState state;
};

__device__ __forceinline__ std::int64_t block_index() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads)
    uniform_kernel(FillArgs args, random_math::UniformRange range) {
  const std::int64_t b = block_index();
  if (4 * b >= args.n) return;
  const Philox4 words = philox(args.state, static_cast<std::uint64_t>(b));
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = random_math::uniform_value(words.v[j], range);
  store_four(args.out, args.dtype, b, args.n, args.vector, v);
}

__global__ void __launch_bounds__(kThreads)
    normal_kernel(FillArgs args, float mean, float deviation) {
  const std::int64_t b = block_index();
  if (4 * b >= args.n) return;
  const Philox4 words = philox(args.state, static_cast<std::uint64_t>(b));
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const random_math::Pair pair = random_math::normal_pair(words.v[j], words.v[j + 1]);
    v[j] = random_math::fused(pair.first, deviation, mean);
    v[j + 1] = random_math::fused(pair.second, deviation, mean);
  }
  store_four(args.out, args.dtype, b, args.n, args.vector, v);
}

__global__ void __launch_bounds__(kThreads)
    randint_kernel(FillArgs args, std::int64_t lo, std::uint64_t range) {
  const std::int64_t b = block_index();
  if (4 * b >= args.n) return;
  const Philox4 words = philox(args.state, static_cast<std::uint64_t>(b));
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (4 * b + j < args.n)
      store_as(args.out, args.dtype, 4 * b + j, random_math::randint_value(words.v[j], lo, range));
}

// ---- dropout

struct DropoutArgs {
  void* out;
  const void* x;
  std::int64_t n;
  PhiloxState state;
  std::uint32_t threshold;
  double scale;
};

__device__ __forceinline__ std::uint32_t dropout_bits(const Philox4& words, int j) {
  return j % 2 == 0 ? words.v[j / 2] & 0xFFFF : words.v[j / 2] >> 16;
}

/// out and x of one dtype, 16-byte aligned. A thread has two vectors, a warp apart; a draw is for
/// one vector of 16-bit elements or two of floats. Floats' draws are made by the lanes in turn and
/// reach their vectors as shuffled bit masks, so that neighbouring lanes access neighbouring
/// memory.
template <class T>
__global__ void __launch_bounds__(kThreads) dropout_vectors_kernel(DropoutArgs args) {
  constexpr int kWidth = kPerVector<T>, kVectors = 2;
  const std::int64_t vectors = args.n / kWidth;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t warp = block_index() / kWarp, first = warp * (kWarp * kVectors) + lane;
  const auto scale = static_cast<float>(args.scale);
  uint4 raw[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u)
    if (first + u * kWarp < vectors) raw[u] = static_cast<const uint4*>(args.x)[first + u * kWarp];

  std::uint32_t mask = 0;
  if constexpr (kWidth == 4) {
    const Philox4 words = philox(args.state, static_cast<std::uint64_t>(warp * kWarp + lane));
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (random_math::dropout_keeps(dropout_bits(words, j), args.threshold)) mask |= 1u << j;
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t i = first + u * kWarp;
    float v[kWidth];
    unpack<T>(raw[u], v);
    if constexpr (kWidth == 4) {
      const std::uint32_t keep =
          __shfl_sync(0xFFFFFFFFu, mask, (kWarp * u + lane) / 2) >> (4 * (lane % 2));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = (keep >> j & 1) != 0 ? v[j] * scale : 0.0f;
    } else {
      const Philox4 words = philox(args.state, static_cast<std::uint64_t>(i));
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        v[j] = random_math::dropout_keeps(dropout_bits(words, j), args.threshold) ? v[j] * scale
                                                                                  : 0.0f;
    }
    if (i < vectors) store_vector(static_cast<uint4*>(args.out) + i, pack<T>(v));
  }

  const std::int64_t last = vectors * kWidth + threadIdx.x;  // what fills no vector
  if (blockIdx.x == gridDim.x - 1 && last < args.n) {
    const Philox4 words = philox(args.state, static_cast<std::uint64_t>(last / 8));
    const std::uint32_t word = words.v[last % 8 / 2] >> (16 * (last % 2)) & 0xFFFF;
    const float v = static_cast<float>(static_cast<const T*>(args.x)[last]);
    static_cast<T*>(args.out)[last] =
        T(random_math::dropout_keeps(word, args.threshold) ? v * scale : 0.0f);
  }
}

/// Any dtypes; float for all but f64 operands. A thread makes the eight elements of a draw.
template <class C>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(DropoutArgs args, Dtype out_dtype, Dtype x_dtype) {
  const std::int64_t b = block_index();
  if (8 * b >= args.n) return;
  const Philox4 words = philox(args.state, static_cast<std::uint64_t>(b));
  const C scale = static_cast<C>(args.scale);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const std::int64_t i = 8 * b + j;
    if (i >= args.n) break;
    const C v = load_as<C>(args.x, x_dtype, i);
    const bool keep = random_math::dropout_keeps(dropout_bits(words, j), args.threshold);
    store_as(args.out, out_dtype, i, keep ? v * scale : C(0));
  }
}

FillArgs fill_args(const char* name, const View& out, PhiloxState state) {
  MT_CHECK(out.contiguous(), name, ": expected a contiguous output, got strides ", out.strides,
           " for ", out.sizes);
  return {out.data, out.dtype, aligned(out.data, 4 * size_of(out.dtype)), out.numel(), state};
}

template <class... Params, class... Args>
void launch_fill(const Stream& stream, void (*kernel)(FillArgs, Params...), const FillArgs& args,
                 const Args&... rest) {
  if (args.n == 0) return;
  const CudaDeviceGuard guard(stream.device());
  launch(kernel, dim3(blocks_for(args.n, 4 * kThreads)), dim3(kThreads), 0, native_stream(stream),
         args, rest...);
}

}  // namespace

void uniform(const Stream& stream, View out, PhiloxState state, double lo, double hi) {
  launch_fill(stream, uniform_kernel, fill_args("uniform", out, state),
              random_math::uniform_range(out.dtype, lo, hi));
}

void normal(const Stream& stream, View out, PhiloxState state, double mean, double std) {
  launch_fill(stream, normal_kernel, fill_args("normal", out, state), static_cast<float>(mean),
              static_cast<float>(std));
}

void randint(const Stream& stream, View out, PhiloxState state, std::int64_t lo, std::int64_t hi) {
  const auto range = static_cast<std::uint64_t>(hi) - static_cast<std::uint64_t>(lo);
  MT_CHECK(lo < hi && range <= std::uint64_t{1} << 32,
           "randint: expected a range of 1 to 2^32 values, got [", lo, ", ", hi, ")");
  launch_fill(stream, randint_kernel, fill_args("randint", out, state), lo, range);
}

void dropout(const Stream& stream, View out, View x, double p, PhiloxState state) {
  MT_CHECK(p >= 0 && p <= 1, "dropout: expected a probability in [0, 1], got ", p);
  MT_CHECK_EQ(x.sizes, out.sizes, "dropout: sizes of the output");
  MT_CHECK(x.contiguous(), "dropout: expected a contiguous input, got strides ", x.strides);
  MT_CHECK(out.contiguous(), "dropout: expected a contiguous output, got strides ", out.strides,
           " for ", out.sizes);
  const DropoutArgs args{out.data,
                         x.data,
                         out.numel(),
                         state,
                         random_math::dropout_threshold(p),
                         random_math::dropout_scale(p)};
  if (args.n == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const cudaStream_t queue = native_stream(stream);
  const bool vectors = out.dtype == x.dtype && aligned(out.data, 16) && aligned(x.data, 16);
  const auto run = [&](auto kernel, std::int64_t per_thread, auto... dtypes) {
    launch(kernel, dim3(blocks_for(args.n, per_thread * kThreads)), dim3(kThreads), 0, queue, args,
           dtypes...);
  };
  if (x.dtype == Dtype::f64 || out.dtype == Dtype::f64)
    run(dropout_kernel<double>, 8, out.dtype, x.dtype);
  else if (vectors && x.dtype == Dtype::f32)
    run(dropout_vectors_kernel<float>, 8);
  else if (vectors && x.dtype == Dtype::f16)
    run(dropout_vectors_kernel<Half>, 16);
  else if (vectors && x.dtype == Dtype::bf16)
    run(dropout_vectors_kernel<BFloat16>, 16);
  else
    run(dropout_kernel<float>, 8, out.dtype, x.dtype);
}

}  // namespace mixtape::kernels::cuda
