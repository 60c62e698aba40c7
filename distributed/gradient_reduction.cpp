#include "distributed/gradient_reduction.h"

#include "engine/op.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace mixtape::distributed {
namespace {

constexpr float kFp16Sum = 0x1p14f;     // what the largest possible sum is scaled to
constexpr float kSmallest = 0x1p-100f;  // magnitudes below count as this one; no division by 0

Reduction reduce_in_full(GradientBucket& bucket, Communicator& group) {
  return {group.all_reduce_async(bucket.gradients, ReduceOp::avg), {}};
}

Reduction reduce_as_bf16(GradientBucket& bucket, Communicator& group) {
  const Tensor gradients = bucket.gradients;
  const Tensor sent = Tensor::empty(gradients.shape(), Dtype::bf16, gradients.device());
  sent.set_name(gradients.name());
  kernels::copy(Stream::current(gradients.device()), sent.view(), gradients.view());
  const float share = 1.0f / static_cast<float>(group.size());
  return {group.all_reduce_async(sent, ReduceOp::sum), [gradients, sent, share] {
            const Stream reader = Stream::current(gradients.device());
            sent.record_stream(reader);
            kernels::binary(reader, kernels::BinaryOp::mul, Dtype::f32, gradients.view(),
                            sent.view(), Scalar(share));
            gradients.impl()->storage->bump_version();
          }};
}

/// max |x|, at least kSmallest; NaN if there is one.
Tensor largest_magnitude(const Tensor& x) {
  const Stream stream = Stream::current(x.device());
  const Tensor largest = Tensor::empty({1}, Dtype::f32, x.device());
  const Tensor smallest = Tensor::empty({1}, Dtype::f32, x.device());
  const Scratch scratch(kernels::reduce_workspace_bytes(largest.view(), x.view()), x.device());
  kernels::reduce(stream, kernels::ReduceOp::max, largest.view(), x.view(),
                  {scratch.data(), scratch.bytes()});
  kernels::reduce(stream, kernels::ReduceOp::min, smallest.view(), x.view(),
                  {scratch.data(), scratch.bytes()});
  kernels::unary(stream, kernels::UnaryOp::neg, Dtype::f32, smallest.view(), smallest.view());
  kernels::binary(stream, kernels::BinaryOp::maximum, Dtype::f32, largest.view(), largest.view(),
                  smallest.view());
  kernels::binary(stream, kernels::BinaryOp::maximum, Dtype::f32, largest.view(), largest.view(),
                  Scalar(kSmallest));
  return largest;
}

Reduction reduce_as_fp16(GradientBucket& bucket, Communicator& group) {
  const Tensor gradients = bucket.gradients;
  const Stream stream = Stream::current(gradients.device());
  // A sum and no maximum: it bounds every element's sum, and NaN survives it on every rank.
  const Tensor bound = largest_magnitude(gradients);
  bound.set_name("scale of " + gradients.name());
  group.all_reduce(bound, ReduceOp::sum);
  const Tensor factor = Tensor::empty({1}, Dtype::f32, gradients.device());
  kernels::binary(stream, kernels::BinaryOp::div, Dtype::f32, factor.view(), Scalar(kFp16Sum),
                  bound.view());
  const Tensor sent = Tensor::empty(gradients.shape(), Dtype::f16, gradients.device());
  sent.set_name(gradients.name());
  kernels::binary(stream, kernels::BinaryOp::mul, Dtype::f32, sent.view(), gradients.view(),
                  factor.view());
  const float share = 1.0f / (kFp16Sum * static_cast<float>(group.size()));
  return {group.all_reduce_async(sent, ReduceOp::sum), [gradients, sent, bound, share] {
            const Stream reader = Stream::current(gradients.device());
            sent.record_stream(reader);
            bound.record_stream(reader);
            kernels::binary(reader, kernels::BinaryOp::mul, Dtype::f32, bound.view(), bound.view(),
                            Scalar(share));
            kernels::binary(reader, kernels::BinaryOp::mul, Dtype::f32, gradients.view(),
                            sent.view(), bound.view());
            gradients.impl()->storage->bump_version();
          }};
}

}  // namespace

CommHook make_comm_hook(Reduce reduce) {
  return [reduce](GradientBucket& bucket, Communicator& group) {
    if (reduce == Reduce::full || bucket.gradients.dtype() != Dtype::f32)
      return reduce_in_full(bucket, group);
    return reduce == Reduce::bf16 ? reduce_as_bf16(bucket, group) : reduce_as_fp16(bucket, group);
  };
}

}  // namespace mixtape::distributed
