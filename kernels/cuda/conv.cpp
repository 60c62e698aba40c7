// Convolution passes through cuDNN.
//
// cuDNN wants all operands packed in one layout. An operand that is not (a weight in the other
// layout, every second image of a batch) goes through a packed copy in the workspace; so does dw
// when it is accumulated or kept in f32. A pass is first laid out (ConvPlacement) and then run; the
// workspace query does the first half only.
#include "kernels/conv.h"

#include <algorithm>

#include "engine/determinism.h"
#include "kernels/cuda/bias_activation.h"
#include "kernels/cuda/conv_epilogue.h"
#include "kernels/cuda/conv_layout.h"
#include "kernels/cuda/conv_plan.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/elementwise.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr std::size_t kAlignment = 256;  // of pieces of the workspace

const char* name_of_pass(ConvPass pass) {
  switch (pass) {
    case ConvPass::forward: return "conv2d_forward";
    case ConvPass::backward_data: return "conv2d_backward_data";
    case ConvPass::backward_weight: break;
  }
  return "conv2d_backward_weight";
}

void check_geometry(const char* op, const Conv2dArgs& a) {
  const ConvGeometry& g = a.geometry;
  MT_CHECK(a.x.dim() == 4 && a.w.dim() == 4 && a.y.dim() == 4, op,
           ": expected operands of 4 dimensions, got x ", a.x.sizes, ", w ", a.w.sizes, ", y ",
           a.y.sizes);
  MT_CHECK(g.groups >= 1 && a.w.size(1) * g.groups == a.x.size(1) && a.w.size(0) % g.groups == 0,
           op, ": x ", a.x.sizes, " and w ", a.w.sizes, " do not fit ", g.groups, " groups");
  MT_CHECK(a.y.size(0) == a.x.size(0) && a.y.size(1) == a.w.size(0), op, ": y ", a.y.sizes,
           " does not fit x ", a.x.sizes, " and w ", a.w.sizes);
  for (int i = 0; i < 2; ++i) {
    MT_CHECK(g.stride[i] >= 1 && g.dilation[i] >= 1 && g.padding[i] >= 0, op,
             ": expected stride and dilation of at least 1 and padding of at least 0");
    const std::int64_t room =
        a.x.size(2 + i) + 2 * g.padding[i] - g.dilation[i] * (a.w.size(2 + i) - 1) - 1;
    MT_CHECK(room >= 0 && a.y.size(2 + i) == room / g.stride[i] + 1, op, ": y ", a.y.sizes,
             " does not fit x ", a.x.sizes, " and w ", a.w.sizes, " in dimension ", 2 + i);
  }
}

void check_operands(const char* op, ConvPass pass, const Conv2dArgs& a) {
  check_geometry(op, a);
  const Dtype dtype = pass == ConvPass::backward_data ? a.y.dtype : a.x.dtype;
  const auto fits = [&](const View& v, bool may_be_f32) {
    return v.dtype == dtype || (may_be_f32 && v.dtype == Dtype::f32 && is_low_precision(dtype));
  };
  MT_CHECK(is_floating(dtype) && fits(a.x, false) && fits(a.y, false) &&
               fits(a.w, pass == ConvPass::backward_weight),
           op, ": expected operands of one floating dtype, got x ", a.x.dtype, ", w ", a.w.dtype,
           ", y ", a.y.dtype);
  MT_CHECK(a.activation == Activation::none || a.activation == Activation::relu, op,
           ": expected no activation or relu");
  MT_CHECK(!a.bias || (a.bias.dim() == 1 && a.bias.size(0) == a.w.size(0)), op,
           ": expected a bias of ", a.w.size(0), " elements, got ", a.bias.sizes);
  for (const View* v : {&a.x, &a.y})
    MT_CHECK(has_layout(*v, ConvLayout::planar) || has_layout(*v, ConvLayout::channels_last), op,
             ": expected x and y contiguous or channels-last, got sizes ", v->sizes,
             " with strides ", v->strides);
}

/// An operand, and the bytes of its packed copy (0: cuDNN uses the operand itself).
struct Placed {
  View view;
  std::size_t staged_bytes = 0;
};

struct ConvPlacement {
  ConvKey key{};
  Placed x, w, y;
  ConvLayout layout = ConvLayout::planar;
  bool fused_bias = false;
  std::size_t plan_bytes = 0;

  std::size_t workspace_bytes() const {
    return x.staged_bytes + w.staged_bytes + y.staged_bytes + plan_bytes;
  }
};

Placed place(const View& v, ConvLayout layout, Dtype dtype, bool always_staged) {
  Placed p{v, 0};
  if (always_staged || !is_packed(v, layout))
    p.staged_bytes = (static_cast<std::size_t>(v.numel()) * size_of(dtype) + kAlignment - 1) /
                     kAlignment * kAlignment;
  return p;
}

std::uint8_t common_alignment(std::initializer_list<const void*> pointers) {
  std::uintptr_t bits = 16;
  for (const void* p : pointers) bits |= reinterpret_cast<std::uintptr_t>(p);
  return static_cast<std::uint8_t>(bits & (~bits + 1));
}

void fill_key(ConvKey& key, ConvPass pass, const Conv2dArgs& a, ConvLayout layout, int device) {
  key.n = a.x.size(0);
  key.c = a.x.size(1);
  key.h = a.x.size(2);
  key.w = a.x.size(3);
  key.o = a.w.size(0);
  key.r = a.w.size(2);
  key.s = a.w.size(3);
  key.p = a.y.size(2);
  key.q = a.y.size(3);
  for (int i = 0; i < 2; ++i) {
    key.stride[i] = a.geometry.stride[i];
    key.padding[i] = a.geometry.padding[i];
    key.dilation[i] = a.geometry.dilation[i];
  }
  key.groups = a.geometry.groups;
  key.device = device;
  key.pass = pass;
  key.dtype = pass == ConvPass::backward_data ? a.y.dtype : a.x.dtype;
  key.channels_last = layout == ConvLayout::channels_last;
  key.tf32 = key.dtype == Dtype::f32 && tf32_allowed();
  key.deterministic = deterministic();
}

/// Layout, staging and plan of a pass. dw is staged whatever beta is, because the workspace query
/// does not know beta.
ConvPlacement placement_of(ConvPass pass, const Conv2dArgs& a, int device) {
  ConvPlacement p;
  const bool planar = has_layout(a.x, ConvLayout::planar) && has_layout(a.y, ConvLayout::planar);
  p.layout = planar ? ConvLayout::planar : ConvLayout::channels_last;
  fill_key(p.key, pass, a, p.layout, device);
  p.x = place(a.x, p.layout, p.key.dtype, false);
  p.w = place(a.w, p.layout, p.key.dtype, pass == ConvPass::backward_weight);
  p.y = place(a.y, p.layout, p.key.dtype, false);
  const auto address = [](const Placed& o) { return o.staged_bytes == 0 ? o.view.data : nullptr; };
  const bool bias = pass == ConvPass::forward && a.bias && a.bias.dtype == p.key.dtype &&
                    (a.bias.stride(0) == 1 || a.bias.size(0) == 1);
  p.key.bias = bias;
  p.key.alignment =
      common_alignment({address(p.x), a.w.data, address(p.y), bias ? a.bias.data : nullptr});
  p.fused_bias = bias && conv_supported(p.key);
  p.key.bias = p.fused_bias;
  p.plan_bytes = conv_plan_workspace_bytes(p.key);
  return p;
}

/// Hands out pieces of the workspace.
class Carver {
 public:
  explicit Carver(Workspace workspace) : rest_(workspace) {}
  void* take(std::size_t bytes) {
    void* piece = rest_.data;
    rest_.data = static_cast<char*>(rest_.data) + bytes;
    rest_.bytes -= bytes;
    return piece;
  }
  Workspace rest() const { return rest_; }

 private:
  Workspace rest_;
};

/// The packed operand that cuDNN sees: the view itself or its place in the workspace.
View packed_view(const Placed& p, ConvLayout layout, Dtype dtype, Carver& carver) {
  View v = p.view;
  v.dtype = dtype;
  v.strides = packed_strides(v.sizes, layout);
  if (p.staged_bytes > 0) v.data = carver.take(p.staged_bytes);
  return v;
}

/// The operands of a placed pass, with inputs copied where they are staged.
struct ConvOperands {
  View x, w, y;
  Workspace rest;
};

ConvOperands stage(const Stream& stream, const ConvPlacement& p, Workspace workspace) {
  MT_CHECK(workspace.bytes >= p.workspace_bytes(), name_of_pass(p.key.pass),
           ": expected a workspace of ", p.workspace_bytes(), " bytes, got ", workspace.bytes);
  Carver carver(workspace);
  ConvOperands o;
  o.x = packed_view(p.x, p.layout, p.key.dtype, carver);
  o.w = packed_view(p.w, p.layout, p.key.dtype, carver);
  o.y = packed_view(p.y, p.layout, p.key.dtype, carver);
  o.rest = carver.rest();
  const ConvPass pass = p.key.pass;
  if (p.x.staged_bytes > 0 && pass != ConvPass::backward_data) copy(stream, o.x, p.x.view);
  if (p.w.staged_bytes > 0 && pass != ConvPass::backward_weight) copy(stream, o.w, p.w.view);
  if (p.y.staged_bytes > 0 && pass != ConvPass::forward) copy(stream, o.y, p.y.view);
  return o;
}

/// Bias, where cuDNN did not add it, and ReLU, in place on the packed y.
void finish_forward(const Stream& stream, const ConvPlacement& p, const Conv2dArgs& args,
                    const View& y) {
  const View bias = p.fused_bias ? View{} : args.bias;
  const bool relu = args.activation == Activation::relu;
  if (!bias && !relu) return;
  if (p.layout == ConvLayout::channels_last)
    bias_activation(stream, as_rows(y), 1, bias, args.activation, {});
  else
    planar_bias_relu(stream, as_planes(y), bias, relu);
}

/// Whether the sums of the pass have no terms (no images, no channels): the result is then zeros.
bool has_no_terms(const Conv2dArgs& args, ConvPass pass) {
  switch (pass) {
    case ConvPass::forward: return args.w.numel() == 0;
    case ConvPass::backward_data: return args.y.numel() == 0 || args.w.numel() == 0;
    case ConvPass::backward_weight: break;
  }
  return args.y.numel() == 0 || args.x.numel() == 0;
}

}  // namespace

std::size_t conv2d_workspace_bytes(const Stream& stream, ConvPass pass, const Conv2dArgs& args) {
  check_operands(name_of_pass(pass), pass, args);
  if (args.x.numel() == 0 || args.w.numel() == 0 || args.y.numel() == 0) return 0;
  const CudaDeviceGuard device(stream.device());
  return placement_of(pass, args, stream.device().index).workspace_bytes();
}

void conv2d_forward(const Stream& stream, const Conv2dArgs& args, Workspace workspace) {
  check_operands("conv2d_forward", ConvPass::forward, args);
  if (args.y.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  MT_CHECK(!has_no_terms(args, ConvPass::forward),
           "conv2d_forward: expected a weight with elements, got ", args.w.sizes);
  const ConvPlacement p = placement_of(ConvPass::forward, args, stream.device().index);
  const ConvOperands o = stage(stream, p, workspace);
  run_convolution(p.key, {o.x.data, o.w.data, o.y.data, args.bias.data}, o.rest, stream);
  finish_forward(stream, p, args, o.y);
  if (p.y.staged_bytes > 0) copy(stream, args.y, o.y);
}

void conv2d_backward_data(const Stream& stream, const Conv2dArgs& args, Workspace workspace) {
  check_operands("conv2d_backward_data", ConvPass::backward_data, args);
  if (args.x.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  if (has_no_terms(args, ConvPass::backward_data)) return fill(stream, args.x, 0.0);
  const ConvPlacement p = placement_of(ConvPass::backward_data, args, stream.device().index);
  const ConvOperands o = stage(stream, p, workspace);
  run_convolution(p.key, {o.x.data, o.w.data, o.y.data, nullptr}, o.rest, stream);
  if (p.x.staged_bytes > 0) copy(stream, args.x, o.x);
}

void conv2d_backward_weight(const Stream& stream, const Conv2dArgs& args, float beta,
                            Workspace workspace) {
  check_operands("conv2d_backward_weight", ConvPass::backward_weight, args);
  if (args.w.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  if (has_no_terms(args, ConvPass::backward_weight)) {
    if (beta == 0) return fill(stream, args.w, 0.0);
    return binary(stream, BinaryOp::mul, compute_dtype(args.w.dtype), args.w, args.w, Scalar(beta));
  }
  ConvPlacement p = placement_of(ConvPass::backward_weight, args, stream.device().index);
  const bool direct = beta == 0 && args.w.dtype == p.key.dtype && is_packed(args.w, p.layout);
  if (direct) p.w.staged_bytes = 0;
  const ConvOperands o = stage(stream, p, workspace);
  run_convolution(p.key, {o.x.data, o.w.data, o.y.data, nullptr}, o.rest, stream);
  if (!direct) accumulate_weight_gradient(stream, args.w, beta, o.w);
}

}  // namespace mixtape::kernels::cuda
