// Convolution on the CPU: checks, choice of path, and the bias gradient.
#include "kernels/cpu/conv.h"

#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

/// Output size by the usual rule, floor((size + 2 padding - dilation (kernel - 1) - 1) / stride)
/// + 1.
std::int64_t output_size(std::int64_t size, std::int64_t kernel, std::int64_t stride,
                         std::int64_t padding, std::int64_t dilation) {
  const std::int64_t room = size + 2 * padding - dilation * (kernel - 1) - 1;
  return room < 0 ? 0 : room / stride + 1;
}

[[maybe_unused]] bool takes_onednn([[maybe_unused]] const ConvProblem& p) {
#if defined(MIXTAPE_WITH_ONEDNN)
  return p.x.dtype != Dtype::f64 && p.depth() > 0;
#else
  return false;
#endif
}

bool has_output(const ConvProblem& p) { return p.y.count * p.y.elements() > 0; }

void zero(const Image& image) {
  for (std::int64_t n = 0; n < image.count; ++n)
    std::memset(image.at(n, 0, 0), 0,
                static_cast<std::size_t>(image.elements()) * size_of(image.dtype));
}

}  // namespace

Image make_image(const char* op, const char* name, const View& v) {
  MT_CHECK(v.dim() == 4, op, ": expected 4 dimensions for ", name, ", got ", v.sizes);
  Image m{v.data, v.dtype, v.size(0), v.size(1), v.size(2), v.size(3), 0, 0, 0, false};
  const auto dense = [&](std::int64_t channel, std::int64_t pixel) {
    return (m.channels <= 1 || v.stride(1) == channel) &&
           (m.height <= 1 || v.stride(2) == pixel * m.width) &&
           (m.width <= 1 || v.stride(3) == pixel);
  };
  const bool planar = dense(m.pixels(), 1);
  m.channels_last = !planar && dense(1, m.channels);
  MT_CHECK(planar || m.channels_last || v.numel() == 0, op, ": expected ", name,
           " contiguous or channels-last, got sizes ", v.sizes, " strides ", v.strides);
  m.channel = m.channels_last ? 1 : m.pixels();
  m.pixel = m.channels_last ? m.channels : 1;
  m.batch = m.count > 1 ? v.stride(0) : m.elements();
  return m;
}

ConvProblem make_problem(const char* op, const Conv2dArgs& args) {
  const ConvGeometry& g = args.geometry;
  ConvProblem p{make_image(op, "x", args.x),
                make_image(op, "y", args.y),
                make_image(op, "w", args.w),
                args.bias,
                args.activation,
                g.groups,
                {g.stride[0], g.stride[1]},
                {g.padding[0], g.padding[1]},
                {g.dilation[0], g.dilation[1]}};
  MT_CHECK(p.w.batch == p.w.elements(), op, ": expected dense weights, got strides ",
           args.w.strides);
  MT_CHECK(g.groups > 0 && p.x.channels == p.w.channels * g.groups && p.y.channels == p.w.count &&
               p.w.count % g.groups == 0,
           op, ": expected weights (O, C / ", g.groups, ", R, S) for x ", args.x.sizes, ", got ",
           args.w.sizes);
  for (int i = 0; i < 2; ++i) {
    MT_CHECK(g.stride[i] > 0 && g.dilation[i] > 0 && g.padding[i] >= 0, op,
             ": expected positive stride and dilation and no negative padding");
    MT_CHECK_EQ(args.y.size(2 + i),
                output_size(args.x.size(2 + i), args.w.size(2 + i), g.stride[i], g.padding[i],
                            g.dilation[i]),
                op, ": output size ", i);
  }
  MT_CHECK_EQ(p.y.count, p.x.count, op, ": batch size of y");
  MT_CHECK(is_floating(p.x.dtype) && p.x.dtype == p.y.dtype, op,
           ": expected x and y of one floating dtype, got ", p.x.dtype, " and ", p.y.dtype);
  MT_CHECK(!args.bias || args.bias.numel() == p.y.channels, op, ": expected a bias of ",
           p.y.channels, " elements, got ", args.bias.sizes);
  MT_CHECK(args.activation == Activation::none || args.activation == Activation::relu, op,
           ": expected no activation or relu");
  return p;
}

template <class C>
void reduce_weight_gradients(const Image& dw, const C* partial, std::int64_t count,
                             std::int64_t k_channel, std::int64_t k_pixel, float beta) {
  const std::int64_t depth = dw.elements(), all = dw.count * depth;
  parallel_for(0, dw.count, row_grain(depth * (count + 1)),
               [&](std::int64_t begin, std::int64_t end) {
                 ScratchFrame frame;
                 C* const row = frame.take<C>(depth);
                 for (std::int64_t o = begin; o < end; ++o) {
                   void* const to = dw.at(o, 0, 0);
                   if (beta != 0) load_elements(dw.dtype, to, row, depth);
                   for (std::int64_t c = 0; c < dw.channels; ++c)
                     for (std::int64_t p = 0; p < dw.pixels(); ++p) {
                       const std::int64_t from = o * depth + c * k_channel + p * k_pixel;
                       C sum = 0;
                       for (std::int64_t i = 0; i < count; ++i) sum += partial[i * all + from];
                       C& value = row[c * dw.channel + p * dw.pixel];
                       value = beta != 0 ? sum + static_cast<C>(beta) * value : sum;
                     }
                   store_elements(dw.dtype, to, row, depth);
                 }
               });
}
template void reduce_weight_gradients(const Image&, const float*, std::int64_t, std::int64_t,
                                      std::int64_t, float);
template void reduce_weight_gradients(const Image&, const double*, std::int64_t, std::int64_t,
                                      std::int64_t, float);

std::size_t conv2d_workspace_bytes(ConvPass pass, const Conv2dArgs& args) {
  const ConvProblem p = make_problem("conv2d", args);
  if (!has_output(p) || p.w.count * p.depth() == 0) return 0;
#if defined(MIXTAPE_WITH_ONEDNN)
  if (takes_onednn(p))
    return pass == ConvPass::backward_weight ? onednn::backward_weight_workspace_bytes(p) : 0;
#endif
  return im2col::workspace_bytes(pass, p);
}

void conv2d_forward(const Stream&, const Conv2dArgs& args, Workspace workspace) {
  const ConvProblem p = make_problem("conv2d_forward", args);
  MT_CHECK(p.w.dtype == p.x.dtype, "conv2d_forward: expected weights of x's dtype, ", p.x.dtype,
           ", got ", p.w.dtype);
  if (!has_output(p)) return;
#if defined(MIXTAPE_WITH_ONEDNN)
  if (takes_onednn(p)) return onednn::forward(p);
#endif
  im2col::forward(p, workspace);
}

void conv2d_backward_data(const Stream&, const Conv2dArgs& args, Workspace workspace) {
  const ConvProblem p = make_problem("conv2d_backward_data", args);
  MT_CHECK(p.w.dtype == p.y.dtype, "conv2d_backward_data: expected weights of dy's dtype, ",
           p.y.dtype, ", got ", p.w.dtype);
  if (p.x.count * p.x.elements() == 0) return;
  if (!has_output(p) || p.depth() == 0) return zero(p.x);
#if defined(MIXTAPE_WITH_ONEDNN)
  if (takes_onednn(p)) return onednn::backward_data(p);
#endif
  im2col::backward_data(p, workspace);
}

void conv2d_backward_weight(const Stream&, const Conv2dArgs& args, float beta,
                            Workspace workspace) {
  const ConvProblem p = make_problem("conv2d_backward_weight", args);
  if (p.w.count * p.w.elements() == 0) return;
  if (!has_output(p)) {
    const double nothing = 0;  // no partial gradients
    return reduce_weight_gradients(p.w, &nothing, 0, p.w.channel, p.w.pixel, beta);
  }
#if defined(MIXTAPE_WITH_ONEDNN)
  if (takes_onednn(p)) return onednn::backward_weight(p, beta, workspace);
#endif
  im2col::backward_weight(p, beta, workspace);
}

namespace {

/// db of planar images: each channel's sum over whole planes, image by image.
template <class C>
void planar_bias_gradient(const Image& dy, double* sums) {
  const std::int64_t n = dy.pixels();
  parallel_for(0, dy.channels, row_grain(n * dy.count), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const buffer = frame.take<C>(n);
    for (std::int64_t c = begin; c < end; ++c) {
      sums[c] = 0;
      for (std::int64_t image = 0; image < dy.count; ++image) {
        const C* plane = static_cast<const C*>(dy.at(image, c, 0));
        if (dy.dtype != dtype_of<C>) {
          load_elements(dy.dtype, dy.at(image, c, 0), buffer, n);
          plane = buffer;
        }
        sums[c] += row_sums<C, 1>(n, [&](std::int64_t i, int count) {
          return std::array{RowPacket<C>::load(plane + i, count, C(0))};
        })[0];
      }
    }
  });
}

/// db of channels-last images: column sums of the (N P Q, O) matrix, one partial sum an image.
template <class C>
void channels_last_bias_gradient(const Image& dy, double* partial) {
  const std::int64_t n = dy.channels;
  parallel_for(0, dy.count, row_grain(dy.elements()), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const buffer = frame.take<C>(n);
    C* const part = frame.take<C>(n);
    for (std::int64_t image = begin; image < end; ++image) {
      ColumnSums<C> sums(part, partial + image * n, n);
      for (std::int64_t p = 0; p < dy.pixels(); ++p) {
        load_elements(dy.dtype, dy.at(image, 0, p), buffer, n);
        for (std::int64_t c = 0; c < n; ++c) part[c] += buffer[c];
        sums.row_done();
      }
      sums.flush();
    }
  });
}

}  // namespace

void conv2d_backward_bias(const Stream&, View db, float beta, View dy, Workspace) {
  const Image image = make_image("conv2d_backward_bias", "dy", dy);
  MT_CHECK(db.numel() == image.channels, "conv2d_backward_bias: expected ", image.channels,
           " elements, got ", db.sizes);
  const bool wide = image.dtype == Dtype::f64;
  ScratchFrame frame;
  const std::int64_t partials = image.channels_last ? image.count : 1;
  double* const partial = frame.take<double>(partials * image.channels);
  if (image.channels_last)
    wide ? channels_last_bias_gradient<double>(image, partial)
         : channels_last_bias_gradient<float>(image, partial);
  else
    wide ? planar_bias_gradient<double>(image, partial)
         : planar_bias_gradient<float>(image, partial);
  store_column_sums(db, partial, partials, image.channels, beta);
}

}  // namespace mixtape::kernels::cpu
