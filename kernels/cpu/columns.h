// im2col and its transpose for a block of output pixels of one image and group.
//
// The columns matrix has K = C / G * R * S values for each output pixel. For planar images it is
// stored (K, pixels) with k = (c, r, s), so that whole runs of a row are copied; for channels-last
// images (pixels, K) with k = (r, s, c), so that whole pixels are.
#pragma once

#include <algorithm>

#include "kernels/cpu/conv.h"
#include "kernels/cpu/gemm.h"

namespace mixtape::kernels::cpu {

/// Output pixels [begin, end) of image n, input channels of group g.
struct ColumnBlock {
  std::int64_t n, g, begin, end;
  std::int64_t pixels() const { return end - begin; }
};

/// Positions t in [0, count) for which start + t * step lies in [0, size): [first, last).
struct Valid {
  std::int64_t first, last;
  Valid(std::int64_t start, std::int64_t step, std::int64_t count, std::int64_t size) {
    first = start >= 0 ? 0 : (-start + step - 1) / step;
    last = start >= size ? 0 : (size - start + step - 1) / step;
    first = std::min(first, count);
    last = std::clamp(last, first, count);
  }
};

/// Calls f(offset, count, row, col) for the runs of the block that lie in one output row: `offset`
/// pixels into the block, `count` long, from output (row, col).
template <class F>
inline void for_each_run(const ConvProblem& p, const ColumnBlock& b, F&& f) {
  for (std::int64_t pixel = b.begin; pixel < b.end;) {
    const std::int64_t row = pixel / p.y.width, col = pixel % p.y.width;
    const std::int64_t count = std::min(p.y.width - col, b.end - pixel);
    f(pixel - b.begin, count, row, col);
    pixel += count;
  }
}

/// x's block as columns, T x's storage type. Values outside of the image are 0.
template <class C, class T>
void gather_columns(const ConvProblem& p, const ColumnBlock& b, C* col) {
  const std::int64_t kernel_h = p.w.height, kernel_w = p.w.width, channels = p.group_in();
  const auto* const image = static_cast<const T*>(p.x.at(b.n, b.g * channels, 0));
  for_each_run(
      p, b, [&](std::int64_t offset, std::int64_t count, std::int64_t row, std::int64_t column) {
        for (std::int64_t r = 0; r < kernel_h; ++r) {
          const std::int64_t i = row * p.stride[0] - p.padding[0] + r * p.dilation[0];
          const bool inside = i >= 0 && i < p.x.height;
          for (std::int64_t s = 0; s < kernel_w; ++s) {
            const std::int64_t j = column * p.stride[1] - p.padding[1] + s * p.dilation[1];
            const Valid v = inside ? Valid(j, p.stride[1], count, p.x.width) : Valid(0, 1, 0, 0);
            const T* const from = image + (inside ? i * p.x.width * p.x.pixel : 0);
            if (p.x.channels_last) {
              C* const to = col + offset * p.depth() + (r * kernel_w + s) * channels;
              for (std::int64_t t = 0; t < count; ++t) {
                C* const dst = to + t * p.depth();
                if (t < v.first || t >= v.last)
                  std::fill(dst, dst + channels, C(0));
                else
                  convert(from + (j + t * p.stride[1]) * p.x.pixel, dst, channels);
              }
              continue;
            }
            for (std::int64_t c = 0; c < channels; ++c) {
              C* const dst = col + ((c * kernel_h + r) * kernel_w + s) * b.pixels() + offset;
              const T* const src = from + c * p.x.channel + j;
              std::fill(dst, dst + v.first, C(0));
              if (p.stride[1] == 1)
                convert(src + v.first, dst + v.first, v.last - v.first);
              else
                for (std::int64_t t = v.first; t < v.last; ++t)
                  convert(src + t * p.stride[1], dst + t, 1);
              std::fill(dst + v.last, dst + count, C(0));
            }
          }
        }
      });
}

/// Adds the columns of a gradient into `image`, the gradient of x's image n in type C, dense in x's
/// layout.
template <class C>
void scatter_columns(const ConvProblem& p, const ColumnBlock& b, const C* col, C* image) {
  const std::int64_t kernel_h = p.w.height, kernel_w = p.w.width, channels = p.group_in();
  C* const group = image + b.g * channels * p.x.channel;
  for_each_run(
      p, b, [&](std::int64_t offset, std::int64_t count, std::int64_t row, std::int64_t column) {
        for (std::int64_t r = 0; r < kernel_h; ++r) {
          const std::int64_t i = row * p.stride[0] - p.padding[0] + r * p.dilation[0];
          if (i < 0 || i >= p.x.height) continue;
          C* const to = group + i * p.x.width * p.x.pixel;
          for (std::int64_t s = 0; s < kernel_w; ++s) {
            const std::int64_t j = column * p.stride[1] - p.padding[1] + s * p.dilation[1];
            const Valid v(j, p.stride[1], count, p.x.width);
            if (p.x.channels_last) {
              for (std::int64_t t = v.first; t < v.last; ++t) {
                const C* const src = col + (offset + t) * p.depth() + (r * kernel_w + s) * channels;
                C* const dst = to + (j + t * p.stride[1]) * p.x.pixel;
                for (std::int64_t c = 0; c < channels; ++c) dst[c] += src[c];
              }
              continue;
            }
            for (std::int64_t c = 0; c < channels; ++c) {
              const C* const src = col + ((c * kernel_h + r) * kernel_w + s) * b.pixels() + offset;
              C* const dst = to + c * p.x.channel + j;
              if (p.stride[1] == 1)
                for (std::int64_t t = v.first; t < v.last; ++t) dst[t] += src[t];
              else
                for (std::int64_t t = v.first; t < v.last; ++t) dst[t * p.stride[1]] += src[t];
            }
          }
        }
      });
}

/// Whether the columns of a planar or channels-last image are its pixels as they lie.
inline bool columns_are_pixels(const ConvProblem& p) {
  return p.w.pixels() == 1 && p.stride[0] == 1 && p.stride[1] == 1 && p.padding[0] == 0 &&
         p.padding[1] == 0;
}

/// The block's columns as a (K, pixels) operand: x's own memory where that is the same, else
/// gathered into `buffer` (K * pixels).
template <class C>
GemmOperand<C> columns(const ConvProblem& p, const ColumnBlock& b, C* buffer) {
  if (columns_are_pixels(p) && p.x.dtype == dtype_of<C>) {
    const auto* const at = static_cast<const C*>(p.x.at(b.n, b.g * p.group_in(), b.begin));
    return {at, p.x.channels_last ? p.x.pixel : p.x.channel, p.x.channels_last};
  }
  dispatch_floating("conv2d", p.x.dtype, [&](auto tag) {
    gather_columns<C, typename decltype(tag)::type>(p, b, buffer);
  });
  return {buffer, p.x.channels_last ? p.depth() : b.pixels(), p.x.channels_last};
}

}  // namespace mixtape::kernels::cpu
