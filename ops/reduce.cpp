// Reductions. Outputs are computed in keepdim form and reshaped at the end; gradients expand back.
#include "kernels/reduce.h"

#include "engine/grad_mode.h"
#include "kernels/elementwise.h"
#include "kernels/index.h"
#include "ops/op_support.h"

namespace mixtape {

using kernels::ReduceOp;

namespace {

/// The dimensions of x that are reduced, as one bit each.
unsigned dim_mask(const char* op, const Tensor& x, const Shape& dims) {
  if (dims.empty()) return (1u << x.dim()) - 1;
  unsigned mask = 0;
  for (const std::int64_t d : dims) {
    const int i = normalize_dim(op, d, x.dim());
    MT_CHECK(x.dim() == 0 || !(mask & (1u << i)), op, ": expected each dimension once, got ", dims);
    if (x.dim() > 0) mask |= 1u << i;
  }
  return mask;
}

Shape keepdim_shape(const Shape& sizes, unsigned mask) {
  Shape out = sizes;
  for (int i = 0; i < out.size(); ++i) {
    if (mask & (1u << i)) out[i] = 1;
  }
  return out;
}

Shape drop_dims(const Shape& sizes, unsigned mask) {
  Shape out;
  for (int i = 0; i < sizes.size(); ++i) {
    if (!(mask & (1u << i))) out.push_back(sizes[i]);
  }
  return out;
}

std::int64_t reduced_count(const Shape& sizes, unsigned mask) {
  std::int64_t n = 1;
  for (int i = 0; i < sizes.size(); ++i) n *= mask & (1u << i) ? sizes[i] : 1;
  return n;
}

void run_reduce(ReduceOp kind, const Tensor& out, const Tensor& x) {
  const ScratchWorkspace scratch(kernels::reduce_workspace_bytes(out.view(), x.view()), x.device());
  kernels::reduce(stream_of(x), kind, out.view(), x.view(), scratch);
}

template <ReduceOp K>
struct SumOrMean {
  unsigned mask;
  static constexpr OpInfo info{
      .name = K == ReduceOp::sum ? "sum" : "mean", .cast = Cast::full, .higher_order = true};

  Metas infer(Inputs in) const {
    Dtype t = in[0].dtype();
    if (K == ReduceOp::mean) check_floating("mean", "a tensor", in[0]);
    if (!is_floating(t)) t = Dtype::i64;
    return {{keepdim_shape(in[0].shape(), mask), t}};
  }
  void forward(Inputs in, Outputs out, Saved&) const { run_reduce(K, out[0], in[0]); }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Shape& sizes = saved.input(0).shape;
    const Tensor g = K == ReduceOp::mean
                         ? mul(dy[0], 1.0 / static_cast<double>(reduced_count(sizes, mask)))
                         : dy[0];
    dx[0].set(expand(g, sizes));
  }
};

struct SumTo {
  Shape sizes;  // x's rank, 1 where summed
  static constexpr OpInfo info{.name = "sum_to", .higher_order = true};
  Metas infer(Inputs in) const { return {{sizes, in[0].dtype()}}; }
  void forward(Inputs in, Outputs out, Saved&) const { run_reduce(ReduceOp::sum, out[0], in[0]); }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    dx[0].set(expand(dy[0], saved.input(0).shape));
  }
};

struct Var {
  unsigned mask;
  double correction;
  static constexpr OpInfo info{.name = "var", .cast = Cast::full, .higher_order = true};

  Metas infer(Inputs in) const {
    check_floating("var", "a tensor", in[0]);
    return {{keepdim_shape(in[0].shape(), mask), in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const ScratchWorkspace scratch(kernels::reduce_workspace_bytes(out[0].view(), in[0].view()),
                                   in[0].device());
    kernels::var(stream_of(in[0]), out[0].view(), View{}, in[0].view(), correction, scratch);
    saved.value(in[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {  // 2 (x - mean) / (n - correction)
    const Tensor x = saved[0];
    Shape dims;
    for (int i = 0; i < x.dim(); ++i) {
      if (mask & (1u << i)) dims.push_back(i);
    }
    const double n = static_cast<double>(reduced_count(x.shape(), mask));
    const Tensor centred = sub(x, mean(cast(x, compute_dtype(x.dtype())), dims, true));
    dx[0].set(mul(mul(centred, dy[0]), 2.0 / (n - correction)));
  }
};

struct MaxAll {
  static constexpr OpInfo info{.name = "max", .higher_order = true};
  Metas infer(Inputs in) const {
    MT_CHECK(in[0].numel() > 0, "max: expected at least one element, got ", in[0].describe());
    return {{Shape::filled(in[0].dim(), 1), in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    run_reduce(ReduceOp::max, out[0], in[0]);
    saved.value(in[0]);
    saved.value(out[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor x = saved[0], y = saved[1], is_max = eq(x.detach(), y.detach());
    const Tensor share = div(dy[0], sum(cast(is_max, compute_dtype(x.dtype()))));
    dx[0].set(where(is_max, expand(cast(share, x.dtype()), x.shape()), Scalar(0)));
  }
};

struct MaxAlong {
  int dim;
  static constexpr OpInfo info{.name = "max", .higher_order = true};
  Metas infer(Inputs in) const {
    Shape sizes = in[0].shape();
    MT_CHECK(in[0].dim() == 0 || sizes[dim] > 0, "max: expected a dimension with elements, got ",
             in[0].describe());
    if (!sizes.empty()) sizes[dim] = 1;
    return {{sizes, in[0].dtype()}, {sizes, Dtype::i64}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    kernels::arg_reduce(stream_of(in[0]), true, out[0].view(), out[1].view(), in[0].view(), dim);
    saved.value(out[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Meta& x = saved.input(0);
    if (x.shape.empty()) return dx[0].set(dy[0]);
    dx[0].set(scatter_add(zeros(x.shape, {.dtype = x.dtype, .device = saved.device()}), dim,
                          saved[0], dy[0]));
  }
};

struct ArgMax {
  int dim;
  static constexpr OpInfo info{.name = "argmax", .differentiable = false};
  Metas infer(Inputs in) const {
    Shape sizes = in[0].shape();
    MT_CHECK(in[0].dim() == 0 || sizes[dim] > 0, "argmax: expected a dimension with elements, got ",
             in[0].describe());
    if (!sizes.empty()) sizes[dim] = 1;
    return {{sizes, Dtype::i64}};
  }
  void forward(Inputs in, Outputs out, Saved&) const {
    kernels::arg_reduce(stream_of(in[0]), true, View{}, out[0].view(), in[0].view(), dim);
  }
};

Tensor finish(const Tensor& kept, const Tensor& x, unsigned mask, bool keepdim) {
  return keepdim || mask == 0 ? kept : reshape(kept, drop_dims(x.shape(), mask));
}

}  // namespace

Tensor sum(const Tensor& x, const Shape& dims, bool keepdim) {
  const unsigned mask = dim_mask("sum", x, dims);
  return finish(apply(SumOrMean<ReduceOp::sum>{mask}, {x}), x, mask, keepdim);
}

Tensor mean(const Tensor& x, const Shape& dims, bool keepdim) {
  const unsigned mask = dim_mask("mean", x, dims);
  return finish(apply(SumOrMean<ReduceOp::mean>{mask}, {x}), x, mask, keepdim);
}

Tensor var(const Tensor& x, const Shape& dims, double correction, bool keepdim) {
  const unsigned mask = dim_mask("var", x, dims);
  return finish(apply(Var{mask, correction}, {x}), x, mask, keepdim);
}

Tensor max(const Tensor& x) { return reshape(apply(MaxAll{}, {x}), {}); }

MaxResult max(const Tensor& x, int dim, bool keepdim) {
  const int d = normalize_dim("max", dim, x.dim());
  const Tensors out = apply_multiple(MaxAlong{d}, {x});
  const unsigned mask = x.dim() == 0 ? 0 : 1u << d;
  return {finish(out[0], x, mask, keepdim), finish(out[1], x, mask, keepdim)};
}

Tensor argmax(const Tensor& x, int dim, bool keepdim) {
  const int d = normalize_dim("argmax", dim, x.dim());
  return finish(apply(ArgMax{d}, {x}), x, x.dim() == 0 ? 0 : 1u << d, keepdim);
}

Tensor sum_to(const Tensor& x, const Shape& sizes) {
  if (x.shape() == sizes) return x;
  MT_CHECK(broadcast_shapes("sum_to", x.shape(), sizes) == x.shape(),
           "sum_to: expected a shape that broadcasts to ", x.shape(), ", got ", sizes);
  Shape kept = Shape::filled(x.dim() - sizes.size(), 1);
  for (const std::int64_t s : sizes) kept.push_back(s);
  const Tensor out = kept == x.shape() ? x : apply(SumTo{kept}, {x});
  return kept.size() == sizes.size() ? out : reshape(out, sizes);
}

Tensor Tensor::sum(const Shape& dims, bool keepdim) const {
  return mixtape::sum(*this, dims, keepdim);
}
Tensor Tensor::mean(const Shape& dims, bool keepdim) const {
  return mixtape::mean(*this, dims, keepdim);
}
Tensor Tensor::max() const { return mixtape::max(*this); }
Tensor Tensor::argmax(int dim, bool keepdim) const { return mixtape::argmax(*this, dim, keepdim); }

}  // namespace mixtape
