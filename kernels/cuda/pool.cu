// Max and average pooling. Backward passes gather: a thread owns an element of dx and adds the
// windows that cover it in order, so nothing is added atomically and results are deterministic.
#include "kernels/cuda/pool.cuh"

#include <algorithm>

namespace mixtape::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, int kWidth>
__global__ void max_pool2d_forward_kernel(PoolProblem p) {
  using C = compute_t<T>;
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= p.positions) return;
  const PoolPosition o = pool_position<kWidth>(p, static_cast<std::uint32_t>(at));
  const T* x = static_cast<const T*>(p.x.data);
  int h0, h1, w0, w1;
  window(p, 0, o.i, p.h, h0, h1);
  window(p, 1, o.j, p.w, w0, w1);
  C best[kWidth] = {}, v[kWidth];
  std::int32_t index[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) index[k] = -1;
  for (int h = h0; h < h1; ++h) {
    for (int w = w0; w < w1; ++w) {
      load_channels<T, kWidth>(x + p.x.offset(o.n, o.c, h, w), v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const bool larger = v[k] > best[k] || (v[k] != v[k] && best[k] == best[k]);
        if (index[k] < 0 || larger) {
          best[k] = v[k];
          index[k] = h * p.w + w;
        }
      }
    }
  }
  store_channels<T, kWidth>(static_cast<T*>(p.y.data) + p.y.offset(o.n, o.c, o.i, o.j), best);
  store_indices<kWidth>(
      static_cast<std::int32_t*>(p.indices.data) + p.indices.offset(o.n, o.c, o.i, o.j), index);
}

template <class T, int kWidth>
__global__ void max_pool2d_backward_kernel(PoolProblem p) {
  using C = compute_t<T>;
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= p.positions) return;
  const PoolPosition o = pool_position<kWidth>(p, static_cast<std::uint32_t>(at));
  const T* dy = static_cast<const T*>(p.y.data);
  const std::int32_t* indices = static_cast<const std::int32_t*>(p.indices.data);
  const std::int32_t here = o.i * p.w + o.j;
  int p0, p1, q0, q1;
  covering_windows(p, 0, o.i, p.p, p0, p1);
  covering_windows(p, 1, o.j, p.q, q0, q1);
  C sum[kWidth] = {}, g[kWidth];
  std::int32_t index[kWidth];
  for (int i = p0; i < p1; ++i) {
    for (int j = q0; j < q1; ++j) {
      load_indices<kWidth>(indices + p.indices.offset(o.n, o.c, i, j), index);
      load_channels<T, kWidth>(dy + p.y.offset(o.n, o.c, i, j), g);
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (index[k] == here) sum[k] += g[k];
    }
  }
  store_channels<T, kWidth>(static_cast<T*>(p.x.data) + p.x.offset(o.n, o.c, o.i, o.j), sum);
}

/// Elements that window (i, j) divides by.
__device__ int pool_divisor(const PoolProblem& p, int i, int j) {
  if (p.count_include_pad && !p.adaptive) return p.kernel[0] * p.kernel[1];
  int h0, h1, w0, w1;
  window(p, 0, i, p.h, h0, h1);
  window(p, 1, j, p.w, w0, w1);
  return (h1 - h0) * (w1 - w0);
}

template <class T, int kWidth>
__global__ void avg_pool2d_forward_kernel(PoolProblem p) {
  using C = compute_t<T>;
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= p.positions) return;
  const PoolPosition o = pool_position<kWidth>(p, static_cast<std::uint32_t>(at));
  const T* x = static_cast<const T*>(p.x.data);
  int h0, h1, w0, w1;
  window(p, 0, o.i, p.h, h0, h1);
  window(p, 1, o.j, p.w, w0, w1);
  C sum[kWidth] = {}, v[kWidth];
  for (int h = h0; h < h1; ++h) {
    for (int w = w0; w < w1; ++w) {
      load_channels<T, kWidth>(x + p.x.offset(o.n, o.c, h, w), v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += v[k];
    }
  }
  const C divisor = static_cast<C>(pool_divisor(p, o.i, o.j));
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sum[k] /= divisor;
  store_channels<T, kWidth>(static_cast<T*>(p.y.data) + p.y.offset(o.n, o.c, o.i, o.j), sum);
}

template <class T, int kWidth>
__global__ void avg_pool2d_backward_kernel(PoolProblem p) {
  using C = compute_t<T>;
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= p.positions) return;
  const PoolPosition o = pool_position<kWidth>(p, static_cast<std::uint32_t>(at));
  const T* dy = static_cast<const T*>(p.y.data);
  int p0, p1, q0, q1;
  covering_windows(p, 0, o.i, p.p, p0, p1);
  covering_windows(p, 1, o.j, p.q, q0, q1);
  C sum[kWidth] = {}, g[kWidth];
  for (int i = p0; i < p1; ++i) {
    for (int j = q0; j < q1; ++j) {
      load_channels<T, kWidth>(dy + p.y.offset(o.n, o.c, i, j), g);
      const C divisor = static_cast<C>(pool_divisor(p, i, j));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += g[k] / divisor;
    }
  }
  store_channels<T, kWidth>(static_cast<T*>(p.x.data) + p.x.offset(o.n, o.c, o.i, o.j), sum);
}

// ---- launching

PoolImage image_of(const View& v) {
  return {v.data, v.stride(0), v.stride(1), v.stride(2), v.stride(3)};
}

bool vectors_of(const View& v, std::int64_t width) {
  return is_packed(v, ConvLayout::channels_last) && v.size(1) % width == 0 && aligned(v.data, 16);
}

void check_pool(const char* op, const View& x, const View& y, const View* indices,
                const PoolGeometry& g) {
  MT_CHECK(x.dim() == 4 && y.dim() == 4 && y.size(0) == x.size(0) && y.size(1) == x.size(1), op,
           ": expected images of equal batch and channels, got ", x.sizes, " and ", y.sizes);
  MT_CHECK(is_floating(x.dtype) && x.dtype == y.dtype, op, ": expected one floating dtype, got ",
           x.dtype, " and ", y.dtype);
  for (int i = 0; i < 2 && !g.adaptive; ++i) {
    const std::int64_t room = x.size(2 + i) + 2 * g.padding[i] - g.kernel[i];
    MT_CHECK(g.kernel[i] >= 1 && g.stride[i] >= 1 && g.padding[i] >= 0 &&
                 2 * g.padding[i] <= g.kernel[i] && room >= 0 &&
                 y.size(2 + i) == room / g.stride[i] + 1,
             op, ": kernel ", g.kernel[i], ", stride ", g.stride[i], ", padding ", g.padding[i],
             " does not give ", y.sizes, " from ", x.sizes);
  }
  MT_CHECK(x.size(2) * x.size(3) <= 0x7FFFFFFF, op, ": expected images below 2^31 pixels, got ",
           x.sizes);
  if (indices != nullptr)
    MT_CHECK(indices->sizes == y.sizes && indices->dtype == Dtype::i32, op,
             ": expected int32 indices of ", y.sizes, ", got ", indices->dtype, " ",
             indices->sizes);
}

/// Runs kernel(p) over every element of `over` (y in forward passes, dx in backward ones).
template <class Launch>
void run_pool(const View& x, const View& y, const View* indices, const View& over,
              const PoolGeometry& g, int width, Launch&& launch_one) {
  PoolProblem p{};
  p.x = image_of(x);
  p.y = image_of(y);
  if (indices != nullptr) p.indices = image_of(*indices);
  p.h = static_cast<int>(x.size(2));
  p.w = static_cast<int>(x.size(3));
  p.p = static_cast<int>(y.size(2));
  p.q = static_cast<int>(y.size(3));
  for (int i = 0; i < 2; ++i) {
    p.kernel[i] = static_cast<int>(g.kernel[i]);
    p.stride[i] = static_cast<int>(g.stride[i]);
    p.padding[i] = static_cast<int>(g.padding[i]);
  }
  p.count_include_pad = g.count_include_pad;
  p.adaptive = g.adaptive;
  p.channels_last = width > 1 || !has_layout(over, ConvLayout::planar);
  const std::int64_t units = over.size(1) / width, rows = over.size(2), columns = over.size(3);
  p.last = FastDivide(p.channels_last ? units : columns);
  p.middle = FastDivide(p.channels_last ? columns : rows);
  p.first = FastDivide(p.channels_last ? rows : units);
  const std::int64_t image = units * rows * columns;
  MT_CHECK(image <= 0x7FFFFFFF, "pool2d: expected images below 2^31 elements, got ", over.sizes);
  const std::int64_t images_at_once = std::max<std::int64_t>(0x7FFFFFFF / image, 1);
  for (std::int64_t n = 0; n < over.size(0); n += images_at_once) {
    p.first_image = n;
    p.positions = std::min(images_at_once, over.size(0) - n) * image;
    launch_one(p);
  }
}

#define MT_LAUNCH_POOL(kernel, x, y, indices, over, vectorised)                                \
  dispatch_floating(#kernel, (x).dtype, [&](auto tag) {                                        \
    using T = typename decltype(tag)::type;                                                    \
    const cudaStream_t queue = native_stream(stream);                                          \
    if constexpr (!std::is_same_v<T, double>) {                                                \
      constexpr int kWidth = kPerVector<T>;                                                    \
      if (vectorised(kWidth))                                                                  \
        return run_pool(x, y, indices, over, geometry, kWidth, [&](const PoolProblem& p) {     \
          launch(kernel<T, kWidth>, blocks_for(p.positions, kThreads), kThreads, 0, queue, p); \
        });                                                                                    \
    }                                                                                          \
    run_pool(x, y, indices, over, geometry, 1, [&](const PoolProblem& p) {                     \
      launch(kernel<T, 1>, blocks_for(p.positions, kThreads), kThreads, 0, queue, p);          \
    });                                                                                        \
  })

}  // namespace

void max_pool2d_forward(const Stream& stream, View y, View indices, View x,
                        const PoolGeometry& geometry) {
  check_pool("max_pool2d_forward", x, y, &indices, geometry);
  if (y.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  const auto vectorised = [&](std::int64_t width) {
    return vectors_of(x, width) && vectors_of(y, width) && vectors_of(indices, width);
  };
  MT_LAUNCH_POOL(max_pool2d_forward_kernel, x, y, &indices, y, vectorised);
}

void max_pool2d_backward(const Stream& stream, View dx, View dy, View indices,
                         const PoolGeometry& geometry) {
  check_pool("max_pool2d_backward", dx, dy, &indices, geometry);
  if (dx.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  const auto vectorised = [&](std::int64_t width) {
    return vectors_of(dx, width) && vectors_of(dy, width) && vectors_of(indices, width);
  };
  MT_LAUNCH_POOL(max_pool2d_backward_kernel, dx, dy, &indices, dx, vectorised);
}

void avg_pool2d_forward(const Stream& stream, View y, View x, const PoolGeometry& geometry) {
  check_pool("avg_pool2d_forward", x, y, nullptr, geometry);
  if (y.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  const auto vectorised = [&](std::int64_t width) {
    return vectors_of(x, width) && vectors_of(y, width);
  };
  MT_LAUNCH_POOL(avg_pool2d_forward_kernel, x, y, nullptr, y, vectorised);
}

void avg_pool2d_backward(const Stream& stream, View dx, View dy, const PoolGeometry& geometry) {
  check_pool("avg_pool2d_backward", dx, dy, nullptr, geometry);
  if (dx.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  const auto vectorised = [&](std::int64_t width) {
    return vectors_of(dx, width) && vectors_of(dy, width);
  };
  MT_LAUNCH_POOL(avg_pool2d_backward_kernel, dx, dy, nullptr, dx, vectorised);
}

#undef MT_LAUNCH_POOL

}  // namespace mixtape::kernels::cuda
