// Max and average pooling on CUDA, one thread an element of what is written. The backward kernels
// gather over the windows that cover an input element, in a fixed order: no atomics, deterministic,
// and every element of dx is written.
//
// Legend: N batch, C channels, H W input size, P Q output size.
#include <cmath>

#include "kernels/conv.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// A (N, C, H, W) view: sizes and element strides, and which dimension runs fastest in memory.
struct Image {
  void* data;
  std::int64_t size[4], stride[4];
  bool channels_last;
};

Image image_of(const View& v) {
  Image image{};
  image.data = v.data;
  for (int i = 0; i < 4; ++i) {
    image.size[i] = v.sizes[i];
    image.stride[i] = v.strides[i];
  }
  image.channels_last = v.sizes[1] > 1 && v.strides[1] == 1;
  return image;
}

struct Position {
  std::int64_t n, c, h, w;
};

/// Element `i` in memory order, so that neighbouring threads touch neighbouring addresses.
__device__ __forceinline__ Position position_of(const Image& image, std::int64_t i) {
  Position at;
  const std::int64_t c = image.size[1], h = image.size[2], w = image.size[3];
  if (image.channels_last) {
    at.c = i % c;
    i /= c;
    at.w = i % w;
    i /= w;
    at.h = i % h;
    at.n = i / h;
  } else {
    at.w = i % w;
    i /= w;
    at.h = i % h;
    i /= h;
    at.c = i % c;
    at.n = i / c;
  }
  return at;
}

__device__ __forceinline__ std::int64_t offset_of(const Image& image, std::int64_t n,
                                                  std::int64_t c, std::int64_t h, std::int64_t w) {
  return n * image.stride[0] + c * image.stride[1] + h * image.stride[2] + w * image.stride[3];
}

struct Range {
  std::int64_t begin, end;
};
/// Input rows (or columns) of output row p that lie inside the image.
__device__ __forceinline__ Range window(const PoolGeometry& g, int d, std::int64_t p,
                                        std::int64_t size) {
  const std::int64_t start = p * g.stride[d] - g.padding[d];
  return {start < 0 ? 0 : start, min(start + g.kernel[d], size)};
}
/// Output rows whose window covers input row h.
__device__ __forceinline__ Range covering(const PoolGeometry& g, int d, std::int64_t h,
                                          std::int64_t outputs) {
  const std::int64_t last = h + g.padding[d], first = last - g.kernel[d] + 1;
  return {first <= 0 ? 0 : (first + g.stride[d] - 1) / g.stride[d],
          min(last / g.stride[d] + 1, outputs)};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    max_pool2d_forward_kernel(Image y, Image indices, Image x, PoolGeometry g, std::int64_t count) {
  using C = compute_t<T>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Position at = position_of(y, i);
  const Range rows = window(g, 0, at.h, x.size[2]), columns = window(g, 1, at.w, x.size[3]);
  C best = -static_cast<C>(INFINITY);
  std::int64_t where = rows.begin * x.size[3] + columns.begin;
  for (std::int64_t h = rows.begin; h < rows.end; ++h) {
    for (std::int64_t w = columns.begin; w < columns.end; ++w) {
      const C v = convert<C>(static_cast<const T*>(x.data)[offset_of(x, at.n, at.c, h, w)]);
      if (v > best || (v != v && best == best)) {  // the first NaN is the largest
        best = v;
        where = h * x.size[3] + w;
      }
    }
  }
  static_cast<T*>(y.data)[offset_of(y, at.n, at.c, at.h, at.w)] = convert<T>(best);
  static_cast<std::int32_t*>(indices.data)[offset_of(indices, at.n, at.c, at.h, at.w)] =
      static_cast<std::int32_t>(where);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    max_pool2d_backward_kernel(Image dx, Image dy, Image indices, PoolGeometry g,
                               std::int64_t count) {
  using C = compute_t<T>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Position at = position_of(dx, i);
  const Range rows = covering(g, 0, at.h, dy.size[2]), columns = covering(g, 1, at.w, dy.size[3]);
  const auto self = static_cast<std::int32_t>(at.h * dx.size[3] + at.w);
  C sum = 0;
  for (std::int64_t p = rows.begin; p < rows.end; ++p) {
    for (std::int64_t q = columns.begin; q < columns.end; ++q) {
      const std::int32_t where =
          static_cast<const std::int32_t*>(indices.data)[offset_of(indices, at.n, at.c, p, q)];
      if (where == self)
        sum += convert<C>(static_cast<const T*>(dy.data)[offset_of(dy, at.n, at.c, p, q)]);
    }
  }
  static_cast<T*>(dx.data)[offset_of(dx, at.n, at.c, at.h, at.w)] = convert<T>(sum);
}

template <class C>
__device__ __forceinline__ C divisor_of(const PoolGeometry& g, const Range& rows,
                                        const Range& columns) {
  return static_cast<C>(g.count_include_pad
                            ? g.kernel[0] * g.kernel[1]
                            : (rows.end - rows.begin) * (columns.end - columns.begin));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    avg_pool2d_forward_kernel(Image y, Image x, PoolGeometry g, std::int64_t count) {
  using C = compute_t<T>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Position at = position_of(y, i);
  const Range rows = window(g, 0, at.h, x.size[2]), columns = window(g, 1, at.w, x.size[3]);
  C sum = 0;
  for (std::int64_t h = rows.begin; h < rows.end; ++h) {
    for (std::int64_t w = columns.begin; w < columns.end; ++w)
      sum += convert<C>(static_cast<const T*>(x.data)[offset_of(x, at.n, at.c, h, w)]);
  }
  static_cast<T*>(y.data)[offset_of(y, at.n, at.c, at.h, at.w)] =
      convert<T>(sum / divisor_of<C>(g, rows, columns));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    avg_pool2d_backward_kernel(Image dx, Image dy, PoolGeometry g, std::int64_t count) {
  using C = compute_t<T>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Position at = position_of(dx, i);
  const Range outs_h = covering(g, 0, at.h, dy.size[2]), outs_w = covering(g, 1, at.w, dy.size[3]);
  C sum = 0;
  for (std::int64_t p = outs_h.begin; p < outs_h.end; ++p) {
    for (std::int64_t q = outs_w.begin; q < outs_w.end; ++q) {
      const C v = convert<C>(static_cast<const T*>(dy.data)[offset_of(dy, at.n, at.c, p, q)]);
      sum += v / divisor_of<C>(g, window(g, 0, p, dx.size[2]), window(g, 1, q, dx.size[3]));
    }
  }
  static_cast<T*>(dx.data)[offset_of(dx, at.n, at.c, at.h, at.w)] = convert<T>(sum);
}

/// Calls f(tag, blocks) for the storage type, unless there is nothing to write.
template <class F>
void for_pool(const char* op, const Stream& stream, const View& written, F&& f) {
  const std::int64_t count = written.numel();
  if (count == 0) return;
  const CudaDeviceGuard guard(stream.device());
  dispatch_floating(op, written.dtype,
                    [&](auto tag) { f(tag, dim3(blocks_for(count, kThreads)), count); });
}

}  // namespace

void max_pool2d_forward(const Stream& stream, View y, View indices, View x,
                        const PoolGeometry& geometry) {
  for_pool("max_pool2d", stream, y, [&](auto tag, dim3 blocks, std::int64_t count) {
    using T = typename decltype(tag)::type;
    launch(max_pool2d_forward_kernel<T>, blocks, dim3(kThreads), 0,
           static_cast<cudaStream_t>(stream.native()), image_of(y), image_of(indices), image_of(x),
           geometry, count);
  });
}

void max_pool2d_backward(const Stream& stream, View dx, View dy, View indices,
                         const PoolGeometry& geometry) {
  for_pool("max_pool2d", stream, dx, [&](auto tag, dim3 blocks, std::int64_t count) {
    using T = typename decltype(tag)::type;
    launch(max_pool2d_backward_kernel<T>, blocks, dim3(kThreads), 0,
           static_cast<cudaStream_t>(stream.native()), image_of(dx), image_of(dy),
           image_of(indices), geometry, count);
  });
}

void avg_pool2d_forward(const Stream& stream, View y, View x, const PoolGeometry& geometry) {
  for_pool("avg_pool2d", stream, y, [&](auto tag, dim3 blocks, std::int64_t count) {
    using T = typename decltype(tag)::type;
    launch(avg_pool2d_forward_kernel<T>, blocks, dim3(kThreads), 0,
           static_cast<cudaStream_t>(stream.native()), image_of(y), image_of(x), geometry, count);
  });
}

void avg_pool2d_backward(const Stream& stream, View dx, View dy, const PoolGeometry& geometry) {
  for_pool("avg_pool2d", stream, dx, [&](auto tag, dim3 blocks, std::int64_t count) {
    using T = typename decltype(tag)::type;
    launch(avg_pool2d_backward_kernel<T>, blocks, dim3(kThreads), 0,
           static_cast<cudaStream_t>(stream.native()), image_of(dx), image_of(dy), geometry, count);
  });
}

}  // namespace mixtape::kernels::cuda
