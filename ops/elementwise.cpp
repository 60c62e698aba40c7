// Elementwise ops. The formulas and their derivatives are in kernels/elementwise_functors.h; this
// file wraps them once for all unary and once for all binary functors. Under create_graph the
// derivative is the functor instantiated with Tensor, which records itself.
#include "kernels/elementwise.h"

#include <limits>

#include "engine/cast_op.h"
#include "engine/grad_mode.h"
#include "engine/tensor_detail.h"
#include "ops/op_support.h"
#include "ops/tensor_math.h"

namespace mixtape {

using kernels::BinaryOp;
using kernels::Operand;
using kernels::UnaryOp;

namespace {

int kind(Dtype t) { return is_floating(t) ? 2 : t == Dtype::b8 ? 0 : 1; }

constexpr const char* kUnaryNames[] = {
#define MT_UNARY(function, Functor) #function,
#include "kernels/elementwise.def"
};
constexpr const char* kBinaryNames[] = {
#define MT_BINARY(function, Functor) #function,
#include "kernels/elementwise.def"
};

template <class F, UnaryOp K>
struct Unary {
  static constexpr OpInfo info{.name = kUnaryNames[static_cast<int>(K)],
                               .cast = F::kFull ? Cast::full : Cast::keep,
                               .higher_order = true};

  Metas infer(Inputs in) const {
    Dtype t = in[0].dtype();
    MT_CHECK(t != Dtype::b8, info.name, ": expected a numeric tensor, got ", in[0].describe());
    if (!F::kIntegral && !is_floating(t)) t = Dtype::f32;
    return {{in[0].shape(), t}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    follow_layout(out[0], in);
    kernels::unary(stream_of(in[0]), K, compute_dtype(out[0].dtype()), out[0].view(), in[0].view());
    if constexpr (F::kReads == functors::Reads::input) saved.value(in[0]);
    if constexpr (F::kReads == functors::Reads::output) saved.value(out[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    Tensor kept = dy[0];  // where nothing was saved, any tensor of this type will do
    if constexpr (F::kReads != functors::Reads::nothing) kept = saved[0];
    if (grad_enabled()) return dx[0].set(F::derivative(dy[0], kept));
    write_gradient(dx[0], dy[0], [&](const View& to) {
      kernels::unary_backward(stream_of(dy[0]), K, to, dy[0].view(), kept.view());
    });
  }
};

/// a and b are tensors or, where a tensor is undefined, the number kept here.
template <class F, BinaryOp K>
struct Binary {
  Scalar number;
  static constexpr OpInfo info{.name = kBinaryNames[static_cast<int>(K)],
                               .cast = F::kFull ? Cast::full : Cast::widest,
                               .differentiable = !F::kComparison,
                               .higher_order = true};

  Dtype operand_dtype(Inputs in) const {
    if (!in[0]) return promote_scalar(in[1].dtype(), number);
    if (!in[1]) return promote_scalar(in[0].dtype(), number);
    return result_dtype(in[0], in[1]);
  }
  Operand operand(const Tensor& t) const { return t ? Operand(t.view()) : Operand(number); }

  Metas infer(Inputs in) const {
    const Shape shape = !in[0]   ? in[1].shape()
                        : !in[1] ? in[0].shape()
                                 : broadcast_shapes(info.name, in[0].shape(), in[1].shape());
    Dtype t = operand_dtype(in);
    if constexpr (F::kComparison) return {{shape, Dtype::b8}};
    if (K == BinaryOp::div && !is_floating(t)) t = Dtype::f32;
    return {{shape, t}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    Dtype compute = compute_dtype(F::kComparison ? operand_dtype(in) : out[0].dtype());
    if (K == BinaryOp::pow && compute == Dtype::i64) compute = Dtype::f64;
    const Tensor& on = in[0] ? in[0] : in[1];
    follow_layout(out[0], in);
    kernels::binary(stream_of(on), K, compute, out[0].view(), operand(in[0]), operand(in[1]));
    const bool da = in[0].requires_grad(), db = in[1].requires_grad();
    const bool needs_a = (da && (F::kNeeds & 1)) || (db && (F::kNeeds & 4));
    const bool needs_b = (da && (F::kNeeds & 2)) || (db && (F::kNeeds & 8));
    if constexpr (F::kNeeds != 0) {
      saved.value(needs_a ? in[0] : Tensor());
      saved.value(needs_b ? in[1] : Tensor());
    }
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const requires(!F::kComparison) {
    Tensor a, b;
    if constexpr (F::kNeeds != 0) {
      a = saved[0];
      b = saved[1];
    }
    if (dx[0]) input_gradient<0>(dy[0], a, b, dx[0]);
    if (dx[1]) input_gradient<1>(dy[0], a, b, dx[1]);
  }

 private:
  template <int kInput>
  void input_gradient(const Tensor& dy, const Tensor& a, const Tensor& b, GradDst& dx) const {
    constexpr bool kPasses = K == BinaryOp::add || (K == BinaryOp::sub && kInput == 0);
    if constexpr (kPasses) {
      dx.set(sum_to(dy, dx.meta().shape));
    } else if (grad_enabled()) {
      const auto tensor_or = [&](const Tensor& t) {
        return t ? t : full({}, number, {.dtype = dy.dtype(), .device = dy.device()});
      };
      const Tensor ta = tensor_or(a), tb = tensor_or(b);
      const Tensor g = kInput == 0 ? F::derivative_a(dy, ta, tb) : F::derivative_b(dy, ta, tb);
      dx.set(sum_to(g, dx.meta().shape));
    } else if (dx.meta().shape == dy.shape()) {
      write_gradient(dx, dy, [&](const View& to) {
        kernels::binary_backward(stream_of(dy), K, kInput, to, dy.view(), operand(a), operand(b));
      });
    } else {  // summed afterwards, so kept in full precision
      const Tensor wide = Tensor::empty(dy.shape(), compute_dtype(dx.meta().dtype), dy.device());
      kernels::binary_backward(stream_of(dy), K, kInput, wide.view(), dy.view(), operand(a),
                               operand(b));
      dx.set(sum_to(wide, dx.meta().shape));
    }
  }
};

struct Where {
  Scalar number;  // stands for the undefined one of a, b
  static constexpr OpInfo info{.name = "where", .cast = Cast::widest, .higher_order = true};

  Metas infer(Inputs in) const {
    MT_CHECK(in[0].dtype() == Dtype::b8 || in[0].dtype() == Dtype::u8,
             "where: expected a bool condition, got ", in[0].describe());
    Shape shape = in[0].shape();
    for (const Tensor& t : in.subspan(1)) {
      if (t) shape = broadcast_shapes("where", shape, t.shape());
    }
    const Dtype t = !in[1]   ? promote_scalar(in[2].dtype(), number)
                    : !in[2] ? promote_scalar(in[1].dtype(), number)
                             : result_dtype(in[1], in[2]);
    return {{shape, t}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const auto operand = [&](const Tensor& t) { return t ? Operand(t.view()) : Operand(number); };
    follow_layout(out[0], in.subspan(1));
    kernels::where(stream_of(in[0]), compute_dtype(out[0].dtype()), out[0].view(), in[0].view(),
                   operand(in[1]), operand(in[2]));
    saved.value(in[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor condition = saved[0];
    if (dx[1]) dx[1].set(sum_to(where(condition, dy[0], Scalar(0)), dx[1].meta().shape));
    if (dx[2]) dx[2].set(sum_to(where(condition, Scalar(0), dy[0]), dx[2].meta().shape));
  }
};

struct Clamp {
  double lo, hi;
  static constexpr OpInfo info{.name = "clamp", .higher_order = true};

  Metas infer(Inputs in) const {
    MT_CHECK(in[0].dtype() != Dtype::b8, "clamp: expected a numeric tensor, got ",
             in[0].describe());
    return {meta_of(in[0])};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const bool whole = !is_floating(in[0].dtype());
    follow_layout(out[0], in);
    kernels::clamp(stream_of(in[0]), compute_dtype(in[0].dtype()), out[0].view(), in[0].view(),
                   bound(lo, whole), bound(hi, whole));
    saved.value(in[0]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor x = saved[0];
    if (grad_enabled()) {
      return dx[0].set(
          where(ge(x, Scalar(lo)), where(le(x, Scalar(hi)), dy[0], Scalar(0)), Scalar(0)));
    }
    write_gradient(dx[0], dy[0], [&](const View& to) {
      kernels::clamp_backward(stream_of(x), to, dy[0].view(), x.view(), lo, hi);
    });
  }

 private:
  static Scalar bound(double v, bool whole) {
    if (!whole) return v;
    if (v <= -0x1p63) return std::numeric_limits<std::int64_t>::min();
    if (v >= 0x1p63) return std::numeric_limits<std::int64_t>::max();
    return static_cast<std::int64_t>(v);
  }
};

}  // namespace

Dtype result_dtype(const Tensor& a, const Tensor& b) {
  if (a.dtype() == b.dtype() || (a.dim() > 0) == (b.dim() > 0))
    return promote_types(a.dtype(), b.dtype());
  const Tensor& array = a.dim() > 0 ? a : b;
  const Tensor& number = a.dim() > 0 ? b : a;
  return kind(number.dtype()) > kind(array.dtype()) ? number.dtype() : array.dtype();
}

#define MT_UNARY(function, Functor)                                   \
  Tensor function(const Tensor& x) {                                  \
    return apply(Unary<functors::Functor, UnaryOp::function>{}, {x}); \
  }
#define MT_BINARY(function, Functor)                                               \
  Tensor function(const Tensor& a, const Tensor& b) {                              \
    return apply(Binary<functors::Functor, BinaryOp::function>{{}}, {a, b});       \
  }                                                                                \
  Tensor function(const Tensor& a, const Scalar& b) {                              \
    return apply(Binary<functors::Functor, BinaryOp::function>{b}, {a, Tensor()}); \
  }                                                                                \
  Tensor function(const Scalar& a, const Tensor& b) {                              \
    return apply(Binary<functors::Functor, BinaryOp::function>{a}, {Tensor(), b}); \
  }
#include "kernels/elementwise.def"

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return apply(Where{}, {condition, a, b});
}
Tensor where(const Tensor& condition, const Tensor& a, const Scalar& b) {
  return apply(Where{b}, {condition, a, Tensor()});
}
Tensor where(const Tensor& condition, const Scalar& a, const Tensor& b) {
  return apply(Where{a}, {condition, Tensor(), b});
}

Tensor clamp(const Tensor& x, std::optional<double> lo, std::optional<double> hi) {
  MT_CHECK(lo || hi, "clamp: expected at least one bound, got none");
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return apply(Clamp{lo.value_or(-kInfinity), hi.value_or(kInfinity)}, {x});
}

Tensor cast(const Tensor& x, Dtype dtype) {
  return x.dtype() == dtype ? x : apply(CastOp{dtype}, {x});
}

namespace detail {

Tensor add_tensors(const Tensor& a, const Tensor& b) { return add(a, b); }
Tensor cast_tensor(const Tensor& t, Dtype dtype) { return cast(t, dtype); }
void copy_into(const Tensor& target, const Tensor& source) {
  kernels::copy(stream_of(target), target.view(), source.view());
  target.impl()->storage->bump_version();
}
void accumulate_into(const Tensor& target, const Tensor& source) {
  kernels::binary(stream_of(target), BinaryOp::add, compute_dtype(target.dtype()), target.view(),
                  target.view(), source.view());
  target.impl()->storage->bump_version();
}

}  // namespace detail
}  // namespace mixtape
