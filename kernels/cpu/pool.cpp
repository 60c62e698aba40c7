// Max and average pooling on the CPU.
//
// One task is a (n, c) plane of planar images, or an image of channels-last ones, and belongs to
// one thread; windows are visited in order, so that overlapping ones add into a gradient in the
// same order every time. Gradients of 16-bit types are added up in float.
#include <cmath>
#include <limits>

#include "engine/thread_pool.h"
#include "kernels/cpu/conv.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

struct PoolProblem {
  Image x, y;  // large and small side
  PoolGeometry g;
};

PoolProblem make_pool(const char* op, const View& x, const View& y, const PoolGeometry& g) {
  PoolProblem p{make_image(op, "x", x), make_image(op, "y", y), g};
  MT_CHECK(p.x.count == p.y.count && p.x.channels == p.y.channels, op,
           ": expected equal batch and channels, got ", x.sizes, " and ", y.sizes);
  MT_CHECK(p.x.channels_last == p.y.channels_last || p.x.pixels() == 1 || p.y.pixels() == 1 ||
               p.x.channels == 1,
           op, ": expected both sides in the same layout");
  for (int i = 0; i < 2 && !g.adaptive; ++i) {
    MT_CHECK(
        g.kernel[i] > 0 && g.stride[i] > 0 && g.padding[i] >= 0 && 2 * g.padding[i] <= g.kernel[i],
        op, ": expected padding of at most half the kernel, got kernel ", g.kernel[i], " padding ",
        g.padding[i]);
    MT_CHECK(y.size(2 + i) == 0 || (y.size(2 + i) - 1) * g.stride[i] - g.padding[i] < x.size(2 + i),
             op, ": expected every window to touch the input, got output ", y.sizes, " of ",
             x.sizes);
  }
  return p;
}

/// A window's rows or columns: [begin, end) of the input.
struct Window {
  std::int64_t begin, end;
  /// Of output `out` along dimension `dim`, of which there are `outputs`, over `size` inputs.
  Window(std::int64_t out, std::int64_t outputs, const PoolGeometry& g, int dim,
         std::int64_t size) {
    if (g.adaptive) {
      begin = out * size / outputs;
      end = ((out + 1) * size + outputs - 1) / outputs;
      return;
    }
    begin = out * g.stride[dim] - g.padding[dim];
    end = std::min(begin + g.kernel[dim], size);
    begin = std::max<std::int64_t>(0, begin);
  }
};

Window rows_of(const PoolProblem& p, std::int64_t row) {
  return {row, p.y.height, p.g, 0, p.x.height};
}
Window columns_of(const PoolProblem& p, std::int64_t column) {
  return {column, p.y.width, p.g, 1, p.x.width};
}

/// Elements that average pooling divides by.
std::int64_t divisor(const PoolProblem& p, std::int64_t row, std::int64_t col) {
  const auto padded = [&](std::int64_t out, int dim, std::int64_t size) {
    const std::int64_t begin = out * p.g.stride[dim] - p.g.padding[dim];
    return std::min(begin + p.g.kernel[dim], size + p.g.padding[dim]) - begin;
  };
  if (p.g.count_include_pad && !p.g.adaptive)
    return padded(row, 0, p.x.height) * padded(col, 1, p.x.width);
  const Window r = rows_of(p, row), c = columns_of(p, col);
  return (r.end - r.begin) * (c.end - c.begin);
}

/// Runs f(n, c, channels) for runs of channels whose elements lie side by side: single channels of
/// planar images, all of channels-last ones.
template <class F>
void for_each_task(const PoolProblem& p, F&& f) {
  const bool last = p.x.channels_last || p.y.channels_last;
  const std::int64_t tasks = p.x.count * (last ? 1 : p.x.channels);
  const std::int64_t size = (p.x.pixels() + p.y.pixels()) * (last ? p.x.channels : 1);
  parallel_for(0, tasks, row_grain(size), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      last ? f(t, std::int64_t{0}, p.x.channels)
           : f(t / p.x.channels, t % p.x.channels, std::int64_t{1});
  });
}

/// True if v replaces `best`: it is larger, or the first NaN.
template <class C>
bool beats(C v, C best) {
  return v > best || (v != v && best == best);
}

template <class T>
void max_forward(const PoolProblem& p, std::int32_t* indices) {
  using C = compute_t<T>;
  for_each_task(p, [&](std::int64_t n, std::int64_t first, std::int64_t channels) {
    const auto* const x = static_cast<const T*>(p.x.at(n, first, 0));
    auto* const y = static_cast<T*>(p.y.at(n, first, 0));
    std::int32_t* const index = indices + n * p.y.elements() + first * p.y.channel;
    ScratchFrame frame;
    C* const best = frame.take<C>(channels);
    for (std::int64_t row = 0; row < p.y.height; ++row)
      for (std::int64_t col = 0; col < p.y.width; ++col) {
        const Window r = rows_of(p, row), c = columns_of(p, col);
        const std::int64_t out = (row * p.y.width + col) * p.y.pixel;
        for (std::int64_t i = r.begin; i < r.end; ++i)
          for (std::int64_t j = c.begin; j < c.end; ++j) {
            const std::int64_t at = i * p.x.width + j;
            const bool start = i == r.begin && j == c.begin;
            for (std::int64_t k = 0; k < channels; ++k) {
              const C v = static_cast<C>(x[at * p.x.pixel + k]);
              if (!start && !beats(v, best[k])) continue;
              best[k] = v;
              index[out + k] = static_cast<std::int32_t>(at);
            }
          }
        for (std::int64_t k = 0; k < channels; ++k) y[out + k] = static_cast<T>(best[k]);
      }
  });
}

/// Calls f(sums, n, first, channels) with zeros to add one task's gradient into, laid out like its
/// part of x, then stores them there.
template <class T, class F>
void accumulate(const PoolProblem& p, F&& f) {
  using C = compute_t<T>;
  for_each_task(p, [&](std::int64_t n, std::int64_t first, std::int64_t channels) {
    auto* const dx = static_cast<T*>(p.x.at(n, first, 0));
    const std::int64_t size = p.x.pixels() * channels;
    ScratchFrame frame;
    C* sums = nullptr;
    if constexpr (std::is_same_v<C, T>)
      sums = dx;
    else
      sums = frame.take<C>(size);
    std::fill(sums, sums + size, C(0));
    f(sums, n, first, channels);
    if constexpr (!std::is_same_v<C, T>) convert(sums, dx, size);
  });
}

template <class T>
void max_backward(const PoolProblem& p, const std::int32_t* indices) {
  using C = compute_t<T>;
  accumulate<T>(p, [&](C* sums, std::int64_t n, std::int64_t first, std::int64_t channels) {
    const auto* const dy = static_cast<const T*>(p.y.at(n, first, 0));
    const std::int32_t* const index = indices + n * p.y.elements() + first * p.y.channel;
    for (std::int64_t i = 0; i < p.y.pixels(); ++i)
      for (std::int64_t k = 0; k < channels; ++k) {
        const std::int64_t at = i * p.y.pixel + k;
        sums[index[at] * p.x.pixel + k] += static_cast<C>(dy[at]);
      }
  });
}

template <class T>
void average_forward(const PoolProblem& p) {
  using C = compute_t<T>;
  for_each_task(p, [&](std::int64_t n, std::int64_t first, std::int64_t channels) {
    const auto* const x = static_cast<const T*>(p.x.at(n, first, 0));
    auto* const y = static_cast<T*>(p.y.at(n, first, 0));
    ScratchFrame frame;
    C* const sum = frame.take<C>(channels);
    for (std::int64_t row = 0; row < p.y.height; ++row)
      for (std::int64_t col = 0; col < p.y.width; ++col) {
        const Window r = rows_of(p, row), c = columns_of(p, col);
        std::fill(sum, sum + channels, C(0));
        for (std::int64_t i = r.begin; i < r.end; ++i)
          for (std::int64_t j = c.begin; j < c.end; ++j)
            for (std::int64_t k = 0; k < channels; ++k)
              sum[k] += static_cast<C>(x[(i * p.x.width + j) * p.x.pixel + k]);
        const C count = static_cast<C>(divisor(p, row, col));
        for (std::int64_t k = 0; k < channels; ++k)
          y[(row * p.y.width + col) * p.y.pixel + k] = static_cast<T>(sum[k] / count);
      }
  });
}

template <class T>
void average_backward(const PoolProblem& p) {
  using C = compute_t<T>;
  accumulate<T>(p, [&](C* sums, std::int64_t n, std::int64_t first, std::int64_t channels) {
    const auto* const dy = static_cast<const T*>(p.y.at(n, first, 0));
    for (std::int64_t row = 0; row < p.y.height; ++row)
      for (std::int64_t col = 0; col < p.y.width; ++col) {
        const Window r = rows_of(p, row), c = columns_of(p, col);
        const C share = 1 / static_cast<C>(divisor(p, row, col));
        const T* const from = dy + (row * p.y.width + col) * p.y.pixel;
        for (std::int64_t i = r.begin; i < r.end; ++i)
          for (std::int64_t j = c.begin; j < c.end; ++j)
            for (std::int64_t k = 0; k < channels; ++k)
              sums[(i * p.x.width + j) * p.x.pixel + k] += static_cast<C>(from[k]) * share;
      }
  });
}

/// The indices, which lie like y: dense, in the same layout.
std::int32_t* check_indices(const char* op, const View& indices, const PoolProblem& p,
                            const View& y) {
  const Image m = make_image(op, "indices", indices);
  MT_CHECK(indices.dtype == Dtype::i32 && indices.sizes == y.sizes &&
               m.channels_last == p.y.channels_last && m.batch == m.elements(),
           op, ": expected int32 indices laid out like y, got ", indices.dtype, " ", indices.sizes,
           " strides ", indices.strides);
  MT_CHECK(p.x.pixels() <= std::numeric_limits<std::int32_t>::max(), op,
           ": expected planes of fewer than 2^31 elements, got ", p.x.pixels());
  return indices.ptr<std::int32_t>();
}

}  // namespace

void max_pool2d_forward(const Stream&, View y, View indices, View x, const PoolGeometry& geometry) {
  const PoolProblem p = make_pool("max_pool2d", x, y, geometry);
  MT_CHECK_EQ(y.dtype, x.dtype, "max_pool2d: dtype of y");
  if (y.numel() == 0) return;
  std::int32_t* const index = check_indices("max_pool2d", indices, p, y);
  dispatch_floating("max_pool2d", x.dtype,
                    [&](auto tag) { max_forward<typename decltype(tag)::type>(p, index); });
}

void max_pool2d_backward(const Stream&, View dx, View dy, View indices,
                         const PoolGeometry& geometry) {
  const PoolProblem p = make_pool("max_pool2d_backward", dx, dy, geometry);
  MT_CHECK_EQ(dy.dtype, dx.dtype, "max_pool2d_backward: dtype of dy");
  if (dx.numel() == 0) return;
  const std::int32_t* const index = check_indices("max_pool2d_backward", indices, p, dy);
  dispatch_floating("max_pool2d_backward", dx.dtype,
                    [&](auto tag) { max_backward<typename decltype(tag)::type>(p, index); });
}

void avg_pool2d_forward(const Stream&, View y, View x, const PoolGeometry& geometry) {
  const PoolProblem p = make_pool("avg_pool2d", x, y, geometry);
  MT_CHECK_EQ(y.dtype, x.dtype, "avg_pool2d: dtype of y");
  if (y.numel() == 0) return;
  dispatch_floating("avg_pool2d", x.dtype,
                    [&](auto tag) { average_forward<typename decltype(tag)::type>(p); });
}

void avg_pool2d_backward(const Stream&, View dx, View dy, const PoolGeometry& geometry) {
  const PoolProblem p = make_pool("avg_pool2d_backward", dx, dy, geometry);
  MT_CHECK_EQ(dy.dtype, dx.dtype, "avg_pool2d_backward: dtype of dy");
  if (dx.numel() == 0) return;
  dispatch_floating("avg_pool2d_backward", dx.dtype,
                    [&](auto tag) { average_backward<typename decltype(tag)::type>(p); });
}

}  // namespace mixtape::kernels::cpu
