// Pooling, in NCHW or (by strides) channels-last; outputs and gradients follow x's layout.
//
// Legend: N batch, C channels, H W input size, P Q output size. An adaptive pool is one whose
// window for output i covers inputs floor(i H / P) .. ceil((i + 1) H / P), as in PyTorch.
#include "kernels/conv.h"
#include "ops/image_checks.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

kernels::PoolGeometry geometry_of(const Pool2dOptions& o) {
  kernels::PoolGeometry g;
  for (int i = 0; i < 2; ++i) {
    g.kernel[i] = o.kernel[i];
    g.stride[i] = o.stride.empty() ? o.kernel[i] : o.stride[i];
    g.padding[i] = o.padding[i];
  }
  g.count_include_pad = o.count_include_pad;
  return g;
}

Shape pooled_shape(const char* op, const Tensor& x, const kernels::PoolGeometry& g) {
  Shape out{x.size(0), x.size(1)};
  for (int i = 0; i < 2; ++i) {
    MT_CHECK(2 * g.padding[i] <= g.kernel[i], op,
             ": expected padding of at most half the kernel, got ", g.padding[i], " for ",
             g.kernel[i]);
    const std::int64_t room = x.size(2 + i) + 2 * g.padding[i] - g.kernel[i];
    MT_CHECK(room >= 0, op, ": expected an image at least as large as the kernel ", g.kernel[i],
             ", got ", x.describe());
    out.push_back(room / g.stride[i] + 1);
  }
  return out;
}

/// What a pool does, with its output's height and width. The layout is x's: that of a gradient of
/// (N, C, 1, 1) would not tell.
struct Pool {
  kernels::PoolGeometry geometry;
  std::int64_t height, width;
  bool channels_last;

  Metas infer(Inputs in) const {
    return {{{in[0].size(0), in[0].size(1), height, width}, in[0].dtype()}};
  }
};

Pool fixed_pool(const char* op, const Tensor& x, const Pool2dOptions& o) {
  check_image(op, x);
  check_pair(op, "kernel", o.kernel, 1);
  if (!o.stride.empty()) check_pair(op, "stride", o.stride, 1);
  check_pair(op, "padding", o.padding, 0);
  const kernels::PoolGeometry g = geometry_of(o);
  const Shape y = pooled_shape(op, x, g);
  return {g, y[2], y[3], is_channels_last(x)};
}

Pool adaptive_pool(const char* op, const Tensor& x, const Shape& size) {
  check_image(op, x);
  check_pair(op, "size", size, 1);
  MT_CHECK(x.size(2) >= 1 && x.size(3) >= 1, op, ": expected an image with pixels, got ",
           x.describe());
  return {{.adaptive = true}, size[0], size[1], is_channels_last(x)};
}

template <class Names>
struct MaxPool : Pool {
  static constexpr OpInfo info{.name = Names::kMax};

  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = in_layout(in[0], channels_last);
    if (channels_last) out[0] = empty_in_layout(out[0].shape(), out[0].dtype(), x.device(), true);
    const Tensor indices = empty_in_layout(out[0].shape(), Dtype::i32, x.device(), channels_last);
    kernels::max_pool2d_forward(stream_of(x), out[0].view(), indices.view(), x.view(), geometry);
    saved.value(indices);
  }
  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    const Tensor indices = saved[0], dy = in_layout(dys[0], channels_last);
    write_gradient(dx[0], channels_last, dy.device(), [&](const View& to) {
      kernels::max_pool2d_backward(stream_of(dy), to, dy.view(), indices.view(), geometry);
    });
  }
};

template <class Names>
struct AvgPool : Pool {
  static constexpr OpInfo info{.name = Names::kAvg};

  void forward(Inputs in, Outputs out, Saved&) const {
    const Tensor x = in_layout(in[0], channels_last);
    if (channels_last) out[0] = empty_in_layout(out[0].shape(), out[0].dtype(), x.device(), true);
    kernels::avg_pool2d_forward(stream_of(x), out[0].view(), x.view(), geometry);
  }
  void backward(const Saved&, Inputs dys, Grads dx) const {
    const Tensor dy = in_layout(dys[0], channels_last);
    write_gradient(dx[0], channels_last, dy.device(), [&](const View& to) {
      kernels::avg_pool2d_backward(stream_of(dy), to, dy.view(), geometry);
    });
  }
};

struct Fixed {
  static constexpr const char *kMax = "max_pool2d", *kAvg = "avg_pool2d";
};
struct Adaptive {
  static constexpr const char *kMax = "adaptive_max_pool2d", *kAvg = "adaptive_avg_pool2d";
};

}  // namespace

Tensor max_pool2d(const Tensor& x, const Pool2dOptions& options) {
  return apply(MaxPool<Fixed>{fixed_pool("max_pool2d", x, options)}, {x});
}
Tensor avg_pool2d(const Tensor& x, const Pool2dOptions& options) {
  return apply(AvgPool<Fixed>{fixed_pool("avg_pool2d", x, options)}, {x});
}
Tensor adaptive_max_pool2d(const Tensor& x, const Shape& size) {
  return apply(MaxPool<Adaptive>{adaptive_pool("adaptive_max_pool2d", x, size)}, {x});
}
Tensor adaptive_avg_pool2d(const Tensor& x, const Shape& size) {
  return apply(AvgPool<Adaptive>{adaptive_pool("adaptive_avg_pool2d", x, size)}, {x});
}

Tensor to_channels_last(const Tensor& x) {
  MT_CHECK(x.dim() == 4, "to_channels_last: expected x (N, C, H, W), got ", x.describe());
  return in_layout(x, true);
}

}  // namespace mixtape
