// 2-D convolution, in NCHW or (by strides) channels-last; outputs follow x's layout.
//
// Legend: N batch, C input channels, H W input size, O output channels, R S kernel size, P Q output
// size.
#include "kernels/conv.h"

#include "ops/image_checks.h"
#include "ops/op_support.h"

namespace mixtape {

using kernels::ConvPass;

namespace {

kernels::ConvGeometry geometry_of(const Conv2dOptions& o) {
  kernels::ConvGeometry g;
  for (int i = 0; i < 2; ++i) {
    g.stride[i] = o.stride[i];
    g.padding[i] = o.padding[i];
    g.dilation[i] = o.dilation[i];
  }
  g.groups = o.groups;
  return g;
}

struct Conv2d {
  Conv2dOptions options;
  static constexpr OpInfo info{.name = "conv2d", .cast = Cast::low};

  Metas infer(Inputs in) const {
    const Tensor &x = in[0], &w = in[1], &bias = in[2];
    MT_CHECK(w.dtype() == x.dtype() && (!bias || bias.dtype() == x.dtype()),
             "conv2d: expected x, weight and bias of one dtype, got ", x.describe(), ", ",
             w.describe(), " and ", bias.describe());
    MT_CHECK(x.size(1) == w.size(1) * options.groups, "conv2d: expected x with ",
             w.size(1) * options.groups, " channels for a weight ", w.shape(), " in ",
             options.groups, " groups, got ", x.describe());
    MT_CHECK(w.size(0) % options.groups == 0, "conv2d: expected output channels divisible by ",
             options.groups, ", got ", w.describe());
    MT_CHECK(!bias || bias.shape() == Shape{w.size(0)}, "conv2d: expected a bias (", w.size(0),
             "), got ", bias.describe());
    Shape out{x.size(0), w.size(0)};
    for (int i = 0; i < 2; ++i) {
      const std::int64_t reach = options.dilation[i] * (w.size(2 + i) - 1) + 1;
      const std::int64_t room = x.size(2 + i) + 2 * options.padding[i] - reach;
      MT_CHECK(room >= 0, "conv2d: expected an image at least as large as the kernel's reach ",
               reach, ", got ", x.describe(), " with padding ", options.padding);
      out.push_back(room / options.stride[i] + 1);
    }
    return {{out, x.dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const bool last = is_channels_last(in[0]);
    const Tensor x = in_layout(in[0], last), w = in_layout(in[1], last),
                 bias = in[2] ? in[2].contiguous() : in[2];
    if (last) out[0] = empty_in_layout(out[0].shape(), out[0].dtype(), out[0].device(), true);
    const kernels::Conv2dArgs args{.x = x.view(),
                                   .w = w.view(),
                                   .y = out[0].view(),
                                   .bias = view_or_absent(bias),
                                   .activation = options.act == Act::relu
                                                     ? kernels::Activation::relu
                                                     : kernels::Activation::none,
                                   .geometry = geometry_of(options)};
    const Stream stream = stream_of(x);
    const ScratchWorkspace scratch(kernels::conv2d_workspace_bytes(stream, ConvPass::forward, args),
                                   x.device());
    kernels::conv2d_forward(stream, args, scratch);
    saved.value(in[1].requires_grad() ? (x.same(in[0]) ? in[0] : x) : Tensor());
    saved.value(in[0].requires_grad() ? (w.same(in[1]) ? in[1] : w) : Tensor());
    saved.value(options.act == Act::relu ? out[0] : Tensor());
  }
  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    const Tensor kept = saved[2];
    const bool last = saved[0] ? is_channels_last(saved[0]) : is_channels_last(saved[1]);
    Tensor dy = in_layout(dys[0], last);
    if (kept) dy = in_layout(where(gt(kept, Scalar(0)), dy, Scalar(0)), last);
    const Stream stream = stream_of(dy);
    if (dx[0]) {
      const Tensor w = saved[1];
      write_gradient(dx[0], last, dy.device(), [&](const View& to) {
        const kernels::Conv2dArgs args{
            .x = to, .w = w.view(), .y = dy.view(), .geometry = geometry_of(options)};
        const ScratchWorkspace scratch(
            kernels::conv2d_workspace_bytes(stream, ConvPass::backward_data, args), dy.device());
        kernels::conv2d_backward_data(stream, args, scratch);
      });
    }
    if (dx[1]) weight_gradient(stream, saved[0], dy, last, dx[1]);
    if (dx[2]) {
      const auto [out, beta] = dx[2].accumulator();
      const ScratchWorkspace scratch(kernels::conv2d_backward_bias_workspace_bytes(dy.view()),
                                     dy.device());
      kernels::conv2d_backward_bias(stream, out.view(), beta, dy.view(), scratch);
    }
  }
  OpWork work(const OpCall& call) const {
    const Shape& w = call.in[1].shape;  // (O, C / groups, R, S)
    const std::int64_t reach = w[1] * w[2] * w[3];
    const double each = product_flops(call.out[0].shape.numel(), 1, reach);
    return {.flops = call.backward ? each * (call.wants(0) + call.wants(1)) : each};
  }

 private:
  void weight_gradient(const Stream& stream, const Tensor& x, const Tensor& dy, bool last,
                       GradDst& dw) const {
    GradDst::Accumulator into{{}, 0};
    if (last)
      into.tensor = empty_in_layout(dw.meta().shape, dw.meta().dtype, dy.device(), true);
    else
      into = dw.accumulator();
    const kernels::Conv2dArgs args{
        .x = x.view(), .w = into.tensor.view(), .y = dy.view(), .geometry = geometry_of(options)};
    const ScratchWorkspace scratch(
        kernels::conv2d_workspace_bytes(stream, ConvPass::backward_weight, args), dy.device());
    kernels::conv2d_backward_weight(stream, args, into.beta, scratch);
    if (last) dw.set(into.tensor);
  }
};

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const Conv2dOptions& options) {
  check_image("conv2d", x);
  MT_CHECK(weight.dim() == 4, "conv2d: expected a weight (O, C/groups, R, S), got ",
           weight.describe());
  check_pair("conv2d", "stride", options.stride, 1);
  check_pair("conv2d", "padding", options.padding, 0);
  check_pair("conv2d", "dilation", options.dilation, 1);
  MT_CHECK(options.groups >= 1, "conv2d: expected at least one group, got ", options.groups);
  MT_CHECK(options.act == Act::none || options.act == Act::relu,
           "conv2d: expected no activation or relu to be fused; apply others as ops");
  return apply(Conv2d{options}, {x, weight, bias});
}

}  // namespace mixtape
