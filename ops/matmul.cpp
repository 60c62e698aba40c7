// Matrix products and the fused linear layer.
#include "kernels/matmul.h"

#include "engine/grad_mode.h"
#include "ops/op_support.h"
#include "ops/tensor_math.h"

namespace mixtape {

using kernels::Activation;

namespace {

/// Each matrix of t has a unit stride in one of its last two dimensions and no overlap.
bool matrix_ready(const Tensor& t) {
  const Shape &n = t.shape(), &s = t.strides();
  const int r = t.dim() - 2, c = t.dim() - 1;
  const auto ordered = [](std::int64_t inner_size, std::int64_t inner, std::int64_t outer_size,
                          std::int64_t outer) {
    return (inner == 1 || inner_size == 1) && (outer >= inner_size || outer_size == 1);
  };
  return ordered(n[c], s[c], n[r], s[r]) || ordered(n[r], s[r], n[c], s[c]);
}
Tensor as_matrix(const Tensor& t) { return matrix_ready(t) ? t : t.contiguous(); }

void run_matmul(const kernels::MatmulArgs& args) {
  const ScratchWorkspace scratch(kernels::matmul_workspace_bytes(args.out.device), args.out.device);
  kernels::matmul(Stream::current(args.out.device), args, scratch);
}

/// dz = dy act'(kept), and the sums of dz (M, N) over its rows to `dbias` if that is wanted (added
/// to what is there, where it is a leaf's gradient). Without an activation only the sums.
void activation_backward_into(Activation activation, const Tensor& dz, GradDst& dbias,
                              const Tensor& dy, const Tensor& kept) {
  GradDst::Accumulator sums{{}, 0};
  if (dbias) sums = dbias.accumulator();
  const ScratchWorkspace scratch(
      kernels::activation_backward_workspace_bytes(dy.device(), dy.size(0), dy.size(1)),
      dy.device());
  kernels::activation_backward(stream_of(dy), activation, view_or_absent(dz),
                               view_or_absent(sums.tensor), sums.beta, dy.view(),
                               view_or_absent(kept), scratch);
}
void bias_gradient_into(GradDst& dbias, const Tensor& dz) {
  activation_backward_into(Activation::none, {}, dbias, dz, {});
}

/// dst = a b (added to what is there, where the destination is a leaf's gradient).
void product_into(GradDst& dst, const Tensor& a, const Tensor& b) {
  const auto [out, beta] = dst.accumulator();
  run_matmul({.out = out.view(), .a = as_matrix(a).view(), .b = as_matrix(b).view(), .beta = beta});
}

void check_operands(const char* op, const Tensor& a, const Tensor& b) {
  check_floating(op, "operands", a);
  MT_CHECK(a.dtype() == b.dtype(), op, ": expected operands of one dtype, got ", a.describe(),
           " and ", b.describe());
}

void check_bias(const char* op, const Tensor& bias, const Tensor& weight, Dtype dtype) {
  MT_CHECK(!bias || (bias.dim() == 1 && bias.size(0) == weight.size(0) && bias.dtype() == dtype),
           op, ": expected a bias of ", dtype, "(", weight.size(0), "), got ", bias.describe());
}

/// (M, K) x (K, N), or (B, M, K) x (B, K, N).
struct Matmul {
  static constexpr OpInfo info{.name = "matmul", .cast = Cast::low, .higher_order = true};

  Metas infer(Inputs in) const {
    const Tensor &a = in[0], &b = in[1];
    check_operands("matmul", a, b);
    Shape out = a.shape();
    out.back() = b.size(-1);
    return {{out, a.dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor a = as_matrix(in[0]), b = as_matrix(in[1]);
    run_matmul({.out = out[0].view(), .a = a.view(), .b = b.view()});
    saved.value(in[1].requires_grad() ? in[0] : Tensor());
    saved.value(in[0].requires_grad() ? in[1] : Tensor());
  }
  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    const Tensor& dy = dys[0];
    if (dx[0]) {
      const Tensor b = saved[1];
      if (grad_enabled())
        dx[0].set(matmul(dy, b.t()));
      else
        product_into(dx[0], dy, b.t());
    }
    if (dx[1]) {
      const Tensor a = saved[0];
      if (grad_enabled())
        dx[1].set(matmul(a.t(), dy));
      else
        product_into(dx[1], a.t(), dy);
    }
  }
  OpWork work(const OpCall& call) const {
    const Shape &a = call.in[0].shape, &b = call.in[1].shape;
    const double each =
        product_flops(a.numel() / std::max<std::int64_t>(a.back(), 1), b.back(), a.back());
    return {.flops = call.backward ? each * (call.wants(0) + call.wants(1)) : each};
  }
};

Activation activation_of(Act act) {
  switch (act) {
    case Act::none: return Activation::none;
    case Act::relu: return Activation::relu;
    case Act::gelu_tanh: return Activation::gelu_tanh;
    case Act::gelu: return Activation::gelu;
    case Act::silu: return Activation::silu;
  }
  MT_THROW("linear: invalid activation ", static_cast<int>(act));
}

Tensor activate(Act act, const Tensor& z) {
  switch (act) {
    case Act::relu: return relu(z);
    case Act::gelu_tanh: return gelu_tanh(z);
    case Act::gelu: return gelu(z);
    case Act::silu: return silu(z);
    case Act::none: break;
  }
  return z;
}

Tensor activation_derivative(Act act, const Tensor& dy, const Tensor& kept) {
  switch (act) {
    case Act::relu: return functors::Relu::derivative(dy, kept);
    case Act::gelu_tanh: return functors::GeluTanh::derivative(dy, kept);
    case Act::gelu: return functors::Gelu::derivative(dy, kept);
    case Act::silu: return functors::Silu::derivative(dy, kept);
    case Act::none: break;
  }
  return dy;
}

/// y = act(x w^T + bias); x (N, in), w (out, in), bias (out).
struct Linear {
  Act act;
  static constexpr OpInfo info{.name = "linear", .cast = Cast::low, .higher_order = true};

  bool reads_pre_activation() const { return act != Act::none && act != Act::relu; }

  Metas infer(Inputs in) const {
    const Tensor &x = in[0], &w = in[1], &bias = in[2];
    check_operands("linear", x, w);
    check_bias("linear", bias, w, x.dtype());
    return {{{x.size(0), w.size(0)}, x.dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = as_matrix(in[0]), w = as_matrix(in[1]);
    Tensor z;  // pre-activation (N, out)
    if (saved.recording() && reads_pre_activation())
      z = Tensor::empty(out[0].shape(), out[0].dtype(), out[0].device());
    const Tensor bias = in[2] ? in[2].contiguous() : Tensor();
    run_matmul({.out = out[0].view(),
                .a = x.view(),
                .b = transposed(w.view()),
                .bias = view_or_absent(bias),
                .activation = activation_of(act),
                .pre_activation = view_or_absent(z)});
    saved.value(in[1].requires_grad() ? in[0] : Tensor());
    saved.value(in[0].requires_grad() ? in[1] : Tensor());
    saved.value(act == Act::relu ? out[0] : z);
  }
  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    if (grad_enabled()) return recorded_backward(saved, dys[0], dx);
    const Tensor dy = dys[0].contiguous();  // (N, out)
    Tensor dz = dy;
    if (act != Act::none) {
      dz = Tensor::empty(dy.shape(), dy.dtype(), dy.device());
      activation_backward_into(activation_of(act), dz, dx[2], dy, saved[2]);
    } else if (dx[2]) {
      bias_gradient_into(dx[2], dy);
    }
    if (dx[0]) product_into(dx[0], dz, saved[1]);
    if (dx[1]) product_into(dx[1], dz.t(), saved[0]);
  }
  OpWork work(const OpCall& call) const {
    const Shape &x = call.in[0].shape, &w = call.in[1].shape;
    const double each = product_flops(x[0], w[0], w[1]);
    return {.flops = call.backward ? each * (call.wants(0) + call.wants(1)) : each};
  }

 private:
  void recorded_backward(const Saved& saved, const Tensor& dy, Grads dx) const {
    Tensor kept = saved[2];
    if (reads_pre_activation()) {  // with its history, which the fused forward did not record
      const Tensor x = saved[0], w = saved[1];
      MT_CHECK(
          x && w,
          "linear: second derivatives with an activation need gradients for both x and weight");
      MT_CHECK(!dx[2],
               "linear: second derivatives with a bias and a fused activation are not available; "
               "apply the "
               "activation as an op of its own");
      kept = matmul(x, w.t());
    }
    const Tensor dz = activation_derivative(act, dy, kept);
    if (dx[0]) dx[0].set(matmul(dz, saved[1]));
    if (dx[1]) dx[1].set(matmul(dz.t(), saved[0]));
    if (dx[2]) dx[2].set(sum_to(dz, dx[2].meta().shape));
  }
};

/// y = act(x w1^T + b1) w2^T + b2; x (N, in), w1 (hidden, in), w2 (out, hidden). The derivative of
/// the activation is applied by the product that makes its gradient, so that it is never alone.
struct Mlp {
  Act act;
  bool recompute_activation;
  static constexpr OpInfo info{.name = "mlp", .cast = Cast::low};

  Metas infer(Inputs in) const {
    const Tensor &x = in[0], &w1 = in[1], &w2 = in[3];
    check_operands("mlp", x, w1);
    check_operands("mlp", x, w2);
    check_bias("mlp", in[2], w1, x.dtype());
    check_bias("mlp", in[4], w2, x.dtype());
    return {{{x.size(0), w2.size(0)}, x.dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = as_matrix(in[0]), w1 = as_matrix(in[1]), w2 = as_matrix(in[3]);
    const Tensor b1 = in[2] ? in[2].contiguous() : Tensor(),
                 b2 = in[4] ? in[4].contiguous() : Tensor();
    const Shape hidden = {x.size(0), w1.size(0)};
    const Tensor h = Tensor::empty(hidden, x.dtype(), x.device());
    Tensor z;
    if (saved.recording() && act != Act::relu) z = Tensor::empty(hidden, x.dtype(), x.device());
    run_matmul({.out = h.view(),
                .a = x.view(),
                .b = transposed(w1.view()),
                .bias = view_or_absent(b1),
                .activation = activation_of(act),
                .pre_activation = view_or_absent(z)});
    run_matmul({.out = out[0].view(),
                .a = h.view(),
                .b = transposed(w2.view()),
                .bias = view_or_absent(b2)});
    saved.value(in[1].requires_grad() ? in[0] : Tensor());
    saved.value(in[1]);
    saved.value(in[3]);
    saved.value(recompute_activation && z ? Tensor() : h);
    saved.value(z);
  }
  void backward(const Saved& saved, Inputs dys, Grads dx) const {
    const Tensor dy = dys[0].contiguous(), z = saved[4];
    const Tensor h = saved[3];  // undefined when it is to be recomputed
    if (dx[4]) bias_gradient_into(dx[4], dy);
    if (dx[3]) product_into(dx[3], dy.t(), h ? h : activate(act, z));
    if (!dx[0] && !dx[1] && !dx[2]) return;
    const Tensor& kept = act == Act::relu ? h : z;
    const Tensor dz = Tensor::empty(kept.shape(), kept.dtype(), kept.device());
    const Tensor w2 = as_matrix(saved[2]);
    run_matmul({.out = dz.view(),
                .a = dy.view(),
                .b = w2.view(),
                .backward_of = activation_of(act),
                .saved = kept.view()});
    if (dx[2]) bias_gradient_into(dx[2], dz);
    if (dx[1]) product_into(dx[1], dz.t(), saved[0]);
    if (dx[0]) product_into(dx[0], dz, saved[1]);
  }
  OpWork work(const OpCall& call) const {
    const Shape &x = call.in[0].shape, &w1 = call.in[1].shape, &w2 = call.in[3].shape;
    const double first = product_flops(x[0], w1[0], w1[1]),
                 second = product_flops(x[0], w2[0], w2[1]);
    if (!call.backward) return {.flops = first + second};
    const bool through = call.wants(0) || call.wants(1) || call.wants(2);  // dz is needed
    return {.flops = first * (call.wants(0) + call.wants(1)) + second * (call.wants(3) + through)};
  }
};

}  // namespace

Tensor mlp(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2,
           MlpOptions options) {
  MT_CHECK(options.act != Act::none, "mlp: expected an activation, got none; use linear()");
  MT_CHECK(x.dim() >= 1 && w1.dim() == 2 && w2.dim() == 2,
           "mlp: expected x (.., in), w1 (hidden, in) and w2 (out, hidden), got ", x.describe(),
           ", ", w1.describe(), " and ", w2.describe());
  MT_CHECK(x.size(-1) == w1.size(1) && w1.size(0) == w2.size(1),
           "mlp: expected x (.., in), w1 (hidden, in) and w2 (out, hidden), got ", x.shape(), ", ",
           w1.shape(), " and ", w2.shape());
  Shape sizes = x.shape();
  sizes.back() = w2.size(0);
  const std::int64_t rows = x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
  return apply(Mlp{options.act, options.recompute_activation},
               {x.reshape({rows, x.size(-1)}), w1, b1, w2, b2})
      .reshape(sizes);
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  MT_CHECK(a.dim() >= 1 && b.dim() >= 1, "matmul: expected at least one dimension, got ",
           a.describe(), " and ", b.describe());
  if (a.dim() == 1) {
    const Tensor y = matmul(a.unsqueeze(0), b);
    return y.squeeze(b.dim() == 1 ? 0 : -2);
  }
  if (b.dim() == 1) return matmul(a, b.unsqueeze(1)).squeeze(-1);
  MT_CHECK(a.size(-1) == b.size(-2), "matmul: expected inner sizes to match, got ", a.describe(),
           " and ", b.describe());
  if (a.dim() == 2 && b.dim() == 2) return apply(Matmul{}, {a, b});
  if (b.dim() == 2) {  // fold the batch into the rows
    Shape sizes = a.shape();
    sizes.back() = b.size(1);
    return apply(Matmul{},
                 {a.reshape({a.numel() / std::max<std::int64_t>(a.size(-1), 1), a.size(-1)}), b})
        .reshape(sizes);
  }
  const auto batch_of = [](const Tensor& t) {
    return Shape(std::span(t.shape().begin(), static_cast<std::size_t>(t.dim() - 2)));
  };
  const Shape batch = broadcast_shapes("matmul", batch_of(a), batch_of(b));
  const auto expanded = [&](const Tensor& t) {
    Shape sizes = batch;
    sizes.push_back(t.size(-2));
    sizes.push_back(t.size(-1));
    return t.expand(sizes).reshape({batch.numel(), t.size(-2), t.size(-1)});
  };
  Shape sizes = batch;
  sizes.push_back(a.size(-2));
  sizes.push_back(b.size(-1));
  return apply(Matmul{}, {expanded(a), expanded(b)}).reshape(sizes);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, LinearOptions options) {
  MT_CHECK(x.dim() >= 1 && weight.dim() == 2,
           "linear: expected x (.., in) and a weight (out, in), got ", x.describe(), " and ",
           weight.describe());
  MT_CHECK(x.size(-1) == weight.size(1), "linear: expected x of ", weight.size(1),
           " features for a weight ", weight.shape(), ", got ", x.describe());
  if (x.dim() == 2) return apply(Linear{options.act}, {x, weight, bias});
  Shape sizes = x.shape();
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  sizes.back() = weight.size(0);
  return apply(Linear{options.act}, {x.reshape({rows, x.size(-1)}), weight, bias}).reshape(sizes);
}

Tensor Tensor::matmul(const Tensor& other) const { return mixtape::matmul(*this, other); }

}  // namespace mixtape
