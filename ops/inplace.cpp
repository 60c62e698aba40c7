// In-place ops. Every one bumps the version counter of the memory, in grad mode or not.
//
// Outside the tape the kernel writes straight into the tensor. On the tape (a gradient flows
// through the target or the operand) the result is computed as usual, copied in, and the target
// takes over the result's history. A leaf that requires a gradient and a view cannot be written on
// the tape.
#include "engine/generator.h"
#include "engine/gradient_uses.h"
#include "engine/node.h"
#include "engine/tensor_detail.h"
#include "engine/transfer.h"
#include "kernels/elementwise.h"
#include "kernels/random.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

using kernels::BinaryOp;
using kernels::Operand;

bool records(const Tensor& target, const Tensor& operand) {
  if (GradientUses* uses = GradientUses::current()) [[unlikely]] {
    const Tensor read[] = {target, operand};
    uses->note(read);
  }
  return thread_state.grad && (target.requires_grad() || operand.requires_grad());
}

void check_writable(const char* op, const Tensor& target) {
  const View v = target.view();
  for (int d = 0; d < v.dim(); ++d) {
    MT_CHECK(v.sizes[d] <= 1 || v.strides[d] != 0, op,
             ": expected memory of its own for every element, got the expanded ", target.describe(),
             "; clone() it first");
  }
  MT_CHECK(!target.impl()->inference || thread_state.inference || !thread_state.grad ||
               !target.requires_grad(),
           op, ": ", target.describe(), " was made in inference mode");
}

void check_recordable(const char* op, const Tensor& target) {
  MT_CHECK(
      !(target.is_leaf() && target.requires_grad()), op,
      ": a leaf that requires a gradient is written in place while recording; use a NoGrad scope");
  MT_CHECK(!target.impl()->is_view, op,
           ": writing a view in place while recording is not supported: ", target.describe(),
           "; build the result with where(), cat() or an out-of-place op");
  MT_CHECK(is_floating(target.dtype()), op,
           ": expected a floating target for a recorded write, got ", target.describe());
}

/// Gives target the value and the history of `result`.
void take_over(const char* op, Tensor& target, const Tensor& result) {
  check_recordable(op, target);
  MT_CHECK_EQ(result.shape(), target.shape(), op, ": shape of the result written in place");
  const Tensor value = cast(result, target.dtype());
  detail::copy_into(target, value.detach());
  TensorImpl& impl = *target.impl();
  impl.storage->bump_recorded_writes();
  impl.grad_fn = value.impl()->grad_fn;
  impl.output_index = value.impl()->output_index;
}

void check_fits(const char* op, const Tensor& target, const Tensor& other) {
  MT_CHECK(target.device() == other.device(), op, ": expected an operand on ", target.device(),
           ", got ", other.describe());
  MT_CHECK(broadcast_shapes(op, target.shape(), other.shape()) == target.shape(), op,
           ": expected an operand that broadcasts to ", target.shape(), ", got ", other.describe());
}

Tensor& write(const char* op, Tensor& target, BinaryOp kind, const Operand& other, Dtype compute) {
  const OpScope scope(op);
  check_writable(op, target);
  kernels::binary(stream_of(target), kind, compute, target.view(), target.view(), other);
  target.impl()->storage->bump_version();
  return target;
}

Dtype inplace_compute(const char* op, const Tensor& target, Dtype result, BinaryOp kind) {
  if (kind == BinaryOp::div && !is_floating(result)) result = Dtype::f32;
  MT_CHECK(is_floating(target.dtype()) || !is_floating(result), op, ": a result of dtype ", result,
           " does not fit in ", target.describe());
  return compute_dtype(promote_types(result, target.dtype()));
}

Tensor& binary_(const char* op, Tensor& target, BinaryOp kind, const Tensor& other,
                Tensor (*function)(const Tensor&, const Tensor&)) {
  check_fits(op, target, other);
  if (records(target, other)) {
    check_recordable(op, target);
    take_over(op, target, function(target, other));
    return target;
  }
  // An operand that overlaps the target in another layout would be read after it was written.
  const bool overlaps = other.impl()->storage == target.impl()->storage && !other.same(target);
  const Tensor operand = overlaps ? other.detach().clone() : other;
  return write(op, target, kind, operand.view(),
               inplace_compute(op, target, result_dtype(target, other), kind));
}

Tensor& binary_(const char* op, Tensor& target, BinaryOp kind, const Scalar& other,
                Tensor (*function)(const Tensor&, const Scalar&)) {
  if (records(target, {})) {
    take_over(op, target, function(target, other));
    return target;
  }
  return write(op, target, kind, other,
               inplace_compute(op, target, promote_scalar(target.dtype(), other), kind));
}

template <class Draw>
Tensor& random_(const char* op, Tensor& target, Draw&& draw) {
  const OpScope scope(op);
  MT_CHECK(!records(target, {}), op, ": expected a tensor outside the tape, got ",
           target.describe(), "; use a NoGrad scope");
  check_floating(op, "a tensor", target);
  check_writable(op, target);
  const Tensor into = target.is_contiguous()
                          ? target
                          : Tensor::empty(target.shape(), target.dtype(), target.device());
  draw(into, draw_random(target.device(), target.numel()));
  if (!into.same(target)) kernels::copy(stream_of(target), target.view(), into.view());
  target.impl()->storage->bump_version();
  return target;
}

}  // namespace

Tensor& Tensor::copy_(const Tensor& source, bool non_blocking) {
  MT_CHECK(broadcast_shapes("copy_", shape(), source.shape()) == shape(),
           "copy_: expected a source that broadcasts to ", shape(), ", got ", source.describe());
  if (records(*this, source)) {
    check_recordable("copy_", *this);
    const Tensor value = mixtape::expand(source.to(device(), dtype(), non_blocking), shape());
    take_over("copy_", *this, value.same(source) ? value.clone() : value);
    return *this;
  }
  const OpScope scope("copy_");
  check_writable("copy_", *this);
  const bool overlaps = source.impl()->storage == impl_->storage && !source.same(*this);
  const Tensor from =
      (overlaps ? source.detach().clone() : source.detach()).to(device(), non_blocking);
  detail::copy_into(*this, from.expand(shape()));
  return *this;
}

Tensor& Tensor::fill_(const Scalar& value) {
  if (records(*this, {})) {
    take_over("fill_", *this,
              where(ones(shape(), {.dtype = Dtype::b8, .device = device()}), value, *this));
    return *this;
  }
  const OpScope scope("fill_");
  check_writable("fill_", *this);
  kernels::fill(stream_of(*this), view(), value);
  impl_->storage->bump_version();
  return *this;
}

#define MT_INPLACE(member, function)                                              \
  Tensor& Tensor::member(const Tensor& other) {                                   \
    return binary_(#member, *this, BinaryOp::function, other, mixtape::function); \
  }                                                                               \
  Tensor& Tensor::member(const Scalar& other) {                                   \
    return binary_(#member, *this, BinaryOp::function, other, mixtape::function); \
  }
MT_INPLACE(add_, add)
MT_INPLACE(sub_, sub)
MT_INPLACE(mul_, mul)
MT_INPLACE(div_, div)
#undef MT_INPLACE

Tensor& Tensor::clamp_(const Scalar& lo, const Scalar& hi) {
  if (records(*this, {})) {
    take_over("clamp_", *this, clamp(*this, lo.to<double>(), hi.to<double>()));
    return *this;
  }
  const OpScope scope("clamp_");
  check_writable("clamp_", *this);
  kernels::clamp(stream_of(*this), compute_dtype(dtype()), view(), view(), lo, hi);
  impl_->storage->bump_version();
  return *this;
}

Tensor& Tensor::relu_() {
  if (records(*this, {})) {
    take_over("relu_", *this, relu(*this));
    return *this;
  }
  const OpScope scope("relu_");
  check_writable("relu_", *this);
  kernels::unary(stream_of(*this), kernels::UnaryOp::relu, compute_dtype(dtype()), view(), view());
  impl_->storage->bump_version();
  return *this;
}

Tensor& Tensor::normal_(double mean, double std) {
  return random_("normal_", *this, [&](const Tensor& t, PhiloxState s) {
    kernels::normal(stream_of(t), t.view(), s, mean, std);
  });
}
Tensor& Tensor::uniform_(double lo, double hi) {
  return random_("uniform_", *this, [&](const Tensor& t, PhiloxState s) {
    kernels::uniform(stream_of(t), t.view(), s, lo, hi);
  });
}

}  // namespace mixtape
