// Random fills and dropout. A thread makes the four numbers of one or two counter blocks, by the
// arithmetic that the CPU shares (kernels/random_math.h), and stores them as one access.
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

__device__ __forceinline__ void load_four(const void* x, Dtype t, std::int64_t b, std::int64_t n,
                                          bool vector, float (&v)[4]) {
  if (vector && 4 * b + 4 <= n) {
    if (t == Dtype::f32) {
      const float4 f = static_cast<const float4*>(x)[b];
      v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
      return;
    }
    if (t == Dtype::f16 || t == Dtype::bf16) {
      const uint2 w = static_cast<const uint2*>(x)[b];
      const bool half = t == Dtype::f16;
      const float2 low = half ? unpack_pair<Half>(w.x) : unpack_pair<BFloat16>(w.x);
      const float2 high = half ? unpack_pair<Half>(w.y) : unpack_pair<BFloat16>(w.y);
      v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = 4 * b + j < n ? load_as<float>(x, t, 4 * b + j) : 0.0f;
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

/// float for all but f64 operands.
template <class C>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(FillArgs args, const void* x, Dtype x_dtype, float p, C scale) {
  const std::int64_t b = block_index();
  if (4 * b >= args.n) return;
  C v[4];
  if constexpr (std::is_same_v<C, float>) {
    load_four(x, x_dtype, b, args.n, args.vector, v);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      v[j] = 4 * b + j < args.n ? load_as<C>(x, x_dtype, 4 * b + j) : C(0);
  }
  const Philox4 words = philox(args.state, static_cast<std::uint64_t>(b));
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = uniform_from_bits(words.v[j]) >= p ? v[j] * scale : C(0);
  if constexpr (std::is_same_v<C, float>) {
    store_four(args.out, args.dtype, b, args.n, args.vector, v);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * b + j < args.n) store_as(args.out, args.dtype, 4 * b + j, v[j]);
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
  FillArgs args = fill_args("dropout", out, state);
  args.vector = args.vector && aligned(x.data, 4 * size_of(x.dtype));
  const double scale = p < 1 ? 1 / (1 - p) : 0;  // p = 1: no uniform reaches it
  const auto bound = static_cast<float>(p);
  if (x.dtype == Dtype::f64 || out.dtype == Dtype::f64)
    launch_fill(stream, dropout_kernel<double>, args, x.data, x.dtype, bound, scale);
  else
    launch_fill(stream, dropout_kernel<float>, args, x.data, x.dtype, bound,
                static_cast<float>(scale));
}

}  // namespace mixtape::kernels::cuda
