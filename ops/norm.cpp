// Layer and root-mean-square normalisation, alone and fused with a residual addition: forward and
// backward.
//
// Legend: N rows, C normalised elements of a row.
#include "kernels/norm.h"

#include "ops/op_support.h"

namespace mixtape {
namespace {

Dtype statistics_dtype(const Tensor& x) { return compute_dtype(x.dtype()); }

void check_parameters(const char* op, Inputs parameters, const Shape& normalized) {
  for (const Tensor& p : parameters) {
    MT_CHECK(!p || (p.shape() == normalized && is_floating(p.dtype())), op,
             ": expected weights of shape ", normalized, ", got ", p.describe());
  }
}

void check_normalized(const char* op, const Tensor& x, const Shape& normalized) {
  check_floating(op, "a tensor", x);
  const int lead = x.dim() - normalized.size();
  MT_CHECK(!normalized.empty() && lead >= 0 &&
               std::equal(normalized.begin(), normalized.end(), x.shape().begin() + lead),
           op, ": expected x (.., ", normalized, "), got ", x.describe());
}

/// The outputs (y, x + residual) of a normalisation fused with a residual.
Metas infer_with_residual(const char* op, Inputs in) {
  const Tensor &x = in[0], &residual = in[1];
  check_floating(op, "a tensor", x);
  check_floating(op, "a residual", residual);
  MT_CHECK(x.dim() >= 1, op, ": expected at least one dimension, got ", x.describe());
  MT_CHECK(residual.shape() == x.shape(), op, ": expected a residual of shape ", x.shape(),
           ", got ", residual.describe());
  check_parameters(op, in.subspan(2), {x.size(-1)});
  return {meta_of(x), {x.shape(), promote_types(x.dtype(), residual.dtype())}};
}

View flat(const Tensor& t) {
  if (!t) return {};
  View v = t.view();
  v.sizes = {t.numel()};
  v.strides = {1};
  return v;
}

struct Statistics {
  Tensor mean, rstd;  // (N)
  Statistics(bool wanted, const Tensor& x, std::int64_t columns) {
    if (!wanted) return;
    const Shape rows = {columns == 0 ? 0 : x.numel() / columns};
    mean = Tensor::empty(rows, statistics_dtype(x), x.device());
    rstd = Tensor::empty(rows, statistics_dtype(x), x.device());
  }
};

/// Gradients of the normalisation (and of `dsum`, which reached its input by another way).
void run_backward(const Tensor& dy, const Tensor& dsum, const Tensor& x, const Tensor& weight,
                  const Tensor& mean, const Tensor& rstd, const Tensor& dx, GradDst& dweight,
                  GradDst& dbias, std::int64_t columns) {
  const Tensor dy_rows = dy.contiguous(), dsum_rows = dsum ? dsum.contiguous() : dsum;
  GradDst::Accumulator dw{{}, 0}, db{{}, 0};
  if (dweight) dw = dweight.accumulator();
  if (dbias) db = dbias.accumulator();
  const Tensor w = weight ? weight.contiguous() : weight;
  const ScratchWorkspace scratch(
      kernels::layer_norm_backward_workspace_bytes(x.device(), mean.numel(), columns), x.device());
  kernels::layer_norm_backward(stream_of(x),
                               {.dx = dx ? rows_of(dx, columns) : View{},
                                .dweight = flat(dw.tensor),
                                .dbias = flat(db.tensor),
                                .beta_weight = dw.beta,
                                .beta_bias = db.beta,
                                .dy = rows_of(dy_rows, columns),
                                .dsum = dsum_rows ? rows_of(dsum_rows, columns) : View{},
                                .x = rows_of(x, columns),
                                .weight = flat(w),
                                .mean = mean.view(),
                                .rstd = rstd.view()},
                               scratch);
}

/// y = (x - mean) * rstd * weight + bias.
struct LayerNorm {
  Shape normalized;
  double eps;
  static constexpr OpInfo info{.name = "layer_norm", .cast = Cast::keep};

  Metas infer(Inputs in) const {
    const Tensor& x = in[0];
    check_normalized("layer_norm", x, normalized);
    check_parameters("layer_norm", in.subspan(1), normalized);
    return {meta_of(x)};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const std::int64_t columns = normalized.numel();
    const Tensor x = in[0].contiguous(), w = in[1] ? in[1].contiguous() : in[1],
                 b = in[2] ? in[2].contiguous() : in[2];
    const Statistics s(saved.recording(), x, columns);
    kernels::layer_norm_forward(stream_of(x), {.y = rows_of(out[0], columns),
                                               .mean = view_or_absent(s.mean),
                                               .rstd = view_or_absent(s.rstd),
                                               .x = rows_of(x, columns),
                                               .weight = flat(w),
                                               .bias = flat(b),
                                               .eps = eps});
    saved.value(x.same(in[0]) ? in[0] : x);
    saved.value(in[1]);
    saved.value(s.mean);
    saved.value(s.rstd);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor out = dx[0] ? dx[0].out() : Tensor();
    run_backward(dy[0], {}, saved[0], saved[1], saved[2], saved[3], out, dx[1], dx[2],
                 normalized.numel());
  }
};

/// s = x + residual, y = layer_norm(s); outputs (y, s).
struct AddLayerNorm {
  double eps;
  static constexpr OpInfo info{.name = "add_layer_norm", .cast = Cast::keep};

  Metas infer(Inputs in) const { return infer_with_residual("add_layer_norm", in); }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const std::int64_t columns = in[0].size(-1);
    const Tensor x = in[0].contiguous(), r = in[1].contiguous();
    const Tensor w = in[2] ? in[2].contiguous() : in[2], b = in[3] ? in[3].contiguous() : in[3];
    const Statistics s(saved.recording(), x, columns);
    kernels::layer_norm_forward(stream_of(x), {.y = rows_of(out[0], columns),
                                               .sum = rows_of(out[1], columns),
                                               .mean = view_or_absent(s.mean),
                                               .rstd = view_or_absent(s.rstd),
                                               .x = rows_of(x, columns),
                                               .residual = rows_of(r, columns),
                                               .weight = flat(w),
                                               .bias = flat(b),
                                               .eps = eps});
    saved.value(out[1]);
    saved.value(in[2]);
    saved.value(s.mean);
    saved.value(s.rstd);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor sum = saved[0];
    if (!dy[0]) {  // only the sum was used
      if (dx[0]) dx[0].set(dy[1]);
      if (dx[1]) dx[1].set(dy[1]);
      return;
    }
    const Tensor dsum =
        dx[0] || dx[1] ? Tensor::empty(sum.shape(), sum.dtype(), sum.device()) : Tensor();
    run_backward(dy[0], dy[1], sum, saved[1], saved[2], saved[3], dsum, dx[2], dx[3], sum.size(-1));
    if (dx[0]) dx[0].set(dsum);
    if (dx[1]) dx[1].set(dsum);
  }
};

Tensor rms_statistic(bool wanted, const Tensor& x, std::int64_t columns) {
  if (!wanted) return {};
  return Tensor::empty({columns == 0 ? 0 : x.numel() / columns}, statistics_dtype(x), x.device());
}

void run_rms_backward(const Tensor& dy, const Tensor& dsum, const Tensor& x, const Tensor& weight,
                      const Tensor& rstd, const Tensor& dx, GradDst& dweight,
                      std::int64_t columns) {
  const Tensor dy_rows = dy.contiguous(), dsum_rows = dsum ? dsum.contiguous() : dsum;
  GradDst::Accumulator dw{{}, 0};
  if (dweight) dw = dweight.accumulator();
  const Tensor w = weight ? weight.contiguous() : weight;
  const ScratchWorkspace scratch(
      kernels::rms_norm_backward_workspace_bytes(x.device(), rstd.numel(), columns), x.device());
  kernels::rms_norm_backward(stream_of(x),
                             {.dx = dx ? rows_of(dx, columns) : View{},
                              .dweight = flat(dw.tensor),
                              .beta_weight = dw.beta,
                              .dy = rows_of(dy_rows, columns),
                              .dsum = dsum_rows ? rows_of(dsum_rows, columns) : View{},
                              .x = rows_of(x, columns),
                              .weight = flat(w),
                              .rstd = rstd.view()},
                             scratch);
}

/// y = x * rstd * weight.
struct RmsNorm {
  Shape normalized;
  double eps;
  static constexpr OpInfo info{.name = "rms_norm", .cast = Cast::keep};

  Metas infer(Inputs in) const {
    check_normalized("rms_norm", in[0], normalized);
    check_parameters("rms_norm", in.subspan(1), normalized);
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const std::int64_t columns = normalized.numel();
    const Tensor x = in[0].contiguous(), w = in[1] ? in[1].contiguous() : in[1];
    const Tensor rstd = rms_statistic(saved.recording(), x, columns);
    kernels::rms_norm_forward(stream_of(x), {.y = rows_of(out[0], columns),
                                             .rstd = view_or_absent(rstd),
                                             .x = rows_of(x, columns),
                                             .weight = flat(w),
                                             .eps = eps});
    saved.value(x.same(in[0]) ? in[0] : x);
    saved.value(in[1]);
    saved.value(rstd);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor out = dx[0] ? dx[0].out() : Tensor();
    run_rms_backward(dy[0], {}, saved[0], saved[1], saved[2], out, dx[1], normalized.numel());
  }
};

/// s = x + residual, y = rms_norm(s); outputs (y, s).
struct AddRmsNorm {
  double eps;
  static constexpr OpInfo info{.name = "add_rms_norm", .cast = Cast::keep};

  Metas infer(Inputs in) const { return infer_with_residual("add_rms_norm", in); }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const std::int64_t columns = in[0].size(-1);
    const Tensor x = in[0].contiguous(), r = in[1].contiguous();
    const Tensor w = in[2] ? in[2].contiguous() : in[2];
    const Tensor rstd = rms_statistic(saved.recording(), x, columns);
    kernels::rms_norm_forward(stream_of(x), {.y = rows_of(out[0], columns),
                                             .sum = rows_of(out[1], columns),
                                             .rstd = view_or_absent(rstd),
                                             .x = rows_of(x, columns),
                                             .residual = rows_of(r, columns),
                                             .weight = flat(w),
                                             .eps = eps});
    saved.value(out[1]);
    saved.value(in[2]);
    saved.value(rstd);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor sum = saved[0];
    if (!dy[0]) {  // only the sum was used
      if (dx[0]) dx[0].set(dy[1]);
      if (dx[1]) dx[1].set(dy[1]);
      return;
    }
    const Tensor dsum =
        dx[0] || dx[1] ? Tensor::empty(sum.shape(), sum.dtype(), sum.device()) : Tensor();
    run_rms_backward(dy[0], dy[1], sum, saved[1], saved[2], dsum, dx[2], sum.size(-1));
    if (dx[0]) dx[0].set(dsum);
    if (dx[1]) dx[1].set(dsum);
  }
};

}  // namespace

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                  const Tensor& bias, double eps) {
  return apply(LayerNorm{normalized_shape, eps}, {x, weight, bias});
}

AddLayerNormResult add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                  const Tensor& bias, double eps) {
  const Tensors out = apply_multiple(AddLayerNorm{eps}, {x, residual, weight, bias});
  return {out[0], out[1]};
}

Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, double eps) {
  return apply(RmsNorm{normalized_shape, eps}, {x, weight});
}

AddRmsNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                              double eps) {
  const Tensors out = apply_multiple(AddRmsNorm{eps}, {x, residual, weight});
  return {out[0], out[1]};
}

}  // namespace mixtape
