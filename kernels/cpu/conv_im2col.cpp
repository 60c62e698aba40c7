// Convolution as matrix products over blocks of output pixels: the path that needs no library but
// Eigen. A block's columns (kernels/cpu/columns.h) are sized to stay in the second-level cache.
#include "engine/thread_pool.h"
#include "kernels/cpu/columns.h"
#include "kernels/cpu/conv.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu::im2col {
namespace {

constexpr std::int64_t kColumnElements = 1 << 17;  // of a block's columns
constexpr std::int64_t kSmallestBlock = 64;        // output pixels

/// How the output pixels of all images are cut into blocks.
struct Blocks {
  std::int64_t per_image, pixels, count;
  explicit Blocks(const ConvProblem& p) {
    const std::int64_t depth = std::max<std::int64_t>(1, p.depth());
    pixels = std::min(p.y.pixels(), std::max(kSmallestBlock, kColumnElements / depth));
    per_image = (p.y.pixels() + pixels - 1) / pixels;
    pixels = (p.y.pixels() + per_image - 1) / per_image;
    per_image = (p.y.pixels() + pixels - 1) / pixels;
    count = per_image * p.y.count;
  }
  ColumnBlock block(const ConvProblem& p, std::int64_t i, std::int64_t group) const {
    const std::int64_t begin = i % per_image * pixels;
    return {i / per_image, group, begin, std::min(p.y.pixels(), begin + pixels)};
  }
};

std::int64_t weight_elements(const ConvProblem& p) { return p.w.count * p.depth(); }

/// Strides of k = (channel, kernel position) in the columns of x's layout.
std::int64_t k_channel(const ConvProblem& p) { return p.x.channels_last ? 1 : p.w.pixels(); }
std::int64_t k_pixel(const ConvProblem& p) { return p.x.channels_last ? p.group_in() : 1; }

/// The weights as (O, K) in type C with the columns' order of k; `buffer` holds O * K elements and
/// is used only where their memory differs from that.
template <class C>
const C* pack_weights(const ConvProblem& p, C* buffer) {
  if (p.w.dtype == dtype_of<C> && (p.w.channel == k_channel(p) || p.w.channels == 1) &&
      (p.w.pixel == k_pixel(p) || p.w.pixels() == 1))
    return static_cast<const C*>(p.w.data);
  const std::int64_t depth = p.depth();
  parallel_for(0, p.w.count, row_grain(depth), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const row = frame.take<C>(depth);
    for (std::int64_t o = begin; o < end; ++o) {
      load_elements(p.w.dtype, p.w.at(o, 0, 0), row, depth);
      C* const to = buffer + o * depth;
      for (std::int64_t c = 0; c < p.w.channels; ++c)
        for (std::int64_t i = 0; i < p.w.pixels(); ++i)
          to[c * k_channel(p) + i * k_pixel(p)] = row[c * p.w.channel + i * p.w.pixel];
    }
  });
  return buffer;
}

template <class C>
C* weight_buffer(const char* op, const ConvProblem& p, Workspace workspace) {
  const std::size_t bytes = static_cast<std::size_t>(weight_elements(p)) * sizeof(C);
  MT_CHECK(workspace.bytes >= bytes, op, ": expected a workspace of ", bytes, " bytes, got ",
           workspace.bytes);
  return static_cast<C*>(workspace.data);
}

/// y's block of group g as a (group_out, pixels) operand of type C.
template <class C>
GemmOperand<C> load_output(const ConvProblem& p, const ColumnBlock& b, C* buffer) {
  const std::int64_t first = b.g * p.group_out(), rows = p.group_out();
  const Image& y = p.y;
  if (y.dtype == dtype_of<C>)
    return {static_cast<const C*>(y.at(b.n, first, b.begin)), y.channels_last ? y.pixel : y.channel,
            y.channels_last};
  const std::int64_t outer = y.channels_last ? b.pixels() : rows;
  const std::int64_t inner = y.channels_last ? rows : b.pixels();
  for (std::int64_t i = 0; i < outer; ++i)
    load_elements(y.dtype,
                  y.channels_last ? y.at(b.n, first, b.begin + i) : y.at(b.n, first + i, b.begin),
                  buffer + i * inner, inner);
  return {buffer, inner, y.channels_last};
}

/// One row of the output block: + bias, activation. `bias` has one value for each element, or
/// `one` serves all.
template <class C>
void finish_row(C* row, std::int64_t n, const C* bias, C one, bool relu) {
  for (std::int64_t i = 0; i < n; ++i) {
    const C v = row[i] + (bias != nullptr ? bias[i] : one);
    row[i] = relu && v <= 0 ? C(0) : v;
  }
}

/// Finishes the sums of a block, stored like y's block with leading dimension ld, and stores them.
template <class C>
void store_output(const ConvProblem& p, const ColumnBlock& b, C* sums, std::int64_t ld,
                  const C* bias) {
  const std::int64_t first = b.g * p.group_out(), rows = p.group_out();
  const bool last = p.y.channels_last, relu = p.activation == Activation::relu;
  const std::int64_t outer = last ? b.pixels() : rows, inner = last ? rows : b.pixels();
  for (std::int64_t i = 0; i < outer; ++i) {
    C* const row = sums + i * ld;
    if (bias != nullptr || relu)
      finish_row(row, inner, last && bias != nullptr ? bias + first : nullptr,
                 !last && bias != nullptr ? bias[first + i] : C(0), relu);
    if (p.y.dtype != dtype_of<C>)
      store_elements(p.y.dtype,
                     last ? p.y.at(b.n, first, b.begin + i) : p.y.at(b.n, first + i, b.begin), row,
                     inner);
  }
}

template <class C>
void forward_block(const ConvProblem& p, const ColumnBlock& b, const C* weights, const C* bias,
                   C* column_buffer, C* sum_buffer) {
  const std::int64_t rows = p.group_out(), depth = p.depth(), pixels = b.pixels();
  const GemmOperand<C> x = columns(p, b, column_buffer);
  const GemmOperand<C> w{weights + b.g * rows * depth, depth, false};
  const bool direct = p.y.dtype == dtype_of<C>, last = p.y.channels_last;
  C* const sums = direct ? static_cast<C*>(p.y.at(b.n, b.g * rows, b.begin)) : sum_buffer;
  if (last) {
    const std::int64_t ld = direct ? p.y.pixel : rows;
    gemm(pixels, rows, depth, C(1), {x.data, x.ld, !x.transposed}, {w.data, w.ld, true}, C(0), sums,
         ld);
    store_output(p, b, sums, ld, bias);
  } else {
    const std::int64_t ld = direct ? p.y.channel : pixels;
    gemm(rows, pixels, depth, C(1), w, x, C(0), sums, ld);
    store_output(p, b, sums, ld, bias);
  }
}

template <class C>
void forward_as(const ConvProblem& p, Workspace workspace) {
  const C* const weights = pack_weights(p, weight_buffer<C>("conv2d_forward", p, workspace));
  const Blocks blocks(p);
  parallel_for(0, blocks.count, 1, [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const column_buffer = frame.take<C>(p.depth() * blocks.pixels);
    C* const sum_buffer = frame.take<C>(p.group_out() * blocks.pixels);
    C* bias = nullptr;
    if (p.bias) {
      bias = frame.take<C>(p.y.channels);
      load_elements(p.bias.dtype, p.bias.data, bias, p.y.channels);
    }
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t g = 0; g < p.groups; ++g)
        forward_block(p, blocks.block(p, i, g), weights, bias, column_buffer, sum_buffer);
  });
}

/// dx of one image: the columns' gradient, (K, pixels) = w^T dy, added where the columns came from.
template <class C>
void backward_image(const ConvProblem& p, const Blocks& blocks, std::int64_t n, const C* weights,
                    C* column_buffer, C* dy_buffer, C* image_buffer) {
  const bool direct = p.x.dtype == dtype_of<C>;
  C* const image = direct ? static_cast<C*>(p.x.at(n, 0, 0)) : image_buffer;
  std::fill(image, image + p.x.elements(), C(0));
  const std::int64_t rows = p.group_out(), depth = p.depth();
  for (std::int64_t i = n * blocks.per_image; i < (n + 1) * blocks.per_image; ++i)
    for (std::int64_t g = 0; g < p.groups; ++g) {
      const ColumnBlock b = blocks.block(p, i, g);
      const GemmOperand<C> dy = load_output(p, b, dy_buffer);
      const C* const w = weights + g * rows * depth;
      if (p.x.channels_last)
        gemm(b.pixels(), depth, rows, C(1), {dy.data, dy.ld, !dy.transposed}, {w, depth, false},
             C(0), column_buffer, depth);
      else
        gemm(depth, b.pixels(), rows, C(1), {w, depth, true}, dy, C(0), column_buffer, b.pixels());
      scatter_columns(p, b, column_buffer, image);
    }
  if (!direct) store_elements(p.x.dtype, p.x.at(n, 0, 0), image, p.x.elements());
}

template <class C>
void backward_data_as(const ConvProblem& p, Workspace workspace) {
  const C* const weights = pack_weights(p, weight_buffer<C>("conv2d_backward_data", p, workspace));
  const Blocks blocks(p);
  parallel_for(0, p.x.count, 1, [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const column_buffer = frame.take<C>(p.depth() * blocks.pixels);
    C* const dy_buffer = frame.take<C>(p.group_out() * blocks.pixels);
    C* const image_buffer = p.x.dtype == dtype_of<C> ? nullptr : frame.take<C>(p.x.elements());
    for (std::int64_t n = begin; n < end; ++n)
      backward_image(p, blocks, n, weights, column_buffer, dy_buffer, image_buffer);
  });
}

/// Number of partial weight gradients: one for each thread that has blocks to work on.
std::int64_t partial_gradients(const ConvProblem& p) {
  return std::clamp<std::int64_t>(Blocks(p).count, 1, num_threads());
}

/// partial (O, K) = sum over blocks [begin, end) of dy columns^T.
template <class C>
void weight_gradient(const ConvProblem& p, const Blocks& blocks, std::int64_t begin,
                     std::int64_t end, C* partial) {
  const std::int64_t rows = p.group_out(), depth = p.depth();
  ScratchFrame frame;
  C* const column_buffer = frame.take<C>(depth * blocks.pixels);
  C* const dy_buffer = frame.take<C>(rows * blocks.pixels);
  for (std::int64_t i = begin; i < end; ++i)
    for (std::int64_t g = 0; g < p.groups; ++g) {
      const ColumnBlock b = blocks.block(p, i, g);
      const GemmOperand<C> dy = load_output(p, b, dy_buffer);
      const GemmOperand<C> x = columns(p, b, column_buffer);
      gemm(rows, depth, b.pixels(), C(1), dy, {x.data, x.ld, !x.transposed},
           i == begin ? C(0) : C(1), partial + g * rows * depth, depth);
    }
}

template <class C>
void backward_weight_as(const ConvProblem& p, float beta, Workspace workspace) {
  C* const partial = weight_buffer<C>("conv2d_backward_weight", p, workspace);
  const std::int64_t elements = weight_elements(p);
  const Blocks blocks(p);
  const auto room = static_cast<std::int64_t>(workspace.bytes / sizeof(C)) / elements;
  const std::int64_t parts = std::min(room, partial_gradients(p));
  parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      weight_gradient(p, blocks, blocks.count * i / parts, blocks.count * (i + 1) / parts,
                      partial + i * elements);
  });
  reduce_weight_gradients(p.w, partial, parts, k_channel(p), k_pixel(p), beta);
}

}  // namespace

std::size_t workspace_bytes(ConvPass pass, const ConvProblem& p) {
  const std::size_t element = size_of(compute_dtype(p.x.dtype));
  const std::int64_t copies = pass == ConvPass::backward_weight ? partial_gradients(p) : 1;
  return static_cast<std::size_t>(weight_elements(p) * copies) * element;
}

void forward(const ConvProblem& p, Workspace workspace) {
  p.x.dtype == Dtype::f64 ? forward_as<double>(p, workspace) : forward_as<float>(p, workspace);
}
void backward_data(const ConvProblem& p, Workspace workspace) {
  p.y.dtype == Dtype::f64 ? backward_data_as<double>(p, workspace)
                          : backward_data_as<float>(p, workspace);
}
void backward_weight(const ConvProblem& p, float beta, Workspace workspace) {
  p.y.dtype == Dtype::f64 ? backward_weight_as<double>(p, beta, workspace)
                          : backward_weight_as<float>(p, beta, workspace);
}

}  // namespace mixtape::kernels::cpu::im2col
