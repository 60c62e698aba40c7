#include "kernels/cuda/conv_epilogue.h"

#include <algorithm>

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/fast_divide.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxGridY = 65535;

template <class C>
__device__ C relu_keeping_nan(C x) {
  return x <= C(0) ? C(0) : x;
}

// ---- bias and ReLU over (images * channels) planes of `pixels`

struct PlanarBias {
  void* y;
  const void* bias;  // or null
  std::int64_t pixels, planes, channels, bias_stride;
  Dtype bias_dtype;
  bool relu;
};

/// A block row (grid y) walks over planes; blocks along x share a plane's pixels.
template <class T, int kWidth>
__global__ void planar_bias_relu_kernel(PlanarBias e) {
  using C = compute_t<T>;
  const std::int64_t units = e.pixels / kWidth;
  for (std::int64_t plane = blockIdx.y; plane < e.planes; plane += gridDim.y) {
    const C bias =
        e.bias ? load_as<C>(e.bias, e.bias_dtype, plane % e.channels * e.bias_stride) : C(0);
    T* y = static_cast<T*>(e.y) + plane * e.pixels;
    for (std::int64_t u = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; u < units;
         u += std::int64_t{gridDim.x} * blockDim.x) {
      if constexpr (kWidth == 1) {
        const C x = convert<C>(y[u]) + bias;
        y[u] = convert<T>(e.relu ? relu_keeping_nan(x) : x);
      } else {
        float x[kWidth];
        unpack<T>(*reinterpret_cast<const uint4*>(y + u * kWidth), x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          x[i] += bias;
          if (e.relu) x[i] = relu_keeping_nan(x[i]);
        }
        store_vector(y + u * kWidth, pack<T>(x));
      }
    }
  }
}

template <class T, int kWidth>
void launch_planar_bias(const PlanarBias& e, cudaStream_t stream) {
  const std::int64_t units = e.pixels / kWidth;
  const int threads = units <= 64 ? 64 : kThreads;
  const auto x = static_cast<unsigned>(
      std::clamp<std::int64_t>(ceil_div<std::int64_t>(units, threads), 1, 64));
  const auto y = static_cast<unsigned>(std::min(e.planes, kMaxGridY));
  launch(planar_bias_relu_kernel<T, kWidth>, dim3(x, y), threads, 0, stream, e);
}

// ---- dw = src + beta * dw

struct Accumulate {
  void* dw;
  const void* src;
  std::int64_t dw_strides[4], src_strides[4], sizes[4], count;
  Dtype dw_dtype, src_dtype;
  float beta;
};

template <class C>
__global__ void accumulate_weight_gradient_kernel(Accumulate x) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < x.count;
       i += step) {
    std::int64_t rest = i, to = 0, from = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      const std::int64_t q = rest / x.sizes[d], r = rest - q * x.sizes[d];
      to += r * x.dw_strides[d];
      from += r * x.src_strides[d];
      rest = q;
    }
    C sum = load_as<C>(x.src, x.src_dtype, from);
    if (x.beta != 0) sum += static_cast<C>(x.beta) * load_as<C>(x.dw, x.dw_dtype, to);
    store_as(x.dw, x.dw_dtype, to, sum);
  }
}

// ---- sums over images and pixels of each channel

/// Images that one block adds for a channel: enough blocks for the device, few partial sums.
std::int64_t images_per_chunk(std::int64_t images, std::int64_t channels) {
  const std::int64_t chunks = std::clamp<std::int64_t>(2048 / channels, 1, 256);
  return std::max<std::int64_t>(ceil_div(images, chunks), 1);
}
std::int64_t chunk_count(std::int64_t images, std::int64_t channels) {
  return std::max<std::int64_t>(ceil_div(images, images_per_chunk(images, channels)), 1);
}

struct ChannelSums {
  const void* dy;
  void* partials;  // (chunks, channels)
  std::int64_t images, channels, pixels, image_stride, channel_stride, images_per_chunk;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) planar_channel_sums_kernel(ChannelSums x) {
  using C = compute_t<T>;
  const std::int64_t channel = blockIdx.x;
  const std::int64_t begin = blockIdx.y * x.images_per_chunk;
  const std::int64_t end = min(begin + x.images_per_chunk, x.images);
  const std::int64_t units = x.pixels / kWidth;
  C sum = 0;
  for (std::int64_t n = begin; n < end; ++n) {
    const T* dy = static_cast<const T*>(x.dy) + n * x.image_stride + channel * x.channel_stride;
#pragma unroll 4
    for (std::int64_t u = threadIdx.x; u < units; u += kThreads) {
      if constexpr (kWidth == 1) {
        sum += convert<C>(dy[u]);
      } else {
        float v[kWidth];
        unpack<T>(*reinterpret_cast<const uint4*>(dy + u * kWidth), v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum += v[i];
      }
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) static_cast<C*>(x.partials)[blockIdx.y * x.channels + channel] = sum;
}

}  // namespace

void planar_bias_relu(const Stream& stream, View y, View bias, bool relu) {
  if (y.numel() == 0) return;
  PlanarBias e{y.data, nullptr, y.size(2), y.size(0) * y.size(1), y.size(1), 0, Dtype::f32, relu};
  if (bias) {
    e.bias = bias.data;
    e.bias_stride = bias.stride(0);
    e.bias_dtype = bias.dtype;
  }
  dispatch_floating("conv2d", y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      if (e.pixels % kPerVector<T> == 0 && aligned(y.data, 16))
        return launch_planar_bias<T, kPerVector<T>>(e, native_stream(stream));
    }
    launch_planar_bias<T, 1>(e, native_stream(stream));
  });
}

void accumulate_weight_gradient(const Stream& stream, View dw, float beta, View src) {
  if (dw.numel() == 0) return;
  Accumulate x{dw.data, src.data, {}, {}, {}, dw.numel(), dw.dtype, src.dtype, beta};
  for (int d = 0; d < 4; ++d) {
    x.dw_strides[d] = dw.stride(d);
    x.src_strides[d] = src.stride(d);
    x.sizes[d] = dw.size(d);
  }
  const unsigned blocks = std::min(blocks_for(x.count, kThreads), 4096u);
  const auto kernel = src.dtype == Dtype::f64 ? accumulate_weight_gradient_kernel<double>
                                              : accumulate_weight_gradient_kernel<float>;
  launch(kernel, blocks, kThreads, 0, native_stream(stream), x);
}

std::size_t planar_channel_sums_workspace_bytes(std::int64_t images, std::int64_t channels,
                                                std::int64_t) {
  if (channels == 0) return 0;
  return static_cast<std::size_t>(chunk_count(images, channels) * channels) * sizeof(double);
}

void planar_channel_sums(const Stream& stream, View db, float beta, View dy, Workspace workspace) {
  const std::int64_t images = dy.size(0), channels = dy.size(1), pixels = dy.size(2);
  if (channels == 0) return;
  const std::size_t needed = planar_channel_sums_workspace_bytes(images, channels, pixels);
  MT_CHECK(workspace.bytes >= needed, "conv2d_backward_bias: expected a workspace of ", needed,
           " bytes, got ", workspace.bytes);
  const std::int64_t chunks = chunk_count(images, channels);
  const ChannelSums x{dy.data, workspace.data, images,       channels,
                      pixels,  dy.stride(0),   dy.stride(1), images_per_chunk(images, channels)};
  const dim3 grid(static_cast<unsigned>(channels), static_cast<unsigned>(chunks));
  const cudaStream_t queue = native_stream(stream);
  dispatch_floating("conv2d_backward_bias", dy.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      constexpr std::int64_t kWidth = kPerVector<T>;
      if (pixels % kWidth == 0 && x.image_stride % kWidth == 0 && x.channel_stride % kWidth == 0 &&
          aligned(dy.data, 16))
        return launch(planar_channel_sums_kernel<T, kPerVector<T>>, grid, kThreads, 0, queue, x);
    }
    launch(planar_channel_sums_kernel<T, 1>, grid, kThreads, 0, queue, x);
  });
  column_sums(stream, db, beta, workspace.data, dy.dtype == Dtype::f64, chunks);
}

}  // namespace mixtape::kernels::cuda
