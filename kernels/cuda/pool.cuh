// What the pooling kernels share: the problem, and walking over (n, c, i, j) in memory order.
//
// A thread handles `kWidth` neighbouring channels of one position: 16 bytes of a channels-last
// tensor, or a single element in either layout.
#pragma once

#include "kernels/conv.h"
#include "kernels/cuda/channel_vectors.cuh"
#include "kernels/cuda/conv_layout.h"
#include "kernels/cuda/fast_divide.cuh"
#include "kernels/cuda/launch.cuh"

namespace mixtape::kernels::cuda {

struct PoolImage {
  void* data;
  std::int64_t batch, channel, row, pixel;  // strides, elements

  __device__ std::int64_t offset(std::int64_t n, std::int64_t c, int i, int j) const {
    return n * batch + c * channel + i * row + j * pixel;
  }
};

struct PoolProblem {
  PoolImage x, y, indices;  // x or dx; y or dy
  int h, w, p, q;
  int kernel[2], stride[2], padding[2];
  bool count_include_pad, adaptive;
  // Decomposition of a thread's position: channels-last (n, i, j, c), else (n, c, i, j).
  bool channels_last;
  FastDivide last, middle, first;  // fastest to slowest dimension but one
  std::int64_t positions;          // of one launch
  std::int64_t first_image;        // added to n: launches are split over 2^31 positions
};

struct PoolPosition {
  std::int64_t n, c;
  int i, j;
};

template <int kWidth>
__device__ __forceinline__ PoolPosition pool_position(const PoolProblem& p, std::uint32_t at) {
  std::uint32_t rest = at;
  const std::uint32_t b = p.last.divide(rest);  // rest: fastest
  std::uint32_t c = b;
  const std::uint32_t d = p.middle.divide(c);  // c: next
  std::uint32_t e = d;
  const std::uint32_t n = p.first.divide(e);  // e: next, n: slowest
  if (p.channels_last)
    return {p.first_image + n, static_cast<std::int64_t>(rest) * kWidth, static_cast<int>(e),
            static_cast<int>(c)};
  return {p.first_image + n, e, static_cast<int>(c), static_cast<int>(rest)};
}

/// kWidth 32-bit indices: 4 a vector.
template <int kWidth>
__device__ __forceinline__ void load_indices(const std::int32_t* p, std::int32_t (&v)[kWidth]) {
  if constexpr (kWidth == 1) {
    v[0] = *p;
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) {
      const int4 quad = *reinterpret_cast<const int4*>(p + k);
      v[k] = quad.x;
      v[k + 1] = quad.y;
      v[k + 2] = quad.z;
      v[k + 3] = quad.w;
    }
  }
}
template <int kWidth>
__device__ __forceinline__ void store_indices(std::int32_t* p, const std::int32_t (&v)[kWidth]) {
  if constexpr (kWidth == 1) {
    *p = v[0];
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4)
      store_vector(p + k,
                   make_uint4(static_cast<unsigned>(v[k]), static_cast<unsigned>(v[k + 1]),
                              static_cast<unsigned>(v[k + 2]), static_cast<unsigned>(v[k + 3])));
  }
}

/// The windows (outputs) that cover input position `at`, along dimension d: [begin, end).
__device__ __forceinline__ void covering_windows(const PoolProblem& p, int d, int at, int count,
                                                 int& begin, int& end) {
  if (p.adaptive) {
    const std::int64_t size = d == 0 ? p.h : p.w, outputs = count;
    begin = static_cast<int>(at * outputs / size);
    end = static_cast<int>(((at + 1) * outputs + size - 1) / size);
    return;
  }
  const int shifted = at + p.padding[d];
  begin = shifted < p.kernel[d] ? 0 : (shifted - p.kernel[d]) / p.stride[d] + 1;
  end = min(shifted / p.stride[d] + 1, count);
}

/// The part of window `at` inside the image, along dimension d: [begin, end).
__device__ __forceinline__ void window(const PoolProblem& p, int d, int at, int size, int& begin,
                                       int& end) {
  if (p.adaptive) {
    const std::int64_t outputs = d == 0 ? p.p : p.q;
    begin = static_cast<int>(at * std::int64_t{size} / outputs);
    end = static_cast<int>(((at + 1) * std::int64_t{size} + outputs - 1) / outputs);
    return;
  }
  begin = at * p.stride[d] - p.padding[d];
  end = min(begin + p.kernel[d], size);
  begin = max(begin, 0);
}

}  // namespace mixtape::kernels::cuda
